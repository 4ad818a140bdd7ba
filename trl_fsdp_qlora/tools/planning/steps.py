"""The forwards of an optimizer step: the trainer's own plan of them, for completions of full length.

Every prompt has the same length and shares no token with another prompt. The rows of a step are its groups, one after
the other. [`passes.plan_step`] needs no model, so it plans the step on numbers that stand for tokens.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...prefix_sharing import passes
from ...prefix_sharing.batch import Sequences
from ...prefix_sharing.forest import Forest, build_forest
from ...prefix_sharing.sharing import LEAST_SAVED
from .settings import Settings


class Pass(NamedTuple):
    """The size of a pass with gradients.

    Attributes:
        tokens: tokens of its packed row.
        rows: completions that it scores.
        trunk: tokens of the trunks whose keys it reads.
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


class Call(NamedTuple):
    """The tokens of a micro-batch for which a trainer with a teacher calls a model for hidden states or logits.

    Attributes:
        tokens: of its packed row.
        length: of each padded row.
        packed: whether `share_prompts` packs the call, because that pays (`prefix_sharing.sharing`).
        computed, padded: tokens that are computed, and that stock TRL computes.
    """

    tokens: int
    length: int
    packed: bool
    padded: int

    @property
    def computed(self) -> int:
        return self.tokens if self.packed else self.padded


def call_of(settings: Settings, privileged_tokens: int = 0) -> Call:
    """The call of a micro-batch, in which a teacher reads `privileged_tokens` besides each prompt."""
    rows = settings.rows
    length = settings.prompt_tokens + settings.completion_tokens
    tokens = settings.groups * settings.prompt_tokens + rows * settings.completion_tokens
    if settings.drawn is not None:
        length = settings.drawn.padded_tokens // rows
        tokens = settings.drawn.tokens + rows  # without labels the last token of a row is computed, too
    length += privileged_tokens
    tokens += settings.groups * privileged_tokens
    packed = settings.prefix_sharing != "off" and tokens <= (1 - LEAST_SAVED) * rows * length
    return Call(tokens, length, packed, rows * length)


def plan_step(settings: Settings, reason: str | None = None) -> Step:
    """The passes of a step; `reason` is why passes of this model cannot share values, or `None` if they can."""
    rows = settings.rows
    accumulated = settings.gradient_accumulation_steps
    prompt = settings.prompt_tokens
    completion = settings.completion_tokens
    if settings.prefix_sharing == "off" and not settings.has_teacher:
        return _separate(Pass(rows * (prompt + completion), rows), accumulated, "prefix_sharing: off")
    alone = Pass(settings.groups * prompt + rows * (completion - 1), rows)
    if settings.is_paired:
        return _separate(alone, accumulated, "nothing is drawn ahead")
    if settings.has_teacher:
        call = call_of(settings)
        step = _separate(Pass(call.computed, rows), accumulated, "TRL's own trainer")
        # A teacher that is the model itself, or a copy of it, lies in the same shards.
        return step._replace(values=0 if settings.compares_states else accumulated)
    # A step may need completions that are not generated yet.
    ahead = min(accumulated, settings.rollout_batches)
    repeats = -(-accumulated // ahead)
    limit = settings.values.get("tokens_per_pass", 0)
    if limit == 0:
        reason = "tokens_per_pass: 0"
    if reason is None and (ahead > 1 or limit is not None):
        one_by_one = settings.launch.kind.startswith("zero")
        step = _shared(rows, ahead, settings.num_generations, prompt, completion, limit, one_by_one)
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


@lru_cache(maxsize=64)  # most fields that a search for what fits changes do not change the passes
def _shared(
    rows: int,
    batches: int,
    group: int,
    prompt: int,
    completion: int,
    tokens_per_pass: int | None,
    one_by_one: bool,
) -> Step | None:
    """The passes of micro-batches that are planned together; `None` if each computes its own prompts."""
    sequences = sequences_of(np.arange(rows * batches) // group, prompt, completion)
    plan = passes.plan_step(sequences, batches, RULES, tokens_per_pass, one_by_one)
    if plan is None:
        return None
    longest = Pass(0, 0)
    computed = 0
    run = passes.Run(plan)
    for number in range(len(plan.rows_of_pass)):
        *trunks, forward = run.of_pass(number)
        computed += sum(trunk.forest.tokens for trunk in trunks) + forward.forest.tokens
        longest = max(longest, _size(forward), key=held_tokens)
    return Step(
        longest=longest,
        passes=len(plan.rows_of_pass),
        trunks=int(plan.trunks.sum()),
        # A row that is longer than the limit runs alone, in one pass: it is not cut.
        values=plan.count if plan.passes_per_batch > 1 else 0,
        computed=computed,
        batches_per_pass=plan.batches_per_pass,
        passes_per_batch=plan.passes_per_batch,
    )


def held_tokens(one: Pass) -> int:
    """Tokens that a pass holds with a graph, those of the trunks included."""
    return one.tokens + one.trunk


def _size(forward: passes.Forward) -> Pass:
    forest = forward.forest
    of_trunks = int(forest.lengths[forest.computed :].sum())
    return Pass(forest.tokens, len(forward.rows), of_trunks, forest.kept)


def sequences_of(prompt_B: np.ndarray, prompt: int, completion: int) -> Sequences:
    """Rows with `prompt` and `completion` tokens: rows with the same number in `prompt_B` have the same prompt."""
    rows = len(prompt_B)
    width = prompt + completion
    # A number for all tokens of a prompt, and one for all of a completion, is enough to tell rows apart.
    tokens_BL = np.empty((rows, width), dtype=np.int32)
    tokens_BL[:, :prompt] = prompt_B[:, None]
    tokens_BL[:, prompt:] = prompt_B.max() + 1 + np.arange(rows)[:, None]
    scored_BL = np.zeros((rows, width), dtype=bool)
    scored_BL[:, prompt:] = True
    offsets_B = np.zeros(rows, dtype=int)
    return Sequences(tokens_BL, offsets_B, offsets_B + width, scored_BL, width, code_BL=tokens_BL)


def _build_forest(sequences: Sequences) -> Forest:
    return build_forest(sequences.tokens_BL, sequences.needed_B)


# No two completions begin alike, so a row with a dense mask would save nothing.
RULES = passes.PassRules(_build_forest)


def passes_like(longest: Pass, completion: int, ties_ends: bool = False) -> passes.Run:
    """Passes of the size of `longest` that share its trunks.

    Args:
        longest: a pass that reads trunks.
        completion: tokens of a completion.
        ties_ends: see [`passes.PassRules`].
    """
    prompt = longest.trunk // longest.prompts + 1  # a trunk ends before the last token of its prompt
    # Number of prompts that a pass computes itself.
    own = (longest.tokens - longest.prompts - longest.rows * (completion - 1)) // prompt
    # As many passes as make the trunks worth a forward.
    count = 1 + -(-passes.MIN_SAVED_TOKENS // (prompt - 1))
    of_trunks = np.arange(longest.rows - own) % longest.prompts
    own_prompts = longest.prompts + np.arange(count * own).reshape(count, own)
    prompt_of_pass = np.concatenate([np.tile(of_trunks, (count, 1)), own_prompts], axis=1)
    sequences = sequences_of(prompt_of_pass.ravel(), prompt, completion)
    rows_of_pass = list(np.arange(count * longest.rows).reshape(count, longest.rows))
    return passes.Run(passes.Plan.of(sequences, rows_of_pass, replace(RULES, ties_ends=ties_ends)))
