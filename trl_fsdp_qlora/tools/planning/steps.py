"""The passes of an optimizer step: the trainer's own plan of them, for completions of full length, and their bytes.

Every prompt has the same length and shares no token with another prompt. The rows of a step are its groups, one after
the other. `prefix_sharing.passes.plan_step` needs no model, so it plans the step on numbers in place of tokens.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig

from ...compat.transformers import cache_name
from ...prefix_sharing import passes as sharing
from ...prefix_sharing.batch import Sequences
from ...prefix_sharing.facts import keeps_keys, layer_types
from ...prefix_sharing.forest import build_forest
from ...prefix_sharing.recurrent.kinds import continues_from_states, recurrent_layers
from ...prefix_sharing.recurrent.level_by_level import StateCache
from . import passes
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


def plan_step(settings: Settings, reason: str | None = None) -> Step:
    """The passes of a step; `reason` is why passes of this model cannot share values, or `None` if they can."""
    rows = settings.rows
    accumulated = settings.gradient_accumulation_steps
    padded = settings.prefix_sharing == "off"
    limit = settings.values.get("tokens_per_pass")
    if padded:
        reason = "prefix_sharing: off"
    elif settings.is_paired:
        reason = "nothing is drawn ahead"
    elif limit == 0:
        reason = "tokens_per_pass: 0"
    # A step may need completions that are not generated yet.
    ahead = 1 if settings.is_paired else min(accumulated, settings.rollout_batches)
    plan = None
    if reason is None and (ahead > 1 or limit is not None):
        prompt_B = np.arange(rows * ahead) // settings.num_generations
        sequences = _sequences_of(prompt_B, settings.prompt_tokens, settings.max_completion_length)
        one_by_one = settings.launch.kind.startswith("zero")
        plan = sharing.plan_step(sequences, ahead, _RULES, limit, one_by_one)
    if plan is None:
        shape = passes.loss_shape(settings, not padded, True)
        tokens = shape.rows * shape.length
        return Step(Pass(tokens, rows), accumulated, 0, 0, accumulated * tokens, reason=reason)
    longest = Pass(0, 0)
    computed = 0
    run = sharing.Run(plan)
    for number in range(len(plan.rows_of_pass)):
        *trunks, forward = run.of_pass(number)
        forest = forward.forest
        computed += sum(trunk.forest.tokens for trunk in trunks) + forest.tokens
        of_trunks = int(forest.lengths[forest.computed :].sum())
        size = Pass(forest.tokens, len(forward.rows), of_trunks, forest.kept)
        longest = max(longest, size, key=lambda one: one.tokens + one.trunk)
    repeats = -(-accumulated // ahead)
    return Step(
        longest=longest,
        passes=repeats * len(plan.rows_of_pass),
        trunks=repeats * int(plan.trunks.sum()),
        # A row that is longer than the limit runs alone, in one pass: it is not cut.
        values=repeats * plan.count if plan.passes_per_batch > 1 else 0,
        computed=repeats * computed,
        batches_per_pass=plan.batches_per_pass,
        passes_per_batch=plan.passes_per_batch,
    )


def _sequences_of(prompt_B: np.ndarray, prompt: int, completion: int) -> Sequences:
    """Rows with `prompt` and `completion` tokens: rows with the same number in `prompt_B` have the same prompt."""
    rows = len(prompt_B)
    width = prompt + completion
    # A number for all tokens of a prompt, and one for all of a completion, is enough to distinguish rows.
    tokens_BL = np.empty((rows, width), dtype=np.int32)
    tokens_BL[:, :prompt] = prompt_B[:, None]
    tokens_BL[:, prompt:] = prompt_B.max() + 1 + np.arange(rows)[:, None]
    scored_BL = np.zeros((rows, width), dtype=bool)
    scored_BL[:, prompt:] = True
    offsets_B = np.zeros(rows, dtype=int)
    return Sequences(tokens_BL, offsets_B, offsets_B + width, scored_BL, width, code_BL=tokens_BL)


_RULES = sharing.PassRules(lambda sequences: build_forest(sequences.tokens_BL, sequences.needed_B))


def why_not_keep(settings: Settings, config: PretrainedConfig) -> str | None:
    """The reason why passes of this run cannot reuse values of other passes; `None` if they can.

    The answer goes as far as settings and modules show it (`prefix_sharing.sharing.PromptSharing.plan_step`).
    """
    if settings.launch.kind == "zero3":
        return "ZeRO-3"
    if settings.gradient_checkpointing and settings.checkpointing_kwargs.get("use_reentrant"):
        return "reentrant gradient checkpointing"
    layers = recurrent_layers(passes.whole(settings, config))
    if not all(continues_from_states(type(layer)) for layer in layers):
        return "its recurrent layers continue from no state"
    return None


def measure_step(settings: Settings, config: PretrainedConfig, step: Step, on_gpu: bool) -> int:
    """Peak bytes of a step's passes with gradients on packed rows."""
    longest = step.longest
    if not step.trunks:
        shape = passes.Shape(1, longest.tokens, longest.rows * settings.completion_tokens, True)
        return passes.measure(settings, config, shape, on_gpu, grad=True)
    is_cut = step.passes_per_batch > 1
    key = *passes.modules_key(settings, config), longest, on_gpu, is_cut
    if key not in passes.measured:
        kinds = passes.layers_by_kind(settings, config)
        # A model with a single layer has its peak in the head, other models may not.
        per_kind = 2 if len(kinds) == 1 else 1
        chosen = [layer for layers in kinds for layer in layers[:per_kind]]
        # Each part of a step grows with the number of layers in its own way.
        peaks = np.array(_run_step(settings, config, chosen, longest, on_gpu, is_cut))
        peaks_of_all = peaks.copy()
        for layers in kinds:
            if len(layers) > per_kind:
                with_another = _run_step(settings, config, [*chosen, layers[-1]], longest, on_gpu, is_cut)
                peaks_of_all += (len(layers) - per_kind) * (np.array(with_another) - peaks)
        # Recurrent layers keep a state of each prompt, and the gradients of passes in float32.
        width = config.get_text_config().hidden_size
        states = sum(3 * state_bytes(layer, width) for layer in recurrent_layers(passes.whole(settings, config)))
        passes.measured[key] = int(peaks_of_all.max()) + longest.prompts * states
    return passes.measured[key]


