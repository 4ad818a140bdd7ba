"""Prompts chosen by what they taught before (`prompt_selection="history"`).

A group of completions teaches in proportion to the spread of its rewards: 4 p (1 - p) for rewards of 0 and 1, nothing where all are equal.
What a prompt taught before says what it will teach, and costs nothing to look up:

    a prompt drawn before    4 p (1 - p) · trust    p ~ Beta(PRIOR + successes, PRIOR + failures)
    one never drawn          s                      s ~ Beta(1 + Σ spreads, 1 + Σ (1 - spreads)), sums over first draws in its arm

    trust = (1 + Σ spreads of prompts drawn again) / (1 + Σ values they were chosen for)

Each generation batch draws these values once (Thompson sampling) and takes the prompts with the highest; a share of its places always
goes over the dataset evenly, to prompts that were never drawn, or longest ago. All sums halve every few optimizer steps, because the policy moves. An arm is what
prompts have in common: their value in a column that the user names, such as a difficulty. Without a column all prompts are one arm.
The trust falls where prompts are learned faster than they are forgotten here, and new ones then take the place of old ones.

The objective is the expected reward over the chosen prompts, not over the dataset: prompts that the policy always or never
solves are hardly trained on, and what it could already do may be unlearned unnoticed by them. Each group is still drawn from the policy, so its gradient is what it would be without the choice.

Every rank holds the same state and draws the same numbers, as rewards are gathered before they are counted.
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
# Successes and failures of a prompt that was never drawn. Under Beta(1/4, 1/4) 58% of groups of eight have equal rewards.
PRIOR = 0.25
MOST_ARMS = 64  # values of a column; more numbers than that become TENTHS of their range by rank
TENTHS = 10


def spread_and_success(rewards_G: np.ndarray, lowest: float, highest: float) -> tuple[float, float]:
    """The unbiased variance of a group's rewards, times four, in units of their range over the run, and the success behind it.

    The success is the p with p (1 - p) = variance: the mean for rewards at the ends of the range, as 0 and 1 are, and otherwise
    the smaller root. Completions without a reward (NaN) do not count.
    """
    rewards_G = rewards_G[np.isfinite(rewards_G)]
    if len(rewards_G) < 2 or not highest > lowest:
        return 0.0, 0.0
    units_G = (rewards_G - lowest) / (highest - lowest)
    variance = min(float(units_G.var()), 0.25)
    at_the_ends = np.isin(units_G, (0.0, 1.0)).all()
    success = float(units_G.mean()) if at_the_ends else 0.5 - math.sqrt(0.25 - variance)
    return 4 * variance * len(units_G) / (len(units_G) - 1), success


def arms_of(dataset: Sequence[dict], column: str | None) -> tuple[list[int], list[str]]:
    """The arm of each row, and what the arms are called: values in `column`, numbers in tenths by rank if there are many; one arm
    without a column."""
    rows = len(dataset)
    if column is None:
        return [0] * rows, ["all"]
    if column not in dataset[0]:
        logger.warning(
            f"prompt_selection_column={column!r} is no column of the dataset, which has {', '.join(dataset[0])}: prompts are "
            "chosen without it"
        )
        return [0] * rows, ["all"]
    values = dataset[column] if hasattr(dataset, "column_names") else [row[column] for row in dataset]
    values = [value if isinstance(value, (int, float, str)) else str(value) for value in values]
    distinct = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    if len(distinct) <= MOST_ARMS:
        number = {value: arm for arm, value in enumerate(distinct)}
        return [number[value] for value in values], [str(value) for value in distinct]
    if all(isinstance(value, (int, float)) for value in distinct):
        ranks = np.searchsorted(np.sort(values), values)
        return (ranks * TENTHS // rows).tolist(), [f"tenth {tenth}" for tenth in range(1, TENTHS + 1)]
    logger.warning(
        f"prompt_selection_column={column!r} has {len(distinct)} values, more than {MOST_ARMS}: prompts are chosen without it. "
        "Name a column with few values, or with numbers"
    )
    return [0] * rows, ["all"]


class PromptSelection:
    """Chooses the prompts of each generation batch among the rows of a dataset, and learns from their rewards.

    Args:
        args: `seed`, `multi_objective_aggregation` and the fields `prompt_selection_*`.
        dataset: with an index.
        weights_K: weight of each reward function.
    """

    def __init__(self, args: Any, dataset: Sequence[dict], weights_K: torch.Tensor):
        self.dataset, self.weights_K, self.seed = dataset, weights_K, args.seed
        self.explore, self.half_life = args.prompt_selection_explore, args.prompt_selection_half_life
        self.each = args.multi_objective_aggregation == "normalize_then_sum"
        arms_of_rows, self.arm_names = arms_of(dataset, args.prompt_selection_column)
        self.arms, arms = np.asarray(arms_of_rows), len(self.arm_names)
        # In which prompts are drawn for the first time: all of them, and those of each arm.
        self.order = np.random.default_rng(self.seed).permutation(len(dataset))
        self.arm_order = [self.order[self.arms[self.order] == arm] for arm in range(arms)]
        # Counts as of the step at which a prompt, or an arm, was drawn last; -1: never.
        self.successes, self.failures = np.zeros(len(dataset)), np.zeros(len(dataset))
        self.last_step = np.full(len(dataset), -1)
        self.arm_spread, self.arm_groups, self.arm_step = np.zeros(arms), np.zeros(arms), np.zeros(arms)
        # Of prompts drawn again: what they taught, and what they were chosen for.
        self.taught, self.promised, self.again_step = 0.0, 0.0, 0
        self.value_of: dict[int, float] = {}  # of the prompts of this batch that were drawn before
        self.lowest, self.highest = np.inf, -np.inf  # of all rewards so far; with `each`, of all functions
        self.batches = 0
        self.in_batch: set[int] = set()
        self.history: list[list[int]] = []  # for the picture

    @classmethod
    def of(cls, args: Any, dataset: Any, weights_K: torch.Tensor) -> "PromptSelection | None":
        """As the constructor; `None` where `prompt_selection` is off or the dataset has nothing to choose among."""
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

    def _age(self, step: int, since: Any) -> Any:
        """What a count as of step `since` is worth at `step`."""
        return 0.5 ** ((step - since) / self.half_life)

    # --- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, places: int, step: int, further: bool = False) -> list[int]:
        """Indices of the prompts of `places` groups at optimizer step `step`; different ones while there are enough.

        With `further` they join the prompts chosen before for the same batch, and are others than those.
        """
        random = np.random.default_rng([self.seed, self.batches])
        self.batches += 1
        self.in_batch = self.in_batch if further else set()
        drawn = np.flatnonzero(self.last_step >= 0)
        others = np.array([index not in self.in_batch for index in drawn.tolist()], dtype=bool)
        drawn = drawn[others] if others.any() or (self.last_step < 0).any() else drawn
        age = self._age(step, self.last_step[drawn])
        success = random.beta(PRIOR + self.successes[drawn] * age, PRIOR + self.failures[drawn] * age)
        values = 4 * success * (1 - success)
        age = self._age(step, self.again_step)
        trust = (1 + self.taught * age) / (1 + self.promised * age)
        known = list(zip((values * trust).tolist(), drawn.tolist(), strict=True))
        # The share of exploration goes over the dataset evenly, whatever its arm, so that what was unlearned is found.
        explored = self._unseen(self.order, math.ceil(self.explore * places))
        oldest = drawn[np.argsort(self.last_step[drawn], kind="stable")].tolist()
        explored += oldest[: math.ceil(self.explore * places) - len(explored)]
        unknown = self._by_arm(places, step, random, set(explored))
        rest = [(value, index) for value, index in unknown + known if index not in explored]
        best = [index for _, index in sorted(rest, key=lambda pair: (-pair[0], pair[1]))]
        chosen = (explored + best)[:places]
        self.value_of = dict(zip(drawn.tolist(), values.tolist(), strict=True))
        self.in_batch |= set(chosen)
        return [chosen[i % len(chosen)] for i in range(places)]

    def _unseen(self, order: np.ndarray, count: int) -> list[int]:
        """The first `count` prompts in `order` that were never drawn."""
        return order[self.last_step[order] < 0][:count].tolist()

    def _by_arm(
        self, places: int, step: int, random: np.random.Generator, without: set[int]
    ) -> list[tuple[float, int]]:
        """(value, index) of up to `places` prompts that were never drawn, each of the arm that was worth most in a draw of its own."""
        age = self._age(step, self.arm_step)
        spread, groups = self.arm_spread * age, self.arm_groups * age
        count = places + len(without)
        queues = [[i for i in self._unseen(order, count) if i not in without] for order in self.arm_order]
        found = []
        while len(found) < places and any(queues):
            values = random.beta(1 + spread, 1 + groups - spread)
            arm = max((arm for arm, queue in enumerate(queues) if queue), key=lambda arm: values[arm])
            found.append((float(values[arm]), queues[arm].pop(0)))
        return found

    def rows(self, indices: Sequence[int], size: int, rank: int, ranks: int) -> ChosenRows:
        """The part of `rank` of the rows of groups of `size`."""
        mine = len(indices) * size // ranks
        rows = [self.dataset[indices[i // size]] for i in range(rank * mine, (rank + 1) * mine)]
        return ChosenRows(rows, indices)

    # --- learning from the rewards ------------------------------------------------------------------------------------

    def observe(self, indices: Sequence[int], rewards_NK: torch.Tensor, step: int) -> None:
        """Count what the groups of the prompts `indices` taught: `rewards_NK` of all ranks, group after group."""
        rewards_NK, weights_K = rewards_NK.detach().double().cpu(), self.weights_K.double().cpu()
        columns_NK = (rewards_NK * weights_K if self.each else combine(rewards_NK, weights_K)[:, None]).numpy()
        finite = columns_NK[np.isfinite(columns_NK)]
        self.lowest, self.highest = min([self.lowest, *finite.tolist()]), max([self.highest, *finite.tolist()])
        size = len(columns_NK) // len(indices)
        outcomes = [0] * 8  # never drawn before, then again: none, under half, half and more, all right
        for group, index in enumerate(indices):
            rewards_GK = columns_NK[group * size : (group + 1) * size]
            spread, success = max(spread_and_success(column_G, self.lowest, self.highest) for column_G in rewards_GK.T)
            is_new = self.last_step[index] < 0
            if is_new:
                arm = self.arms[index]
                age = self._age(step, self.arm_step[arm])
                self.arm_spread[arm] = self.arm_spread[arm] * age + min(spread, 1.0)
                self.arm_groups[arm] = self.arm_groups[arm] * age + 1
                self.arm_step[arm] = step
            elif index in self.value_of:
                age = self._age(step, self.again_step)
                self.taught = self.taught * age + spread
                self.promised = self.promised * age + self.value_of[index]
                self.again_step = step
            age = 0.0 if is_new else self._age(step, self.last_step[index])
            self.successes[index] = self.successes[index] * age + size * success
            self.failures[index] = self.failures[index] * age + size * (1 - success)
            self.last_step[index] = step
            outcome = (0 if success < 0.5 else 3) if spread == 0 else (1 if success < 0.5 else 2)
            outcomes[outcome + (0 if is_new else 4)] += 1
        self.history.append(
            [step, *outcomes, *np.bincount(self.arms[indices], minlength=len(self.arm_names)).tolist()]
        )

    def metrics(self) -> dict[str, float]:
        """Of the groups observed last."""
        outcomes = self.history[-1][1:9]
        return {
            "prompt_selection/new_fraction": sum(outcomes[:4]) / sum(outcomes),
            "prompt_selection/prompts_drawn": float((self.last_step >= 0).sum()),
        }

    # --- checkpoints, and the picture ---------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; the same on every rank."""
        drawn = np.flatnonzero(self.last_step >= 0)
        arrays = {"index": drawn, "successes": self.successes[drawn], "failures": self.failures[drawn]}
        arrays |= {"last_step": self.last_step[drawn], "arm_spread": self.arm_spread, "arm_groups": self.arm_groups}
        arrays |= {"arm_step": self.arm_step, "history": np.array(self.history, dtype=np.int64)}
        kept = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        again = [self.taught, self.promised, self.again_step]
        extent = [self.lowest, self.highest]
        return kept | {"batches": self.batches, "again": again, "range": extent, "rows": len(self.dataset)}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on from what [`state`] gave; starts anew, and logs it, where there is none of this dataset and these arms."""
        fits = (
            state is not None and state["rows"] == len(self.dataset) and len(state["arm_step"]) == len(self.arm_step)
        )
        if not fits:
            logger.warning("prompt_selection: the checkpoint has no history of these prompts, which starts anew")
            return
        arrays = {name: value.cpu().numpy() for name, value in state.items() if isinstance(value, torch.Tensor)}
        drawn = arrays["index"]
        self.successes[drawn], self.failures[drawn] = arrays["successes"], arrays["failures"]
        self.last_step[drawn] = arrays["last_step"]
        self.arm_spread, self.arm_groups, self.arm_step = (
            arrays[f"arm_{name}"] for name in ("spread", "groups", "step")
        )
        self.history, self.batches = arrays["history"].tolist(), state["batches"]
        self.taught, self.promised, self.again_step = state["again"]
        self.lowest, self.highest = state["range"]

    @nonfatal("the picture of prompt_selection")
    def draw(self, path: Path) -> None:
        """What was chosen over time, by how difficult it was: by the rewards, and by the values of the column."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        history = np.array(self.history)
        groups_B1 = history[:, 1:9].sum(1, keepdims=True)
        outcomes = ("none right", "fewer than half", "half and more", "all right"), ("0.75", "C1", "C2", "0.55")
        parts = [
            ("prompts drawn for the first time, by their rewards", history[:, 1:5], *outcomes),
            ("prompts drawn again, by their rewards", history[:, 5:9], *outcomes),
        ]
        if len(self.arm_names) > 1:
            shades = pyplot.get_cmap("viridis")(np.linspace(0, 1, len(self.arm_names)))
            parts.append(("all prompts, by column", history[:, 9:], self.arm_names, shades))
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
