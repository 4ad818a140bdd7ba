"""Prompts chosen by what they taught before (`prompt_selection="history"`).

A group of completions teaches in proportion to the spread of its rewards: 4 p (1 - p) for rewards of 0 and 1, nothing
if all are equal. The spread of a prompt's earlier groups predicts that of its next one, and costs nothing to look up:

    a prompt drawn before    4 p (1 - p) · trust    p ~ Beta(PRIOR + successes, PRIOR + failures)
    one never drawn          s                      s ~ Beta(1 + Σ spreads, 1 + Σ (1 - spreads)), sums over first draws
    in its arm

    trust = (1 + Σ spreads of prompts drawn again) / (1 + Σ values they were chosen for)

Each generation batch draws these values once (Thompson sampling) and takes the prompts with the highest. A share of
its places goes over the dataset evenly instead: to prompts that were never drawn, and then to those drawn longest ago.
All sums halve every few optimizer steps, because the policy moves. An arm is what prompts have in common: their value
in a column that the user names, such as a difficulty. Without a column all prompts are one arm. If prompts are learned
as soon as they are drawn, the trust falls, and prompts that were never drawn take their place.

The objective is the expected reward over the chosen prompts, not over the dataset. Prompts that the policy always or
never solves are hardly trained on, so the policy may unlearn a skill without any chosen prompt showing it. Each group
is still drawn from the policy, so the gradient of a chosen prompt is the same as without the choice.

Every rank holds the same state and draws the same numbers, since rewards are gathered before they are counted.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger

from ..run.nonfatal import nonfatal
from .dynamic_sampling import ChosenRows, combine

logger = get_logger(__name__)

CHOICES = ("off", "history")
# Successes and failures of a prompt that was never drawn. Under Beta(1/4, 1/4) 58% of groups of eight have equal
# rewards.
PRIOR = 0.25
MOST_ARMS = 64  # values of a column; more numbers than that become TENTHS of their range by rank
TENTHS = 10
# Outcomes of a group, in the order of the columns of `PromptSelection.history`.
OUTCOMES = ("none right", "fewer than half", "half and more", "all right")


def spread_and_success(rewards_G: np.ndarray, lowest: float, highest: float) -> tuple[float, float]:
    """Spread and success of a group, with rewards scaled to [0, 1] by their range over the run.

    The spread is four times the unbiased variance. The success is the p with p (1 - p) = variance: the mean if all
    rewards are at an end of the range, and otherwise the smaller root. Completions without a reward (NaN) do not
    count.
    """
    rewards_G = rewards_G[np.isfinite(rewards_G)]
    if len(rewards_G) < 2 or not highest > lowest:
        return 0.0, 0.0
    units_G = (rewards_G - lowest) / (highest - lowest)
    variance = min(float(units_G.var()), 0.25)
    at_the_ends = np.isin(units_G, (0.0, 1.0)).all()
    success = float(units_G.mean()) if at_the_ends else 0.5 - math.sqrt(0.25 - variance)
    return 4 * variance * len(units_G) / (len(units_G) - 1), success


def outcome_of(spread: float, success: float) -> int:
    """The index in `OUTCOMES` of a group."""
    if spread == 0:
        return 0 if success < 0.5 else 3
    return 1 if success < 0.5 else 2


def arms_of(dataset: Sequence[dict], column: str | None) -> tuple[list[int], list[str]]:
    """The arm of each row, and the names of the arms.

    An arm is a value of `column`, or a tenth of the values by rank if they are many numbers. Without a column, or if
    the column is not usable, there is one arm.
    """
    rows = len(dataset)
    if column is None:
        return [0] * rows, ["all"]
    if column not in dataset[0]:
        logger.warning(
            f"prompt_selection_column={column!r} is not a column of the dataset, which has {', '.join(dataset[0])}: "
            "prompts are chosen without it"
        )
        return [0] * rows, ["all"]
    values = dataset[column] if hasattr(dataset, "column_names") else [row[column] for row in dataset]
    values = [value if isinstance(value, (int, float, str)) else str(value) for value in values]
    distinct = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    if len(distinct) <= MOST_ARMS:
        arm_of_value = {value: arm for arm, value in enumerate(distinct)}
        return [arm_of_value[value] for value in values], [str(value) for value in distinct]
    if all(isinstance(value, (int, float)) for value in distinct):
        ranks = np.searchsorted(np.sort(values), values)
        return (ranks * TENTHS // rows).tolist(), [f"tenth {tenth}" for tenth in range(1, TENTHS + 1)]
    logger.warning(
        f"prompt_selection_column={column!r} has {len(distinct)} values, more than {MOST_ARMS}: prompts are chosen "
        "without it. Name a column with few values, or with numbers"
    )
    return [0] * rows, ["all"]


class PromptSelection:
    """Chooses the prompts of each generation batch among the rows of a dataset, and learns from their rewards.

    Args:
        args: `seed`, `multi_objective_aggregation` and the fields `prompt_selection_*`.
        dataset: with an index.
        weights_K: weight of each reward function.

    Attributes:
        successes, failures: of each row, as of `last_step`.
        last_step: the step at which each row was drawn last, -1 if it never was.
        arm_spread, arm_groups: sum of the spreads of first draws in each arm, and their number, as of `arm_step`.
        taught, promised: sums over prompts drawn again of their spreads, and of the values that they were chosen for,
            as of `again_step`.
        lowest, highest: of all rewards so far; of all functions if they are normalised one by one.
        batches: how often prompts were chosen.
        history: per draw of a batch: the step, groups by `OUTCOMES` that were drawn for the first time, groups by
            `OUTCOMES` that were drawn before, and groups by arm.
    """

    def __init__(self, args: Any, dataset: Sequence[dict], weights_K: torch.Tensor):
        self.dataset = dataset
        self.weights_K = weights_K
        self.seed = args.seed
        self.explore = args.prompt_selection_explore
        self.half_life = args.prompt_selection_half_life
        self.normalizes_each_reward = args.multi_objective_aggregation == "normalize_then_sum"

        arm_of_row, self.arm_names = arms_of(dataset, args.prompt_selection_column)
        self.arm_of_row = np.asarray(arm_of_row)
        arms = len(self.arm_names)
        # The order in which prompts are drawn for the first time: of all of them, and of those of each arm.
        self.order = np.random.default_rng(self.seed).permutation(len(dataset))
        self.order_in_arm = [self.order[self.arm_of_row[self.order] == arm] for arm in range(arms)]

        self.successes = np.zeros(len(dataset))
        self.failures = np.zeros(len(dataset))
        self.last_step = np.full(len(dataset), -1)
        self.arm_spread = np.zeros(arms)
        self.arm_groups = np.zeros(arms)
        self.arm_step = np.zeros(arms)
        self.taught = 0.0
        self.promised = 0.0
        self.again_step = 0
        self.lowest = np.inf
        self.highest = -np.inf
        self.batches = 0
        self.history: list[list[int]] = []

        # State of the generation batch that is being drawn.
        self.in_batch: set[int] = set()
        self.new_in_batch: set[int] = set()
        self.promised_for: dict[int, float] = {}  # the value that each prompt is chosen for, until it is drawn again

    @classmethod
    def of(cls, args: Any, dataset: Any, weights_K: torch.Tensor) -> "PromptSelection | None":
        """As the constructor; `None` if `prompt_selection` is off or the dataset has nothing to choose among."""
        if args.prompt_selection == "off" or dataset is None:
            return None
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            reason = "a streaming dataset has no index"
        elif len(dataset) < 2:
            reason = f"there is nothing to choose among {len(dataset)} prompts"
        else:
            return cls(args, dataset, weights_K)
        logger.warning(
            f"prompt_selection={args.prompt_selection!r} is not used: {reason}; prompts come in the sampler's order"
        )
        return None

    def _decay(self, step: int, since: Any) -> Any:
        """The fraction of a count as of step `since` that is left at `step`."""
        return 0.5 ** ((step - since) / self.half_life)

    # --- choosing ----------------------------------------------------------------------------------------------------

    def choose(self, groups: int, step: int, further: bool = False) -> list[int]:
        """Indices of the prompts of `groups` groups at optimizer step `step`, without repetition if there are enough.

        With `further` the prompts are added to those chosen before for the same batch, and differ from them.
        """
        random = np.random.default_rng([self.seed, self.batches])
        self.batches += 1
        if not further:
            self.in_batch = set()
            self.new_in_batch = set()
        drawn = self._drawn_before()
        values = self._values(drawn, step, random)
        explored = self._to_explore(drawn, math.ceil(self.explore * groups))
        candidates = self._new_by_arm(groups, step, random, set(explored))
        candidates += zip((values * self._trust(step)).tolist(), drawn.tolist(), strict=True)
        candidates = [(value, index) for value, index in candidates if index not in explored]
        candidates.sort(key=lambda candidate: (-candidate[0], candidate[1]))
        chosen = (explored + [index for _, index in candidates])[:groups]
        self.promised_for = dict(zip(drawn.tolist(), values.tolist(), strict=True))
        self.in_batch.update(chosen)
        return [chosen[i % len(chosen)] for i in range(groups)]

    def _drawn_before(self) -> np.ndarray:
        """Prompts that were drawn before, without those of this batch unless there are no others."""
        drawn = np.flatnonzero(self.last_step >= 0)
        is_other = np.array([index not in self.in_batch for index in drawn.tolist()], dtype=bool)
        any_other = is_other.any() or (self.last_step < 0).any()
        return drawn[is_other] if any_other else drawn

    def _values(self, drawn: np.ndarray, step: int, random: np.random.Generator) -> np.ndarray:
        """4 p (1 - p) of prompts that were drawn before, p from the posterior of each."""
        decay = self._decay(step, self.last_step[drawn])
        success = random.beta(PRIOR + self.successes[drawn] * decay, PRIOR + self.failures[drawn] * decay)
        return 4 * success * (1 - success)

    def _trust(self, step: int) -> float:
        """The sum of the spreads of prompts drawn again, divided by the sum of the values they were chosen for."""
        decay = self._decay(step, self.again_step)
        return (1 + self.taught * decay) / (1 + self.promised * decay)

    def _to_explore(self, drawn: np.ndarray, count: int) -> list[int]:
        """`count` prompts that are chosen regardless of value and arm, so that an unlearned skill is noticed.

        Prompts that were never drawn come first, then those that were drawn longest ago.
        """
        never_drawn = self._never_drawn(self.order, count)
        oldest_first = drawn[np.argsort(self.last_step[drawn], kind="stable")].tolist()
        return never_drawn + oldest_first[: count - len(never_drawn)]

    def _never_drawn(self, order: np.ndarray, count: int) -> list[int]:
        """The first `count` prompts in `order` that were never drawn."""
        return order[self.last_step[order] < 0][:count].tolist()

    def _new_by_arm(
        self, count: int, step: int, random: np.random.Generator, without: set[int]
    ) -> list[tuple[float, int]]:
        """(value, index) of up to `count` prompts that were never drawn.

        Each prompt comes from the arm with the highest of the values that are drawn anew for it.
        """
        decay = self._decay(step, self.arm_step)
        spread = self.arm_spread * decay
        groups = self.arm_groups * decay
        queues = []  # of each arm: its next prompts
        for order in self.order_in_arm:
            never_drawn = self._never_drawn(order, count + len(without))
            queues.append([index for index in never_drawn if index not in without])
        candidates = []
        while len(candidates) < count and any(queues):
            values = random.beta(1 + spread, 1 + groups - spread)
            arms_left = [arm for arm, queue in enumerate(queues) if queue]
            arm = max(arms_left, key=lambda arm: values[arm])
            candidates.append((float(values[arm]), queues[arm].pop(0)))
        return candidates

    def rows(self, indices: Sequence[int], size: int, rank: int, ranks: int) -> ChosenRows:
        """Dataset rows of `rank`, if each prompt in `indices` has `size` rows and the ranks have equal shares."""
        per_rank = len(indices) * size // ranks
        rows = [self.dataset[indices[i // size]] for i in range(rank * per_rank, (rank + 1) * per_rank)]
        return ChosenRows(rows, indices)

    # --- learning from the rewards -----------------------------------------------------------------------------------

    def observe(self, indices: Sequence[int], rewards_NK: torch.Tensor, step: int) -> None:
        """Count the rewards of the groups of the prompts `indices`; `rewards_NK` holds all ranks', group after group.

        A group that grows is observed twice. The second time only the prompt's counts and the history change: its
        first completions have been counted for its arm or for the trust already.
        """
        rewards_NK = rewards_NK.detach().double().cpu()
        weights_K = self.weights_K.double().cpu()
        if self.normalizes_each_reward:
            columns_NC = (rewards_NK * weights_K).numpy()
        else:
            columns_NC = combine(rewards_NK, weights_K)[:, None].numpy()
        finite = columns_NC[np.isfinite(columns_NC)].tolist()
        self.lowest = min([self.lowest, *finite])
        self.highest = max([self.highest, *finite])

        size = len(columns_NC) // len(indices)
        first_time = [0] * len(OUTCOMES)
        drawn_again = [0] * len(OUTCOMES)
        for group, index in enumerate(indices):
            rewards_GC = columns_NC[group * size : (group + 1) * size]
            # With several functions, the one with the largest spread counts.
            spread, success = max(spread_and_success(column_G, self.lowest, self.highest) for column_G in rewards_GC.T)
            if self.last_step[index] < 0:
                self.new_in_batch.add(index)
                self._count_for_arm(self.arm_of_row[index], spread, step)
            elif index in self.promised_for:
                self._count_for_trust(spread, self.promised_for.pop(index), step)
            decay = self._decay(step, self.last_step[index])
            self.successes[index] = self.successes[index] * decay + size * success
            self.failures[index] = self.failures[index] * decay + size * (1 - success)
            self.last_step[index] = step
            counts = first_time if index in self.new_in_batch else drawn_again
            counts[outcome_of(spread, success)] += 1
        by_arm = np.bincount(self.arm_of_row[indices], minlength=len(self.arm_names)).tolist()
        self.history.append([step, *first_time, *drawn_again, *by_arm])

    def _count_for_arm(self, arm: int, spread: float, step: int) -> None:
        decay = self._decay(step, self.arm_step[arm])
        self.arm_spread[arm] = self.arm_spread[arm] * decay + min(spread, 1.0)
        self.arm_groups[arm] = self.arm_groups[arm] * decay + 1
        self.arm_step[arm] = step

    def _count_for_trust(self, spread: float, promised: float, step: int) -> None:
        decay = self._decay(step, self.again_step)
        self.taught = self.taught * decay + spread
        self.promised = self.promised * decay + promised
        self.again_step = step

    def metrics(self) -> dict[str, float]:
        """Metrics of the groups observed last."""
        outcomes = self.history[-1][1 : 1 + 2 * len(OUTCOMES)]
        return {
            "prompt_selection/new_fraction": sum(outcomes[: len(OUTCOMES)]) / sum(outcomes),
            "prompt_selection/prompts_drawn": float((self.last_step >= 0).sum()),
        }

    # --- checkpoints, and the picture --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps; the same on every rank."""
        drawn = np.flatnonzero(self.last_step >= 0)
        arrays = {
            "index": drawn,
            "successes": self.successes[drawn],
            "failures": self.failures[drawn],
            "last_step": self.last_step[drawn],
            "arm_spread": self.arm_spread,
            "arm_groups": self.arm_groups,
            "arm_step": self.arm_step,
            "history": np.array(self.history, dtype=np.int64),
        }
        state: dict[str, Any] = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        state["batches"] = self.batches
        state["again"] = [self.taught, self.promised, self.again_step]
        state["range"] = [self.lowest, self.highest]
        state["rows"] = len(self.dataset)
        return state

    def load(self, state: dict[str, Any] | None) -> None:
        """Continue from the result of [`state`].

        If there is no state for this dataset and these arms, selection starts anew and logs it.
        """
        is_same_dataset = state is not None and state["rows"] == len(self.dataset)
        if not is_same_dataset or len(state["arm_step"]) != len(self.arm_step):
            logger.warning("prompt_selection: the checkpoint has no history of these prompts; a new history is begun")
            return
        arrays = {name: value.cpu().numpy() for name, value in state.items() if isinstance(value, torch.Tensor)}
        drawn = arrays["index"]
        self.successes[drawn] = arrays["successes"]
        self.failures[drawn] = arrays["failures"]
        self.last_step[drawn] = arrays["last_step"]
        self.arm_spread = arrays["arm_spread"]
        self.arm_groups = arrays["arm_groups"]
        self.arm_step = arrays["arm_step"]
        self.history = arrays["history"].tolist()
        self.batches = state["batches"]
        self.taught, self.promised, self.again_step = state["again"]
        self.lowest, self.highest = state["range"]

    @nonfatal("the picture of prompt_selection")
    def draw(self, path: Path) -> None:
        """Plot the chosen prompts over time by difficulty: by the rewards, and by the values of the column."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        history = np.array(self.history)
        first_time, drawn_again, by_arm = np.split(history[:, 1:], [len(OUTCOMES), 2 * len(OUTCOMES)], axis=1)
        groups_B1 = (first_time + drawn_again).sum(1, keepdims=True)
        outcome_colors = ("0.75", "C1", "C2", "0.55")
        parts = [
            ("prompts drawn for the first time, by their rewards", first_time, OUTCOMES, outcome_colors),
            ("prompts drawn again, by their rewards", drawn_again, OUTCOMES, outcome_colors),
        ]
        if len(self.arm_names) > 1:
            shades = pyplot.get_cmap("viridis")(np.linspace(0, 1, len(self.arm_names)))
            parts.append(("all prompts, by column", by_arm, self.arm_names, shades))
        figure, panels = pyplot.subplots(1, len(parts), figsize=(6 * len(parts), 4), layout="constrained", sharey=True)
        for axes, (title, counts_BN, names, colors) in zip(panels, parts, strict=True):
            bottom_B = np.zeros(len(history))
            for share_B, name, color in zip((100 * counts_BN / groups_B1).T, names, colors, strict=True):
                axes.bar(np.arange(len(history)), share_B, 1.0, bottom=bottom_B, label=name, color=color)
                bottom_B = bottom_B + share_B
            axes.set_title(title)
            axes.set_xlabel("batches of completions drawn")
            axes.grid(alpha=0.3)
            if len(names) <= TENTHS:
                axes.legend(fontsize=8)
        panels[0].set_ylabel("% of the groups of a batch")
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