def state_bytes(layer: nn.Module, width: int) -> int:
    """Bytes of the states that a recurrent layer of `width`, on the meta device, keeps of one row."""
    dtype = next(p.dtype for p in layer.parameters() if p.is_floating_point())
    cache = StateCache()
    layer(torch.empty(1, 8, width, dtype=dtype, device="meta"), **{cache_name(type(layer)): cache})
    return sum(state.nbytes for state in cache.after.values())


def _run_step(
    settings: Settings, config: PretrainedConfig, layers: list[int], longest: Pass, on_gpu: bool, is_cut: bool
) -> list[int]:
    """Run the trunk, its first pass and its last pass of a model of few layers.

    Args:
        longest: the pass that holds most; both passes are as long as this one.
        is_cut: values were computed before, without a graph and with a trunk of their own.

    Returns:
        Three peaks in bytes: of the trunk and its first pass, of its last pass, and of the trunk's backward.
    """
    kinds = layer_types(config.get_text_config())
    # Fake layers keep no states, so the backward of a trunk with recurrent layers begins at its end.
    ties_ends = settings.launch.kind == "fsdp2" or not all(map(keeps_keys, kinds))
    peaks = []
    with passes.few_layers(settings, config, layers, on_gpu, grad=True) as (causal, tracker):
        before = tracker.now
        weight_VH = causal.get_output_embeddings().weight

        def run(forward: sharing.Forward) -> torch.Tensor | None:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            mask.view_of_pass = forward.view  # a fake tensor cannot be a `RowMask`
            hidden = passes.hidden_states(causal, 1, forward.forest.tokens, mask)
            forward.view.end(hidden)
            if forward.view.scores_nothing:
                return None
            scored = torch.zeros(int(forward.sequences.scored_BL.sum()), dtype=torch.long)
            scores = passes.score(hidden.flatten(0, 1)[scored], weight_VH, True, on_gpu, settings)
            return forward.view.with_collected(scores)

        def end_part() -> None:
            peaks.append(tracker.peak - before)
            tracker.peak = tracker.now

        with passes.autocast(settings):
            if is_cut:
                values = passes_like(longest, settings.max_completion_length)
                with torch.no_grad():
                    for forward in values.of_pass(0):
                        run(forward)
            shared_passes = passes_like(longest, settings.max_completion_length, ties_ends)
            for number in (0, len(shared_passes.plan.rows_of_pass) - 1):
                *trunks, forward = shared_passes.of_pass(number)
                for trunk in trunks:
                    run(trunk)
                scores = run(forward)
                if number:
                    # The trunk's backward begins with the last value that the trunk kept. Without a border between the
                    # two backwards, the larger peak of few layers would hide the one that grows with more of them.
                    ends = [*shared_passes.cache.trunk_ends.values()] or [shared_passes.cache.of(0)[-1][0]]
                    ends[0].register_hook(lambda _: end_part())
                with torch.autocast("cpu", enabled=False):
                    scores.sum().backward()
                del scores
                end_part()
    return peaks


def passes_like(longest: Pass, completion: int, ties_ends: bool = False) -> sharing.Run:
    """Passes of the size of `longest` that share its trunks.

    Args:
        longest: a pass that reads trunks.
        completion: tokens of a completion.
        ties_ends: see `prefix_sharing.passes.PassRules`.
    """
    prompt = longest.trunk // longest.prompts + 1  # a trunk ends before the last token of its prompt
    computed_prompts = (longest.tokens - longest.prompts - longest.rows * (completion - 1)) // prompt
    # As many passes as make the trunks worth a forward.
    count = 1 + -(-sharing.MIN_SAVED_BY_TRUNK // (prompt - 1))
    of_trunks = np.arange(longest.rows - computed_prompts) % longest.prompts
    new_prompts = longest.prompts + np.arange(count * computed_prompts).reshape(count, computed_prompts)
    prompt_of_pass = np.concatenate([np.tile(of_trunks, (count, 1)), new_prompts], axis=1)
    sequences = _sequences_of(prompt_of_pass.ravel(), prompt, completion)
    rows_of_pass = list(np.arange(count * longest.rows).reshape(count, longest.rows))
    return sharing.Run(sharing.Plan.of(sequences, rows_of_pass, replace(_RULES, ties_ends=ties_ends)))
