"""Dynamic sampling (DAPO, arXiv 2503.14476): further prompts for groups that cannot teach anything.

A group whose rewards are all equal has zero advantage. Its place in the generation batch goes to another prompt's group,
for a few rounds at most. The further prompts come from a stream of their own, which goes through the whole dataset in a
random order before any prompt comes a second time; what training draws by itself is not moved by it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object

from .rewards import combine

logger = get_logger(__name__)


class NothingToLearn(RuntimeError):
    """As many groups in a row as the dataset has prompts had equal rewards."""


@dataclass
class ScoredRows:
    """Completions of whole groups, spread over the ranks in equal parts and in order, and the rewards of all.

    Attributes:
        inputs: dataset rows of this rank, one for each completion.
        drawn: whatever belongs to this rank's completions, one value for each.
        rewards_NK: of the completions of all ranks, by reward function.
    """

    inputs: list[dict]
    drawn: list
    rewards_NK: torch.Tensor


def alive_groups(rewards_NK: torch.Tensor, weights_K: torch.Tensor, group_size: int, each: bool) -> torch.Tensor:
    """Which groups have rewards that differ, `(N / group_size,)`; completions without any reward do not count.

    Args:
        rewards_NK: NaN where a function gave none.
        weights_K: of the functions.
        each: the functions are normalised one by one, so one of them is enough; otherwise their weighted sum has to differ.
    """
    weighted_NK = rewards_NK * weights_K.to(rewards_NK) if each else combine(rewards_NK, weights_K)[:, None]
    groups = weighted_NK.unflatten(0, (-1, group_size))
    highest = groups.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
    lowest = groups.nan_to_num(torch.inf, torch.inf, -torch.inf).amin(1)
    return (highest > lowest).any(1)


class DynamicSampling:
    """Replaces dead groups of a generation batch by groups of further prompts.

    Args:
        size: prompts in the dataset.
        group_size: completions per prompt.
        max_rounds: further generations per batch at most.
        seed: of the order of the further prompts.
        accelerator: every rank calls [`fill`], and goes through the same rounds.
    """

    def __init__(self, size: int, group_size: int, max_rounds: int, seed: int, accelerator: Accelerator):
        self.size, self.group_size, self.max_rounds, self.seed = size, group_size, max_rounds, seed
        self.accelerator = accelerator
        self.taken = 0  # further prompts since the start of the run
        self.dead_in_a_row = 0

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps; the same on every rank."""
        return {"taken": self.taken, "dead_in_a_row": self.dead_in_a_row}

    def load_state(self, state: dict[str, int]) -> None:
        self.taken, self.dead_in_a_row = state["taken"], state["dead_in_a_row"]

    def next_prompts(self, count: int) -> list[int]:
        """Indices of the next `count` further prompts."""
        found = []
        while len(found) < count:
            passes, place = divmod(self.taken, self.size)
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed((self.seed << 20) + passes))
            part = order[place : place + count - len(found)].tolist()
            found += part
            self.taken += len(part)
        return found

    def fill(
        self,
        batch: ScoredRows,
        dataset: Sequence[dict],
        draw: Callable[[list[dict]], ScoredRows],
        alive: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[ScoredRows, dict[str, float]]:
        """`batch` with its dead groups replaced where there is something better, and the metrics of doing so.

        Args:
            batch: of this rank; a group may lie on two ranks.
            dataset: training rows by index.
            draw: completions and rewards for these rows of this rank; collective.
            alive: which groups, from the rewards of all ranks.

        Raises:
            NothingToLearn: says what to look at.
        """
        inputs, drawn, rewards_NK = list(batch.inputs), list(batch.drawn), batch.rewards_NK.clone()
        alive_G = alive(rewards_NK)
        self._watch(alive_G)
        metrics = dict.fromkeys(("rounds", "further_prompts", "surplus_groups"), 0.0)
        start = self.accelerator.process_index * len(inputs)
        while not alive_G.all() and metrics["rounds"] < self.max_rounds:
            rows = self._next_rows(int((~alive_G).sum()), dataset, batch.inputs[0].keys())
            mine = len(rows) // self.accelerator.num_processes
            first = self.accelerator.process_index * mine
            further = draw(rows[first : first + mine])
            all_drawn = gather_object(further.drawn) if self.accelerator.num_processes > 1 else further.drawn
            found_G = alive(further.rewards_NK)
            self._watch(found_G)
            slots, sources = (~alive_G).nonzero()[:, 0].tolist(), found_G.nonzero()[:, 0].tolist()
            for slot, source in zip(slots, sources, strict=False):
                for k in range(self.group_size):
                    to, of = slot * self.group_size + k, source * self.group_size + k
                    rewards_NK[to] = further.rewards_NK[of]
                    if 0 <= to - start < len(inputs):
                        inputs[to - start], drawn[to - start] = rows[of], all_drawn[of]
                alive_G[slot] = True
            metrics["rounds"] += 1
            metrics["further_prompts"] += len(rows) // self.group_size
            metrics["surplus_groups"] += max(0, len(sources) - len(slots))
        metrics["dead_groups_left"] = (~alive_G).float().mean().item()
        if metrics["dead_groups_left"]:
            logger.warning_once(
                f"dynamic_sampling: after {self.max_rounds} rounds some groups still have equal rewards and stay in the "
                "batch; dynamic_sampling/dead_groups_left tells how many. Raise dynamic_sampling_max_rounds for more"
            )
        return ScoredRows(inputs, drawn, rewards_NK), {f"dynamic_sampling/{k}": v for k, v in metrics.items()}

    def _next_rows(self, groups: int, dataset: Sequence[dict], columns) -> list[dict]:
        """Rows of all ranks for at least this many further prompts, as many for every rank."""
        while groups * self.group_size % self.accelerator.num_processes:
            groups += 1
        rows = [dataset[i] for i in self.next_prompts(groups)]
        return [{name: row[name] for name in columns} for row in rows for _ in range(self.group_size)]

    def _watch(self, alive_G: torch.Tensor) -> None:
        for alive in alive_G.tolist():
            self.dead_in_a_row = 0 if alive else self.dead_in_a_row + 1
        if self.dead_in_a_row >= self.size:
            raise NothingToLearn(
                f"dynamic_sampling: {self.dead_in_a_row} groups in a row, as many as the dataset has prompts "
                f"({self.size}), had equal rewards, so there is nothing to learn. Look at the rewards of a few "
                "completions: the task may be too hard or too easy for the model, or the reward function always gives "
                "the same"
            )
