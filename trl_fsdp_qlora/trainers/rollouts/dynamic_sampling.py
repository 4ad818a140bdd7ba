"""Dynamic sampling (DAPO, arXiv 2503.14476): completions go to groups whose rewards differ.

A group whose rewards are all equal has zero advantage. Its place in the generation batch goes to another prompt's
group, for a few rounds at most. The further prompts come from a stream of their own, which goes through the whole
dataset in a random order before any prompt comes a second time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ...compat.trl_rollouts import Generated

logger = get_logger(__name__)


def combine(rewards_NK: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """`(N,)`: weighted sum over the functions that returned a reward; NaN if none did (as in TRL)."""
    total_N = (rewards_NK * weights_K.to(rewards_NK)).nansum(1)
    return total_N.masked_fill(rewards_NK.isnan().all(1), torch.nan)


class DrawnRow(NamedTuple):
    """One completion of `GRPOTrainer._generate`, and the columns that reward functions logged for it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion: str | list[dict]
    logprobs: list[float] | None
    extras: dict[str, Any]


def to_rows(generated: Generated, extras: dict[str, list]) -> list[DrawnRow]:
    """Split a result of `GRPOTrainer._generate` for text prompts, and the columns of `extras`, into rows."""
    count = len(generated.prompt_ids)
    logprobs = [None] * count if generated.logprobs is None else generated.logprobs
    columns = {name: values for name, values in extras.items() if len(values) == count}
    logged = [{name: values[i] for name, values in columns.items()} for i in range(count)]
    parts = (generated.prompt_ids, generated.completion_ids, generated.completions, logprobs, logged)
    return [DrawnRow(*row) for row in zip(*parts, strict=True)]


class ScoredRows(list):
    """Dataset rows of this rank, one for each completion, with the `drawn` completions and all ranks' `rewards_NK`.

    Groups are whole, spread over the ranks in equal parts and in order. These rows replace the inputs of TRL's
    `_generate_and_score_completions`.
    """

    def __init__(self, rows: list[dict], drawn: list, rewards_NK: torch.Tensor):
        super().__init__(rows)
        self.drawn = drawn
        self.rewards_NK = rewards_NK

    def generated(self) -> Generated:
        """The rows as `GRPOTrainer._generate` would return them."""
        rows = self.drawn
        return Generated(
            prompt_ids=[row.prompt_ids for row in rows],
            completion_ids=[row.completion_ids for row in rows],
            tool_mask=None,
            completions=[row.completion for row in rows],
            logprobs=None if rows[0].logprobs is None else [row.logprobs for row in rows],
            extra_fields={},
            images=None,
            tool_images=[],
        )

    def extras(self) -> dict[str, list]:
        """Columns that reward functions logged, with `None` for rows without."""
        names = sorted({name for row in self.drawn for name in row.extras})
        return {name: [row.extras.get(name) for row in self.drawn] for name in names}


def groups_with_variance(
    rewards_NK: torch.Tensor, weights_K: torch.Tensor, group_size: int, normalizes_each: bool
) -> torch.Tensor:
    """Mask `(N / group_size,)` of the groups whose rewards differ; completions without any reward (NaN) do not count.

    If the functions are normalised one by one (`normalizes_each`), one of them is enough; otherwise their weighted sum
    has to differ.
    """
    weighted_NK = rewards_NK * weights_K.to(rewards_NK) if normalizes_each else combine(rewards_NK, weights_K)[:, None]
    groups = weighted_NK.unflatten(0, (-1, group_size))
    highest = groups.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
    lowest = groups.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(1)
    return (highest > lowest).any(1)


@dataclass
class _Groups:
    """The groups of a generation batch, on all ranks.

    Attributes:
        prompts: dataset row of each group.
        completions: completions of each group.
        rewards: their rewards `(G, K)`.
        varied: whether the rewards differ.
    """

    prompts: list[dict]
    completions: list[list]
    rewards: list[torch.Tensor]
    varied: list[bool]


