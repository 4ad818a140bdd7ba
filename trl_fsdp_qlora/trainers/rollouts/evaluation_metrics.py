"""Metrics of an evaluation that a user's function computes from its completions."""

from collections.abc import Callable

import torch
from accelerate.utils import gather_object

from ...utils.nonfatal import nonfatal
from ...utils.ranks import on_main

# Columns that a function does not get: TRL's own names, and pictures, which every rank would have to send.
_NOT_COLUMNS = {"prompt", "completion", "completion_ids", "image", "images"}

CompletionMetrics = Callable[..., dict[str, float]]


class EvaluationMetrics:
    """Calls `function` once per evaluation with what all ranks have drawn and how it was rewarded.

    It gets lists with an entry per completion, as a reward function does: `prompts`, `completions`, every column of
    the dataset, and `rewards`, which has such a list for each reward function by its name. Only the main rank calls
    it, so that all ranks have the same values. If it fails, a warning is logged and the evaluation goes without them.

    Args:
        function: returns metrics by name; `None` if the user has given none.
        reward_names: of the reward functions.
    """

    def __init__(self, function: CompletionMetrics | None, reward_names: list[str]):
        self.function = function
        self.reward_names = reward_names
        self._rows: list[list[dict]] = []  # of this rank, by batch
        self._rewards_NK: list[torch.Tensor] = []  # of all ranks, by batch

    def begin(self) -> None:
        """Forget what an evaluation has collected that broke off."""
        self._rows = []
        self._rewards_NK = []

    def add(self, rows: list[dict], prompts: list, completions: list, rewards_NK: torch.Tensor) -> None:
        """Collect a batch: this rank's rows, prompts and completions, and the rewards of all ranks."""
        if self.function is None:
            return
        batch = []
        for row, prompt, completion in zip(rows, prompts, completions, strict=True):
            columns = {name: value for name, value in row.items() if name not in _NOT_COLUMNS}
            batch.append({**columns, "prompts": prompt, "completions": completion})
        self._rows.append(batch)
        self._rewards_NK.append(rewards_NK.cpu())

    def take(self, count: int | None) -> dict[str, float]:
        """The metrics of the evaluation that has ended. Collective.

        `count` is the number of its completions; batches that ranks have filled up with further rows are cut there.
        """
        if self.function is None or not self._rewards_NK:
            return {}
        batches_of_ranks = gather_object([self._rows])
        # In the order of TRL's sampler: batch by batch, and in each batch rank by rank.
        rows = []
        for batch_of_ranks in zip(*batches_of_ranks, strict=True):
            for batch in batch_of_ranks:
                rows += batch
        rewards_NK = torch.cat(self._rewards_NK)
        self.begin()
        return on_main(lambda: self._call(rows[:count], rewards_NK[:count])) or {}

    @nonfatal("compute_metrics")
    def _call(self, rows: list[dict], rewards_NK: torch.Tensor) -> dict[str, float]:
        arguments = {}
        for name in rows[0]:
            arguments[name] = [row[name] for row in rows]
        arguments["rewards"] = dict(zip(self.reward_names, rewards_NK.T.tolist(), strict=True))
        metrics = self.function(**arguments)
        return {name: float(value) for name, value in metrics.items()}
