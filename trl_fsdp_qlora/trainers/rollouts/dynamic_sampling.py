"""Dynamic sampling (DAPO, arXiv 2503.14476): completions go to groups whose rewards differ.

A group whose rewards are all equal has zero advantage. Its place in the generation batch goes to another prompt's
group, for a few rounds at most. The further prompts come from a stream of their own, which goes through the whole
dataset in a random order before any prompt comes a second time.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from ...compat.trl_rollouts import Generated

if TYPE_CHECKING:
    from trl import GRPOConfig

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
    extras: dict[str, object]


def to_rows(generated: Generated, extras: dict[str, list]) -> list[DrawnRow]:
    """Split a result of `GRPOTrainer._generate` for text prompts, and the columns of `extras`, into rows."""
    count = len(generated.prompt_ids)
    columns = {name: values for name, values in extras.items() if len(values) == count}
    rows = []
    for i in range(count):
        row = DrawnRow(
            prompt_ids=generated.prompt_ids[i],
            completion_ids=generated.completion_ids[i],
            completion=generated.completions[i],
            logprobs=None if generated.logprobs is None else generated.logprobs[i],
            extras={name: values[i] for name, values in columns.items()},
        )
        rows.append(row)
    return rows


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
    if normalizes_each:
        weighted_NK = rewards_NK * weights_K.to(rewards_NK)
    else:
        weighted_NK = combine(rewards_NK, weights_K).unsqueeze(1)
    groups = weighted_NK.unflatten(0, (-1, group_size))
    highest = groups.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
    lowest = groups.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(1)
    return (highest > lowest).any(1)


Draw = Callable[[list[dict]], ScoredRows]
IsVaried = Callable[[torch.Tensor], torch.Tensor]


class _Group(NamedTuple):
    """A prompt's completions, from all ranks: its dataset row, rewards `(G, K)`, and whether the rewards differ."""

    prompt: dict
    completions: list
    rewards_GK: torch.Tensor
    is_varied: bool


class DynamicSampling:
    """Builds the groups of a generation batch in rounds, on all ranks together.

    A zero-variance group is replaced by another prompt's group. Which prompts are trained on depends on their
    completions. With rewards of 0 and 1 the expected gradient of a prompt stays a multiple of ∇p, because
    E[∇ log π | reward] is a multiple of ∇p; only the weight of the prompt changes.

    Attributes:
        taken: number of further prompts drawn since the start of the run. It is the same on every rank, and a
            checkpoint keeps it.
    """

    def __init__(self, args: "GRPOConfig", dataset: Sequence[dict], accelerator: Accelerator):
        self.args = args
        self.dataset = dataset
        self.accelerator = accelerator
        self.taken = 0

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

    def _draw(self, prompts: list[dict], draw: Draw, is_varied: IsVaried) -> list[_Group]:
        """Draw a group for each of `prompts` on all ranks. Collective."""
        size = self.args.num_generations
        rank = self.accelerator.process_index
        ranks = self.accelerator.num_processes
        missing = self._fill_up(len(prompts)) - len(prompts)
        padded = [*prompts, *prompts[-1:] * missing]  # every rank draws the same number of rows
        per_rank = len(padded) * size // ranks
        first = rank * per_rank
        rows_of_rank = [padded[i // size] for i in range(first, first + per_rank)]
        scored = draw(rows_of_rank)
        drawn = gather_object(scored.drawn) if ranks > 1 else scored.drawn
        rewards_NK = scored.rewards_NK[: len(prompts) * size]
        varied = is_varied(rewards_NK).tolist()
        groups = []
        for i, prompt in enumerate(prompts):
            rows = slice(i * size, (i + 1) * size)
            groups.append(_Group(prompt, drawn[rows], rewards_NK[rows], varied[i]))
        return groups

    def fill(self, inputs: list[dict], draw: Draw, is_varied: IsVaried) -> tuple[ScoredRows, dict[str, float]]:
        """Draw the groups to train on, replace those without variance by other prompts' groups, and return metrics.

        Collective.

        Args:
            inputs: dataset rows of this rank; a group may be on two ranks.
            draw: returns completions and rewards for rows of this rank, in which each prompt's `num_generations` rows
                are neighbours; collective.
            is_varied: which groups' rewards differ, see [`groups_with_variance`].
        """
        rows_of_all = gather_object(list(inputs)) if self.accelerator.num_processes > 1 else list(inputs)
        prompts = rows_of_all[:: self.args.num_generations]
        groups = self._draw(prompts, draw, is_varied)
        metrics = self._replace_equal_groups(groups, draw, is_varied)
        equal = [group for group in groups if not group.is_varied]
        metrics["frac_zero_variance"] = len(equal) / len(groups)
        max_rounds = self.args.dynamic_sampling_max_rounds
        if equal and max_rounds:
            logger.warning_once(
                f"dynamic_sampling: after {max_rounds} rounds some groups still have equal rewards and stay in the "
                "batch; the metric dynamic_sampling/frac_zero_variance is their fraction. Raise "
                "dynamic_sampling_max_rounds to lower it; if it stays at 1, look at the rewards of a few completions"
            )
        prefixed = {f"dynamic_sampling/{name}": value for name, value in metrics.items()}
        return self._rows_of_rank(groups, len(inputs)), prefixed

    def _replace_equal_groups(self, groups: list[_Group], draw: Draw, is_varied: IsVaried) -> dict[str, float]:
        """Put groups of further prompts into the places of those without variance, and return metrics. Collective."""
        columns = list(groups[0].prompt)
        metrics = {"rounds": 0.0, "further_prompts": 0.0, "surplus_groups": 0.0}
        while metrics["rounds"] < self.args.dynamic_sampling_max_rounds:
            slots = [slot for slot, group in enumerate(groups) if not group.is_varied]
            if not slots:
                break
            indices = self.next_prompts(self._fill_up(len(slots)))
            further = []
            for index in indices:
                row = self.dataset[index]
                further.append({name: row[name] for name in columns})
            varied = [group for group in self._draw(further, draw, is_varied) if group.is_varied]
            # There may be more groups than places, or fewer.
            for slot, group in zip(slots, varied, strict=False):
                groups[slot] = group
            metrics["rounds"] += 1
            metrics["further_prompts"] += len(further)
            metrics["surplus_groups"] += max(0, len(varied) - len(slots))
        return metrics

    def _fill_up(self, count: int) -> int:
        """The least number of groups from `count` on whose rows are equally many on every rank."""
        while count * self.args.num_generations % self.accelerator.num_processes:
            count += 1
        return count

    def _rows_of_rank(self, groups: list[_Group], count: int) -> ScoredRows:
        """The `count` rows of this rank, with the rewards of all ranks."""
        size = self.args.num_generations
        first = self.accelerator.process_index * count
        rows = []
        drawn = []
        for i in range(first, first + count):
            group = groups[i // size]
            rows.append(group.prompt)
            drawn.append(group.completions[i % size])
        rewards_NK = torch.cat([group.rewards_GK for group in groups])
        return ScoredRows(rows, drawn, rewards_NK)
