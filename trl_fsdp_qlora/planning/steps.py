"""The forwards of an optimizer step, in numbers: `PromptSharing.plan_step` for completions of full length.

Every prompt has the same length and shares no token with another prompt. The rows of a step are its groups, one after
the other.
"""

from typing import NamedTuple

import numpy as np

from ..prefix_sharing.passes import MIN_SAVED_TOKENS
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
    """The passes of a step; `reason` is why passes of this model cannot share values, or `None` if they can."""
    rows = settings.rows
    accumulated = settings.gradient_accumulation_steps
    prompt = settings.prompt_tokens
    completion = settings.completion_tokens
    if settings.prefix_sharing == "off":
        return _separate(Pass(rows * (prompt + completion), rows), accumulated, "prefix_sharing: off")
    alone = Pass(settings.groups * prompt + rows * (completion - 1), rows)
    if settings.is_paired:
        return _separate(alone, accumulated, "nothing is drawn ahead")
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
            return step._replace(
                passes=repeats * step.passes,
                trunks=repeats * step.trunks,
                values=repeats * step.values,
                computed=repeats * step.computed,
            )
    return _separate(alone, accumulated, reason)


def _separate(one: Pass, count: int, reason: str | None) -> Step:
    """A step of `count` micro-batches, each of which is computed by a pass of this size."""
    return Step(longest=one, passes=count, trunks=0, values=0, computed=count * one.tokens, reason=reason)


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
    # A pass gets as many rows as fit; a single row that is too long runs alone.
    size = next((size for size in sizes if _held_tokens(_cut(shape, size).longest) <= limit), 0)
    if size < rows and tokens_per_pass is None:
        return None
    size = max(size, rows if one_by_one else 1)
    if size >= rows and not _cut(shape, rows).trunks:
        return None
    return _cut(shape, size)


def _held_tokens(longest: Pass) -> int:
    return longest.tokens + longest.trunk


def _cut(shape: tuple[int, int, int, int, int], size: int) -> Step:
    """A step whose passes score `size` rows each."""
    rows, batches, group, prompt, completion = shape
    total = rows * batches
    passes = -(-total // size)
    groups = -(-total // group)
    # Of each group: the passes that score its first and its last row, and whether a trunk computes its prompt.
    first_row = np.arange(groups) * group
    first_pass = first_row // size
    last_pass = (np.minimum(first_row + group, total) - 1) // size
    # A trunk ends before the last token of its prompt, because that token predicts the first label.
    trunk_tokens = prompt - 1
    has_trunk = (last_pass - first_pass) * trunk_tokens >= MIN_SAVED_TOKENS
    # Of each pass: its groups, which are in order as the passes are, and the number of them that have a trunk.
    numbers = np.arange(passes)
    first_group = np.searchsorted(last_pass, numbers)
    end_group = np.searchsorted(first_pass, numbers, side="right")
    trunks_before = np.concatenate([[0], np.cumsum(has_trunk)])
    in_trunks = trunks_before[end_group] - trunks_before[first_group]
    # A pass computes its completions but for their last tokens, whole prompts, and the last token of a trunk's prompt.
    end_row = np.minimum((numbers + 1) * size, total)
    whole_prompts = end_group - first_group - in_trunks
    tokens = (end_row - numbers * size) * (completion - 1) + whole_prompts * prompt + in_trunks
    longest = int(np.argmax(tokens + in_trunks * trunk_tokens))
    # Prompts that the same passes need are computed by one trunk.
    trunks = len(set(zip(first_pass[has_trunk].tolist(), last_pass[has_trunk].tolist(), strict=True)))
    is_cut = size < rows
    return Step(
        longest=Pass(
            tokens=int(tokens[longest]),
            rows=min(size, total),
            trunk=int(in_trunks[longest]) * trunk_tokens,
            prompts=int(in_trunks[longest]),
        ),
        passes=passes,
        trunks=trunks,
        values=passes + trunks if is_cut else 0,
        computed=int(tokens.sum()) + int(has_trunk.sum()) * trunk_tokens,
        batches_per_pass=max(1, size // rows),
        passes_per_batch=rows // size if is_cut else 1,
    )
