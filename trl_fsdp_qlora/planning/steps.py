"""The forwards of an optimizer step, in numbers: `prefix_sharing.door.Door.plan_step` for full-length completions.

Every prompt has the same length and shares nothing with another one. The rows of a step are its groups, one after the
other.
"""

from typing import NamedTuple

import numpy as np

from ..prefix_sharing.across_passes import MIN_SAVED_TOKENS
from .settings import Settings


class Pass(NamedTuple):
    """The size of a pass with gradients.

    Attributes:
        tokens: tokens of its packed row.
        rows: completions that it scores.
        trunk: tokens of the trunks that are alive during the pass, whose keys it reads.
        prompts: number of prompts whose trunks these are.
    """

    tokens: int
    rows: int
    trunk: int = 0
    prompts: int = 0


class Step(NamedTuple):
    """The passes with gradients of one optimizer step, on one rank.

    Attributes:
        longest: the pass that holds most, trunks included.
        passes, trunks: how many there are.
        values: number of forwards without gradients before the passes, if a micro-batch is cut.
        computed: tokens of all passes with gradients and their trunks.
        batches_per_pass, passes_per_batch: one of the two is 1.
        reason: why each micro-batch computes its own prompts; `None` if it does not.
    """

    longest: Pass
    passes: int
    trunks: int
    values: int
    computed: int
    batches_per_pass: int = 1
    passes_per_batch: int = 1
    reason: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether micro-batches share anything."""
        return bool(self.trunks) or self.batches_per_pass > 1 or self.passes_per_batch > 1

    @property
    def forwards(self) -> int:
        """Number of the model's forwards."""
        return self.passes + self.trunks + self.values

    @property
    def gathers(self) -> int:
        """Number of times that FSDP2 gathers all layers: once in each forward and in each backward."""
        return self.forwards + self.passes + self.trunks


def plan_step(settings: Settings, reason: str | None = None) -> Step:
    """The passes of a step; `reason`: why this model cannot keep values that several passes share."""
    rows = settings.rows
    accumulated = settings.gradient_accumulation_steps
    prompt = settings.prompt_tokens
    completion = settings.completion_tokens
    if settings.prefix_sharing == "off":
        width = prompt + completion
        return Step(
            Pass(rows * width, rows), accumulated, 0, 0, accumulated * rows * width, reason="prefix_sharing: off"
        )
    if settings.is_paired:
        alone = Pass(settings.groups * prompt + rows * (completion - 1), rows)
        return Step(alone, accumulated, 0, 0, accumulated * alone.tokens, reason="nothing is drawn ahead")
    # A step may need completions that are not generated yet.
    ahead = min(accumulated, settings.rollout_batches)
    repeats = -(-accumulated // ahead)
    limit = settings.values.get("tokens_per_pass", 0)
    if limit == 0:
        reason = "tokens_per_pass: 0"
    if reason is None and (ahead > 1 or limit is not None):
        shape = rows, ahead, settings.num_generations, prompt, completion
        step = _shared(shape, limit, one_by_one=settings.launch.kind.startswith("zero"))
        if step is not None:
            passes, trunks, values, computed = (
                repeats * x for x in (step.passes, step.trunks, step.values, step.computed)
            )
            return step._replace(passes=passes, trunks=trunks, values=values, computed=computed)
    alone = Pass(settings.groups * prompt + rows * (completion - 1), rows)
    return Step(alone, accumulated, 0, 0, accumulated * alone.tokens, reason=reason)


def _shared(shape: tuple[int, int, int, int, int], tokens_per_pass: int | None, one_by_one: bool) -> Step | None:
    """The passes of micro-batches that are planned together; `None` if each computes its own prompts.

    `one_by_one` is for DeepSpeed, under which each micro-batch has a pass of its own.
    """
    rows, batches, _, prompt, completion = shape
    limit = tokens_per_pass or rows * (prompt + completion)
    sizes = [rows * count for count in range(batches, 0, -1) if batches % count == 0]
    sizes += [rows // count for count in range(2, rows + 1) if rows % count == 0]
    if one_by_one:
        sizes = [rows]
    # As many rows as fit; a single row that is longer runs alone.
    size = next((size for size in sizes if _held(_cut(shape, size).longest) <= limit), 0)
    if size < rows and tokens_per_pass is None:
        return None
    size = max(size, rows if one_by_one else 1)
    if size >= rows and not _cut(shape, rows).trunks:
        return None
    return _cut(shape, size)


def _held(longest: Pass) -> int:
    return longest.tokens + longest.trunk


def _cut(shape: tuple[int, int, int, int, int], size: int) -> Step:
    """A step whose passes score `size` rows each."""
    rows, batches, group, prompt, completion = shape
    total = rows * batches
    passes = -(-total // size)
    groups = -(-total // group)
    first_row = np.arange(groups) * group
    first = first_row // size
    last = (np.minimum(first_row + group, total) - 1) // size
    # A trunk ends one token before the last of its prompt, which predicts the first label.
    is_kept = (last - first) * (prompt - 1) >= MIN_SAVED_TOKENS
    numbers = np.arange(passes)
    ends = np.minimum((numbers + 1) * size, total)
    # Prompts of each pass, and the kept ones among them: groups are in order, so the passes are in order too.
    begins = np.searchsorted(last, numbers)
    behind = np.searchsorted(first, numbers, side="right")
    kept_before = np.concatenate([[0], np.cumsum(is_kept)])
    kept = kept_before[behind] - kept_before[begins]
    tokens = (ends - numbers * size) * (completion - 1) + (behind - begins - kept) * prompt + kept
    longest = int(np.argmax(tokens + kept * (prompt - 1)))
    trunks = len(np.unique(np.stack([first, last])[:, is_kept], axis=1).T)
    is_cut = size < rows
    return Step(
        Pass(int(tokens[longest]), min(size, total), int(kept[longest]) * (prompt - 1), int(kept[longest])),
        passes,
        trunks,
        passes + trunks if is_cut else 0,
        int(tokens.sum()) + int(is_kept.sum()) * (prompt - 1),
        max(1, size // rows),
        rows // size if is_cut else 1,
    )