class DynamicSampling:
    """Builds the groups of a generation batch in rounds, on all ranks together.

    A zero-variance group is replaced by another prompt's group. Which prompts are trained on depends on their
    completions. With rewards of 0 and 1 the expected gradient of a prompt stays a multiple of ∇p, because
    E[∇ log π | reward] is a multiple of ∇p; only the weight of the prompt changes.

    Attributes:
        taken: number of further prompts drawn since the start of the run. It is the same on every rank, and a
            checkpoint keeps it.
    """

    def __init__(self, args: Any, dataset: Sequence[dict], accelerator: Accelerator, weights_K: torch.Tensor):
        self.args = args
        self.dataset = dataset
        self.accelerator = accelerator
        self.taken = 0
        self._varied = partial(
            groups_with_variance,
            weights_K=weights_K,
            group_size=args.num_generations,
            normalizes_each=args.multi_objective_aggregation == "normalize_then_sum",
        )

    def next_prompts(self, count: int) -> list[int]:
        """Indices of the next `count` further prompts."""
        indices = []
        while len(indices) < count:
            passes, start = divmod(self.taken, len(self.dataset))
            generator = torch.Generator().manual_seed((self.args.seed << 20) + passes)
            order = torch.randperm(len(self.dataset), generator=generator)
            part = order[start : start + count - len(indices)].tolist()
            indices += part
            self.taken += len(part)
        return indices

    def _draw(self, prompts: list[dict], draw: Callable) -> tuple[list, torch.Tensor]:
        """Draw a group for each of `prompts` on all ranks; return the completions and their rewards in order.

        Collective.
        """
        size = self.args.num_generations
        rank = self.accelerator.process_index
        ranks = self.accelerator.num_processes
        groups = list(range(len(prompts)))
        while len(groups) * size % ranks:  # every rank draws the same number of rows
            groups.append(groups[-1])
        per_rank = len(groups) * size // ranks
        scored = draw([prompts[groups[i // size]] for i in range(rank * per_rank, (rank + 1) * per_rank)])
        drawn = gather_object(scored.drawn) if ranks > 1 else scored.drawn
        needed = len(prompts) * size
        return drawn[:needed], scored.rewards_NK[:needed]

    def fill(
        self, inputs: list[dict], draw: Callable[[list[dict]], ScoredRows]
    ) -> tuple[ScoredRows, dict[str, float]]:
        """Draw the groups to train on, replace those without variance by other prompts' groups, and return metrics.

        Collective.

        Args:
            inputs: dataset rows of this rank; a group may be on two ranks.
            draw: returns completions and rewards for rows of this rank, in which each prompt's `num_generations` rows
                are neighbours; collective.
        """
        size = self.args.num_generations
        rank = self.accelerator.process_index
        ranks = self.accelerator.num_processes
        prompts = (gather_object(list(inputs)) if ranks > 1 else list(inputs))[::size]
        drawn, rewards_NK = self._draw(prompts, draw)
        completions = [drawn[i : i + size] for i in range(0, len(drawn), size)]
        groups = _Groups(prompts, completions, list(rewards_NK.split(size)), self._varied(rewards_NK).tolist())
        metrics = {"rounds": 0.0, "further_prompts": 0.0, "surplus_groups": 0.0}
        max_rounds = self.args.dynamic_sampling_max_rounds
        while not all(groups.varied) and metrics["rounds"] < max_rounds:
            further, surplus = self._replace(groups, draw)
            metrics["rounds"] += 1
            metrics["further_prompts"] += further
            metrics["surplus_groups"] += surplus
        metrics["frac_zero_variance"] = groups.varied.count(False) / len(groups.varied)
        if metrics["frac_zero_variance"] and max_rounds:
            logger.warning_once(
                f"dynamic_sampling: after {max_rounds} rounds some groups still have equal rewards and stay in the "
                "batch; the metric dynamic_sampling/frac_zero_variance is their fraction. Raise "
                "dynamic_sampling_max_rounds to lower it; if it stays at 1, look at the rewards of a few completions"
            )
        rows_of_rank = range(rank * len(inputs), (rank + 1) * len(inputs))
        rows = [groups.prompts[i // size] for i in rows_of_rank]
        drawn_of_rank = [groups.completions[i // size][i % size] for i in rows_of_rank]
        prefixed = {f"dynamic_sampling/{name}": value for name, value in metrics.items()}
        return ScoredRows(rows, drawn_of_rank, torch.cat(groups.rewards)), prefixed

    def _replace(self, groups: _Groups, draw: Callable) -> tuple[int, int]:
        """Draw one round of further prompts, and replace zero-variance groups by those whose rewards differ.

        Collective.

        Returns:
            The number of further prompts, and of their groups that differ but found no group to replace.
        """
        size = self.args.num_generations
        count = groups.varied.count(False)
        while count * size % self.accelerator.num_processes:  # every rank draws the same number of rows
            count += 1
        columns = list(groups.prompts[0])
        further_rows = [self.dataset[index] for index in self.next_prompts(count)]
        further = [{name: row[name] for name in columns} for row in further_rows]
        drawn, rewards_NK = self._draw(further, draw)
        sources = self._varied(rewards_NK).nonzero()[:, 0].tolist()
        slots = [slot for slot, is_varied in enumerate(groups.varied) if not is_varied]
        for slot, source in zip(slots, sources, strict=False):
            rows = slice(source * size, (source + 1) * size)
            groups.prompts[slot] = further[source]
            groups.completions[slot] = drawn[rows]
            groups.rewards[slot] = rewards_NK[rows]
            groups.varied[slot] = True
        return count, max(0, len(sources) - len(slots))
