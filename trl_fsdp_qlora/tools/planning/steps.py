"""Bytes of the loss: of the largest pass of an optimizer step, with all completions at full length.

Every prompt has the same length and shares no token with another prompt. The rows of a step are its groups, one after
the other. `prefix_sharing.passes.plan_step` needs no model, so it plans the step on numbers in place of tokens.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ...compat.transformers import cache_name
from ...prefix_sharing import passes as sharing
from ...prefix_sharing.batch import Sequences
from ...prefix_sharing.facts import keeps_keys, layer_types
from ...prefix_sharing.forest import build_forest
from ...prefix_sharing.recurrent.kinds import continues_from_states, recurrent_layers
from ...prefix_sharing.recurrent.level_by_level import StateCache
from .passes import FakeRun, Shape, compared_shape, loss_shape, measured
from .settings import Settings


class Pass(NamedTuple):
    """The size of a pass with gradients on a packed row.

    Attributes:
        tokens: tokens of its packed row.
        rows: completions that it scores.
        trunk: tokens of the trunks whose keys it reads.
        prompts: number of prompts whose trunks these are.
        is_cut: its micro-batch has several passes, so that values were computed before, without a graph.
    """

    tokens: int
    rows: int
    trunk: int = 0
    prompts: int = 0
    is_cut: bool = False


def loss_bytes(run: FakeRun) -> int:
    """Peak bytes of the passes with gradients, and of the padded forward that checks the first one."""
    settings = run.settings
    if settings.prefix_sharing == "off":
        return run.measure(loss_shape(settings, False, run.on_gpu), grad=True)
    loss = pass_bytes(run, longest_pass(settings, can_share(run)))
    return max(loss, run.measure(compared_shape(settings, run.config, run.on_gpu), grad=True))


def can_share(run: FakeRun) -> bool:
    """Whether passes of this run can reuse values of other passes, as far as settings and modules show it.

    See `prefix_sharing.sharing.PromptSharing.plan_step`.
    """
    settings = run.settings
    if settings.gradient_checkpointing and settings.checkpointing_kwargs.get("use_reentrant"):
        return False
    return all(continues_from_states(type(layer)) for layer in recurrent_layers(run.whole))


def longest_pass(settings: Settings, can_share: bool = True) -> Pass:
    """The pass with gradients of an optimizer step that holds most, trunks included."""
    rows = settings.per_device_train_batch_size
    limit = settings.values.get("tokens_per_pass")
    # A step may need completions that are not generated yet.
    ahead = min(settings.gradient_accumulation_steps, settings.rollout_batches)
    plan = None
    if can_share and limit != 0 and (ahead > 1 or limit is not None):
        prompt_B = np.arange(rows * ahead) // settings.num_generations
        sequences = _sequences_of(prompt_B, settings.prompt_tokens, settings.max_completion_length)
        plan = sharing.plan_step(sequences, ahead, _RULES, limit)
    if plan is None:
        return Pass(loss_shape(settings, True, True).length, rows)
    sizes = []
    shared = sharing.Run(plan)
    for number in range(len(plan.rows_of_pass)):
        *_, forward = shared.of_pass(number)
        forest = forward.forest
        of_trunks = int(forest.lengths[forest.computed :].sum())
        # A row that is longer than the limit runs alone, in one pass: it is not cut.
        sizes.append(Pass(forest.tokens, len(forward.rows), of_trunks, forest.kept, plan.passes_per_batch > 1))
    return max(sizes, key=lambda size: size.tokens + size.trunk)


def pass_bytes(run: FakeRun, size: Pass) -> int:
    """Peak bytes of a pass with gradients on a packed row. If it reads trunks, other passes read them, too."""
    if not size.trunk:
        return run.measure(Shape(1, size.tokens, size.rows * run.settings.max_completion_length, True), grad=True)
    key = *run.key, size
    if key not in measured:
        kinds = run.layers_by_kind()
        # A model with a single layer has its peak in the head, other models may not.
        per_kind = 2 if len(kinds) == 1 else 1
        chosen = [layer for layers in kinds for layer in layers[:per_kind]]
        # Each part of a step grows with the number of layers in its own way.
        peaks = np.array(_run_step(run, chosen, size))
        peaks_of_all = peaks.copy()
        for layers in kinds:
            if len(layers) > per_kind:
                with_another = _run_step(run, [*chosen, layers[-1]], size)
                peaks_of_all += (len(layers) - per_kind) * (np.array(with_another) - peaks)
        # Recurrent layers keep a state of each prompt, and the gradients of passes in float32.
        width = run.config.get_text_config().hidden_size
        states = sum(3 * state_bytes(layer, width) for layer in recurrent_layers(run.whole))
        measured[key] = int(peaks_of_all.max()) + size.prompts * states
    return measured[key]


def state_bytes(layer: nn.Module, width: int) -> int:
    """Bytes of the states that a recurrent layer of `width`, on the meta device, keeps of one row."""
    dtype = next(p.dtype for p in layer.parameters() if p.is_floating_point())
    cache = StateCache()
    layer(torch.empty(1, 8, width, dtype=dtype, device="meta"), **{cache_name(type(layer)): cache})
    return sum(state.nbytes for state in cache.after.values())


def _run_step(run: FakeRun, layers: list[int], size: Pass) -> list[int]:
    """Run the trunk, its first pass and its last pass of a model of few layers; both passes have this size.

    Returns:
        Three peaks in bytes: of the trunk and its first pass, of its last pass, and of the trunk's backward.
    """
    completion = run.settings.max_completion_length
    # Fake layers keep no states, so the backward of a trunk with recurrent layers begins at its end.
    recurs = not all(map(keeps_keys, layer_types(run.config.get_text_config())))
    peaks = []
    with run.few_layers(layers, grad=True) as (causal, tracker):
        before = tracker.now
        weight_VH = causal.get_output_embeddings().weight

        def score(forward: sharing.Forward) -> torch.Tensor | None:
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            mask.view_of_pass = forward.view  # a fake tensor cannot be a `RowMask`
            hidden = run.hidden_states(causal, 1, forward.forest.tokens, mask)
            forward.view.end(hidden)
            if forward.view.scores_nothing:
                return None
            scored = torch.zeros(int(forward.sequences.scored_BL.sum()), dtype=torch.long)
            scores = run.score(hidden.flatten(0, 1)[scored], weight_VH, True)
            return forward.view.with_collected(scores)

        def end_part() -> None:
            peaks.append(tracker.peak - before)
            tracker.peak = tracker.now

        with run.autocast():
            if size.is_cut:
                values = passes_like(size, completion)
                with torch.no_grad():
                    for forward in values.of_pass(0):
                        score(forward)
            shared_passes = passes_like(size, completion, recurs or run.settings.launch.is_sharded)
            for number in (0, len(shared_passes.plan.rows_of_pass) - 1):
                *trunks, forward = shared_passes.of_pass(number)
                for trunk in trunks:
                    score(trunk)
                scores = score(forward)
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


def passes_like(size: Pass, completion: int, ties_ends: bool = False) -> sharing.Run:
    """Passes of the size of `size`, which reads trunks, that share these trunks.

    Args:
        completion: tokens of a completion.
        ties_ends: see `prefix_sharing.passes.PassRules`.
    """
    prompt = size.trunk // size.prompts + 1  # a trunk ends before the last token of its prompt
    computed_prompts = (size.tokens - size.prompts - size.rows * (completion - 1)) // prompt
    # As many passes as make the trunks worth a forward.
    count = 1 + -(-sharing.MIN_SAVED_BY_TRUNK // (prompt - 1))
    of_trunks = np.arange(size.rows - computed_prompts) % size.prompts
    new_prompts = size.prompts + np.arange(count * computed_prompts).reshape(count, computed_prompts)
    prompt_of_pass = np.concatenate([np.tile(of_trunks, (count, 1)), new_prompts], axis=1)
    sequences = _sequences_of(prompt_of_pass.ravel(), prompt, completion)
    rows_of_pass = list(np.arange(count * size.rows).reshape(count, size.rows))
    return sharing.Run(sharing.Plan.of(sequences, rows_of_pass, replace(_RULES, ties_ends=ties_ends)))


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
