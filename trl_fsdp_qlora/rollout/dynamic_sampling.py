"""Dynamic sampling (DAPO, arXiv 2503.14476): further prompts in place of groups with zero variance.

A group whose rewards are all equal has zero advantage. Its place in the generation batch goes to another prompt's group, for a
few rounds at most. The further prompts come from a stream of their own, which goes through the whole dataset in a random
order before any prompt comes a second time.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object

logger = get_logger(__name__)


def combine(rewards_NK: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """`(N,)`: weighted sum over the functions that gave one; NaN where none did (as in TRL)."""
    total_N = (rewards_NK * weights_K.to(rewards_NK)).nansum(1)
    return total_N.masked_fill(rewards_NK.isnan().all(1), torch.nan)


class DrawnRow(NamedTuple):
    """One completion of `GRPOTrainer._generate`, and what its reward functions logged for it."""

    prompt_ids: list[int]
    completion_ids: list[int]
    completion: str | list[dict]
    logprobs: list[float] | None
    extras: dict[str, Any]


def to_rows(generated: tuple, extras: dict[str, list]) -> list[DrawnRow]:
    """What `GRPOTrainer._generate` returned for text prompts, and the columns that reward functions logged, by row."""
    prompt_ids, completion_ids, _, completions, logprobs, *_ = generated
    logprobs = [None] * len(prompt_ids) if logprobs is None else logprobs
    columns = {name: values for name, values in extras.items() if len(values) == len(prompt_ids)}
    logged = [{name: values[i] for name, values in columns.items()} for i in range(len(prompt_ids))]
    return [DrawnRow(*row) for row in zip(prompt_ids, completion_ids, completions, logprobs, logged, strict=True)]


class ScoredRows(list):
    """Dataset rows of this rank, one for each completion, with what was drawn for them, `drawn`, and all ranks' `rewards_NK`.

    Groups are whole, spread over the ranks in equal parts and in order. In the place of the inputs of TRL's
    `_generate_and_score_completions`.
    """

    def __init__(self, rows: list[dict], drawn: list, rewards_NK: torch.Tensor):
        super().__init__(rows)
        self.drawn, self.rewards_NK = drawn, rewards_NK

    def generated(self) -> tuple:
        """The rows as `GRPOTrainer._generate` would return them."""
        rows = self.drawn
        logprobs = None if rows[0].logprobs is None else [row.logprobs for row in rows]
        ids = [row.prompt_ids for row in rows], [row.completion_ids for row in rows]
        return *ids, None, [row.completion for row in rows], logprobs, {}, None, []

    def extras(self) -> dict[str, list]:
        """Columns that reward functions logged, with `None` for rows without."""
        names = sorted({name for row in self.drawn for name in row.extras})
        return {name: [row.extras.get(name) for row in self.drawn] for name in names}


def groups_with_variance(
    rewards_NK: torch.Tensor, weights_K: torch.Tensor, group_size: int, each: bool
) -> torch.Tensor:
    """Which groups have rewards that differ, `(N / group_size,)`; completions without any reward (NaN) do not count.

    With `each` the functions are normalised one by one, so one of them is enough; otherwise their weighted sum has to differ.
    """
    weighted_NK = rewards_NK * weights_K.to(rewards_NK) if each else combine(rewards_NK, weights_K)[:, None]
    groups = weighted_NK.unflatten(0, (-1, group_size))
    highest = groups.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
    lowest = groups.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(1)
    return (highest > lowest).any(1)


class DynamicSampling:
    """Replaces zero-variance groups of a generation batch by groups of further prompts, of the rows of `dataset`.

    Attributes:
        taken: further prompts since the start of the run; a checkpoint keeps it, the same on every rank.
    """

    def __init__(self, args: Any, dataset: Sequence[dict], accelerator: Accelerator, weights_K: torch.Tensor):
        self.args, self.dataset, self.accelerator, self.taken = args, dataset, accelerator, 0
        each = args.multi_objective_aggregation == "normalize_then_sum"
        self._varied = partial(groups_with_variance, weights_K=weights_K, group_size=args.num_generations, each=each)

    def next_prompts(self, count: int) -> list[int]:
        """Indices of the next `count` further prompts."""
        found = []
        while len(found) < count:
            passes, place = divmod(self.taken, len(self.dataset))
            generator = torch.Generator().manual_seed((self.args.seed << 20) + passes)
            order = torch.randperm(len(self.dataset), generator=generator)
            part = order[place : place + count - len(found)].tolist()
            found += part
            self.taken += len(part)
        return found

    def fill(
        self, inputs: list[dict], draw: Callable[[list[dict]], ScoredRows]
    ) -> tuple[ScoredRows, dict[str, float]]:
        """Rows to train on, drawn for `inputs` or, in the place of a zero-variance group, for others; and metrics. Collective.

        Args:
            inputs: dataset rows of this rank; a group may lie on two ranks.
            draw: completions and rewards for these rows of this rank; collective.
        """
        size, rank, ranks = self.args.num_generations, self.accelerator.process_index, self.accelerator.num_processes
        batch = draw(inputs)
        rows, drawn, rewards_NK = list(batch), list(batch.drawn), batch.rewards_NK.clone()
        varied_G = self._varied(rewards_NK)
        metrics = dict.fromkeys(("rounds", "further_prompts", "surplus_groups"), 0.0)
        start = rank * len(rows)
        while not varied_G.all() and metrics["rounds"] < self.args.dynamic_sampling_max_rounds:
            groups = int((~varied_G).sum())
            while groups * size % ranks:  # as many rows for every rank
                groups += 1
            further = [self.dataset[i] for i in self.next_prompts(groups)]
            further = [{name: row[name] for name in inputs[0]} for row in further for _ in range(size)]
            mine = len(further) // ranks
            found = draw(further[rank * mine : (rank + 1) * mine])
            all_drawn = gather_object(found.drawn) if ranks > 1 else found.drawn
            sources = self._varied(found.rewards_NK).nonzero()[:, 0].tolist()
            slots = (~varied_G).nonzero()[:, 0].tolist()
            for slot, source in zip(slots, sources, strict=False):
                for k in range(size):
                    to, of = slot * size + k, source * size + k
                    rewards_NK[to] = found.rewards_NK[of]
                    if 0 <= to - start < len(rows):
                        rows[to - start], drawn[to - start] = further[of], all_drawn[of]
                varied_G[slot] = True
            metrics["rounds"] += 1
            metrics["further_prompts"] += groups
            metrics["surplus_groups"] += max(0, len(sources) - len(slots))
        metrics["frac_zero_variance"] = (~varied_G).float().mean().item()
        if metrics["frac_zero_variance"]:
            logger.warning_once(
                f"dynamic_sampling: after {self.args.dynamic_sampling_max_rounds} rounds some groups still have equal "
                "rewards and stay in the batch; dynamic_sampling/frac_zero_variance says how many. Raise "
                "dynamic_sampling_max_rounds for more; where it stays at 1, look at the rewards of a few completions"
            )
        return ScoredRows(rows, drawn, rewards_NK), {f"dynamic_sampling/{k}": v for k, v in metrics.items()}
