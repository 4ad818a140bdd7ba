"""Dynamic sampling (DAPO, arXiv 2503.14476) and groups that grow: completions go to groups whose rewards differ.

A group whose rewards are all equal has zero advantage. Its place in the generation batch goes to another prompt's
group, for a few rounds at most. The further prompts come from a stream of their own, which goes through the whole
dataset in a random order before any prompt comes a second time, or from `prompt_selection`.
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
    """`(N,)`: weighted sum over the functions that returned a reward; NaN if none did (as in TRL)."""
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
    """The rows of a result of `GRPOTrainer._generate` for text prompts, with what reward functions logged for each."""
    prompt_ids, completion_ids, _, completions, logprobs, *_ = generated
    logprobs = [None] * len(prompt_ids) if logprobs is None else logprobs
    columns = {name: values for name, values in extras.items() if len(values) == len(prompt_ids)}
    logged = [{name: values[i] for name, values in columns.items()} for i in range(len(prompt_ids))]
    return [DrawnRow(*row) for row in zip(prompt_ids, completion_ids, completions, logprobs, logged, strict=True)]


class ChosenRows(list):
    """Dataset rows of this rank, one for each completion to be drawn.

    `indices`: the prompts of all ranks' groups, in order.
    """

    def __init__(self, rows: Sequence[dict], indices: Sequence[int]):
        super().__init__(rows)
        self.indices = list(indices)


class ScoredRows(list):
    """Dataset rows of this rank, one for each completion, with the `drawn` completions and all ranks' `rewards_NK`.

    Groups are whole, spread over the ranks in equal parts and in order. These rows replace the inputs of TRL's
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

    With `each` the functions are normalised one by one, so one of them is enough; otherwise their weighted sum has to
    differ.
    """
    weighted_NK = rewards_NK * weights_K.to(rewards_NK) if each else combine(rewards_NK, weights_K)[:, None]
    groups = weighted_NK.unflatten(0, (-1, group_size))
    highest = groups.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
    lowest = groups.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(1)
    return (highest > lowest).any(1)


class DynamicSampling:
    """Builds the groups of a generation batch in rounds, on all ranks together.

    - `num_generations_first`: a group first has that many completions, and grows to `num_generations` only if their
      rewards differ. One that does not grow keeps its place with its completions repeated, whose advantages are zero.
    - `dynamic_sampling`: a zero-variance group gives its place to another prompt's, which is drawn in the same way.

    Which prompts are trained on depends on their first completions; the statistics of a group are those of all its
    completions. With rewards of 0 and 1 the expected gradient of a prompt stays a multiple of ∇p whatever groups are
    left out by their rewards, since E[∇ log π | reward] is one. Only the weight of that prompt is another: for groups
    whose first F differ it is higher at middling p.

    Attributes:
        taken: further prompts since the start of the run; a checkpoint keeps it, the same on every rank.
    """

    def __init__(
        self,
        args: Any,
        dataset: Sequence[dict],
        accelerator: Accelerator,
        weights_K: torch.Tensor,
        choose: Callable[[int], list[int]] | None = None,
    ):
        self.args = args
        self.dataset = dataset
        self.accelerator = accelerator
        self.taken = 0
        self.next_prompts = choose or self.in_random_order
        each = args.multi_objective_aggregation == "normalize_then_sum"
        self._varied = partial(groups_with_variance, weights_K=weights_K, each=each)

    @property
    def is_on(self) -> bool:
        return self.args.dynamic_sampling or self.args.num_generations_first is not None

    def in_random_order(self, count: int) -> list[int]:
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

    def _draw(
        self, prompts: list[dict], indices: list[int] | None, count: int, draw: Callable
    ) -> tuple[list, torch.Tensor]:
        """Draw `count` completions of each of `prompts` on all ranks; return them and their rewards in order.

        Collective.
        """
        rank = self.accelerator.process_index
        ranks = self.accelerator.num_processes
        wanted = len(prompts) * count
        groups = list(range(len(prompts)))
        while len(groups) * count % ranks:  # as many rows for every rank
            groups.append(groups[-1])
        mine = len(groups) * count // ranks
        rows = [prompts[groups[i // count]] for i in range(rank * mine, (rank + 1) * mine)]
        if indices is not None:
            rows = ChosenRows(rows, [indices[group] for group in groups])
        scored = draw(rows, count)
        drawn = gather_object(scored.drawn) if ranks > 1 else scored.drawn
        return drawn[:wanted], scored.rewards_NK[:wanted]

    def fill(
        self, inputs: list[dict], draw: Callable[[list[dict], int], ScoredRows]
    ) -> tuple[ScoredRows, dict[str, float]]:
        """Rows to train on, drawn for `inputs` or, in the place of a zero-variance group, for others; and metrics.
        Collective.

        Args:
            inputs: dataset rows of this rank; a group may lie on two ranks.
            draw: completions and rewards for these rows of this rank, so many of each prompt; collective.
        """
        size = self.args.num_generations
        rank = self.accelerator.process_index
        ranks = self.accelerator.num_processes
        first = self.args.num_generations_first or size
        indices = getattr(inputs, "indices", None)
        prompts = (gather_object(list(inputs)) if ranks > 1 else list(inputs))[::size]
        drawn, rewards_NK = self._draw(prompts, indices, first, draw)
        places = [drawn[i : i + first] for i in range(0, len(drawn), first)]
        rewards = list(rewards_NK.split(first))
        varied = self._varied(rewards_NK, group_size=first).tolist()
        metrics = dict.fromkeys(("rounds", "further_prompts", "surplus_groups"), 0.0)
        rounds = self.args.dynamic_sampling_max_rounds if self.args.dynamic_sampling else 0
        while not all(varied) and metrics["rounds"] < rounds:
            groups = varied.count(False)
            while groups * first % ranks:  # as many rows for every rank
                groups += 1
            chosen = self.next_prompts(groups)
            further = [{name: row[name] for name in prompts[0]} for row in (self.dataset[i] for i in chosen)]
            drawn, rewards_NK = self._draw(further, None if indices is None else chosen, first, draw)
            sources = self._varied(rewards_NK, group_size=first).nonzero()[:, 0].tolist()
            slots = [slot for slot, is_varied in enumerate(varied) if not is_varied]
            for slot, source in zip(slots, sources, strict=False):
                prompts[slot] = further[source]
                varied[slot] = True
                places[slot] = drawn[source * first : (source + 1) * first]
                rewards[slot] = rewards_NK[source * first : (source + 1) * first]
                if indices is not None:
                    indices[slot] = chosen[source]
            metrics["rounds"] += 1
            metrics["further_prompts"] += groups
            metrics["surplus_groups"] += max(0, len(sources) - len(slots))
        if first < size:
            self._grow(places, rewards, prompts, indices, varied, draw)
        metrics["frac_zero_variance"] = varied.count(False) / len(varied)
        if metrics["frac_zero_variance"] and rounds:
            logger.warning_once(
                f"dynamic_sampling: after {rounds} rounds some groups still have equal "
                "rewards and stay in the batch; dynamic_sampling/frac_zero_variance says how many. Raise "
                "dynamic_sampling_max_rounds for more; where it stays at 1, look at the rewards of a few completions"
            )
        mine = range(rank * len(inputs), (rank + 1) * len(inputs))
        rows = [prompts[i // size] for i in mine]
        part = ScoredRows(rows, [places[i // size][i % size] for i in mine], torch.cat(rewards))
        return part, {f"dynamic_sampling/{k}": v for k, v in metrics.items()}

    def _grow(
        self, places: list[list], rewards: list[torch.Tensor], prompts: list[dict], indices: list[int] | None,
        varied: list[bool], draw: Callable,
    ) -> None:  # fmt: skip
        """Complete the groups in `places`: those that `varied` by further completions, the others by their own.
        Collective.
        """
        size = self.args.num_generations
        first = self.args.num_generations_first
        slots = [slot for slot, is_varied in enumerate(varied) if is_varied]
        if slots:
            chosen = None if indices is None else [indices[slot] for slot in slots]
            drawn, rewards_NK = self._draw([prompts[slot] for slot in slots], chosen, size - first, draw)
            for k, slot in enumerate(slots):
                places[slot] = places[slot] + drawn[k * (size - first) : (k + 1) * (size - first)]
                rewards[slot] = torch.cat([rewards[slot], rewards_NK[k * (size - first) : (k + 1) * (size - first)]])
        for slot, is_varied in enumerate(varied):
            if not is_varied:
                repeated = torch.arange(size, device=rewards[slot].device) % first
                places[slot] = [places[slot][i] for i in repeated.tolist()]
                rewards[slot] = rewards[slot][repeated]
