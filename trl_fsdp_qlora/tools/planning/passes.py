"""Bytes of a pass: two layers run on fake tensors, and every other layer adds what the second one kept.

The bytes that a layer keeps for the backward are the difference of the bytes after and before the layer. At the start
of its backward, which is its peak, a model of L layers therefore has (L - 2) times these bytes more than the model of
two layers. Gradients exist from the start, because earlier micro-batches left them. Nothing is allocated and no weight
is read; the number of tokens is that of the run.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from trl.trainer.utils import disable_dropout_in_model

from ...prefix_sharing.check import ROWS_HALF, compared_tokens
from ...prefix_sharing.facts import keeps_keys, layer_types, longest_window
from ...prefix_sharing.passes import Forward
from ...prefix_sharing.recurrent.kinds import goes_on_from_a_state, recurrent_layers, state_bytes
from ...scoring.logprobs import VOCABULARY_TILE, choose_head_kernel
from . import fake_ops
from .distillation import OBJECTIVE, Lesson, answered, teacher_of
from .model import build, causal_model, dtype_of
from .settings import Settings
from .steps import Pass, Step, call_of, passes_like


class Shape(NamedTuple):
    """The input of a pass."""

    rows: int
    length: int  # tokens of a row of the input; a packed row is one row
    scored: int  # positions whose log-probability is computed; 0 for a pass without head
    packed: bool  # rows need no mask, and a kernel of `scoring/` scores
    returned: tuple[int, int] | None = None  # rows and columns of the hidden states that a call without labels returns


def loss_shape(settings: Settings, packed: bool, on_gpu: bool) -> Shape:
    """The micro-batch of the loss, with every completion at full length.

    A packed row has P + G·(C - 1) tokens per group, padded rows have B·(P + C). If data was read, the packed row is
    the largest one that was drawn from it.
    """
    rows = settings.rows
    prompt = settings.prompt_tokens
    length = settings.completion_tokens
    if packed and settings.drawn is not None:
        return Shape(1, settings.drawn.tokens, settings.drawn.scored, True)
    if packed:  # a completion's last token is only ever a target
        return Shape(1, settings.groups * prompt + rows * (length - 1), rows * length, True)
    # On a CPU TRL's kernel projects every position.
    return Shape(rows, prompt + length, rows * (length if on_gpu else prompt + length - 1), False)


def call_shape(settings: Settings, privileged_tokens: int = 0) -> Shape:
    """A micro-batch of a trainer with a teacher, which calls a model for hidden states or logits.

    States of a packed row are put into their places: those of all tokens for `DistillationTrainer`, else those that
    predict a completion, and one more. See [`steps.call_of`] for `privileged_tokens`.
    """
    call = call_of(settings, privileged_tokens)
    rows = settings.rows
    completion = settings.completion_tokens
    returned = rows, call.length if settings.compares_states else completion + 1
    size = (1, call.tokens) if call.packed else (rows, call.length)
    return Shape(*size, rows * completion, call.packed, returned)


def compared_shape(settings: Settings, config: PretrainedConfig, on_gpu: bool) -> Shape:
    """The padded forward, with gradients, that checks the first packed pass (`prefix_sharing.check`).

    It has as many rows as fit into the packed row's tokens, and uses TRL's kernels and masks. Long rows are cut
    (`check.shortened`).
    """
    packed = loss_shape(settings, True, on_gpu)
    prompt = settings.prompt_tokens
    completion = settings.completion_tokens
    most = compared_tokens(prompt + completion, longest_window(config.get_text_config()))
    completion = min(completion, most - min(prompt, most // 2))
    width = min(prompt + completion, most)
    rows = min(max(1, packed.length // width), settings.rows, ROWS_HALF)
    return Shape(rows, width, rows * (completion if on_gpu else width - 1), False)


def scored_shape(settings: Settings, on_gpu: bool) -> Shape:
    """A pass without gradients over a generation batch.

    On packed rows it has as many completions as fit into the tokens of a padded micro-batch.
    """
    if settings.has_teacher:  # the completions of all micro-batches in one call
        rows = {"per_device_train_batch_size": settings.rollout_rows}
        return call_shape(replace(settings, values=settings.values | rows))
    if settings.prefix_sharing == "off" or settings.is_paired or settings.drawn is not None:
        return loss_shape(settings, settings.prefix_sharing != "off", on_gpu)
    prompt = settings.prompt_tokens
    length = settings.max_completion_length
    group = settings.num_generations
    limit = settings.per_device_train_batch_size * (prompt + length)
    groups = min(limit // (prompt + group * (length - 1)), settings.rollout_rows // group)
    rows = groups * group or min(settings.rollout_rows, max(1, (limit - prompt) // max(1, length - 1)))
    return Shape(1, max(1, groups) * prompt + rows * (length - 1), rows * length, True)


# Several plans of one run (for other numbers of ranks, say) need the same measurements. The caches keep the model and
# the passes, each by the settings on which it depends.
_whole: dict[tuple, nn.Module] = {}
_measured: dict[tuple, int] = {}


def _modules_key(settings: Settings, config: PretrainedConfig) -> tuple:
    """The settings on which a pass depends, apart from its shape: all that `build` and [`_run`] read."""
    return (
        repr(settings.model),
        settings.mixed,
        settings.gradient_checkpointing,
        settings.offloads,
        settings.values.get("disable_dropout"),
        settings.every_n_layers,
        settings.mlp_tokens_per_tile,
        settings.lm_head_kernel,
        settings.launch.kind,
        config.to_json_string(use_diff=False),
    )


def whole(settings: Settings, config: PretrainedConfig) -> nn.Module:
    """The model with all its layers, without data. The last two are kept; callers must not change them."""
    key = _modules_key(settings, config)
    if key not in _whole:
        if len(_whole) > 1:  # a model and its teacher
            del _whole[next(iter(_whole))]
        _whole[key] = build(settings, config)
    return _whole[key]


def measure(
    settings: Settings,
    config: PretrainedConfig,
    shape: Shape,
    on_gpu: bool,
    grad: bool = False,
    lesson: Lesson | None = None,
) -> int:
    """Peak bytes that a pass of the whole model adds: forward and, with `grad`, backward.

    `on_gpu` chooses between the kernels of a GPU and of a CPU. With a `lesson` the pass is that of a student, and the
    teacher's forward comes before its loss.
    """
    objective = (*map(settings.values.get, OBJECTIVE), settings.scores_again) if shape.returned else ()
    key = *_modules_key(settings, config), shape, on_gpu, grad, lesson, objective
    if key not in _measured:
        kinds = _layers_by_kind(settings, config)
        # One layer of each kind, and then another one of a kind: the difference is the bytes that its kind adds.
        one_of_each = [layers[0] for layers in kinds.values()]
        has_one_layer = config.get_text_config().num_hidden_layers == 1
        kept_by_others = 0
        peaks = []
        for layers in kinds.values():
            chosen = one_of_each if has_one_layer else [*one_of_each, layers[-1]]
            peak, kept = _run(settings, config, chosen, shape, on_gpu, grad, lesson)
            if settings.offloads and on_gpu and _is_checkpointed(settings, layers[0]):
                kept = 0  # what the second layer found is the first one's input, which the model itself holds
            kept_by_others += (len(layers) - 1) * kept
            peaks.append(peak - kept)
        _measured[key] = kept_by_others + max(peaks)
    return _measured[key]


def measure_with_teacher(settings: Settings, config: PretrainedConfig, on_gpu: bool) -> int:
    """Peak bytes of a student's pass with gradients, in which its teacher reads the same completions without."""
    of_teacher, teachers_config = teacher_of(settings, config)
    reads = call_shape(of_teacher, settings.privileged_tokens)._replace(scored=0)
    lesson = Lesson(
        peak=measure(of_teacher, teachers_config, reads, on_gpu),
        width=teachers_config.get_text_config().hidden_size,
        dtype=dtype_of(of_teacher, teachers_config),
    )
    return measure(settings, config, call_shape(settings), on_gpu, grad=True, lesson=lesson)


def _layers_by_kind(settings: Settings, config: PretrainedConfig) -> dict[tuple[str, bool], list[int]]:
    """Indices of layers by their kind (attention with or without a window, recurrent, both, or an MLP alone), and by
    whether they are checkpointed.
    """
    kinds: dict[tuple[str, bool], list[int]] = {}
    for i, kind in enumerate(layer_types(config.get_text_config())):
        kinds.setdefault((kind, _is_checkpointed(settings, i)), []).append(i)
    return kinds


def _is_checkpointed(settings: Settings, layer: int) -> bool:
    return settings.gradient_checkpointing and layer % settings.every_n_layers == 0


def _few_layers(settings: Settings, config, layers, on_gpu: bool) -> tuple[nn.Module, Any]:
    """Build the model of these layers on fake tensors; return the model and its mode."""
    from ...compat.memory import FakeTensorMode  # a name that some versions of torch or TRL lack

    model = build(settings, config, layers).train()
    causal = causal_model(model)
    if settings.values.get("disable_dropout"):
        disable_dropout_in_model(model)
    if on_gpu:
        fake_ops.run_as_on_a_gpu(model)
    fake_ops.install_tiles(model, settings.mlp_tokens_per_tile)
    mode = FakeTensorMode()
    if settings.gradient_checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        in_order = (x for x in causal.get_decoder().modules() if isinstance(x, GradientCheckpointingLayer))
        for module, layer in zip(in_order, layers, strict=False):
            module.gradient_checkpointing = _is_checkpointed(settings, layer)
        if model is not causal:
            model.enable_input_require_grads()
        if settings.offloads and on_gpu:  # on a CPU the activations are on the host already
            for module in causal.modules():
                checkpoint = vars(module).get("_gradient_checkpointing_func")
                if checkpoint is not None:
                    module._gradient_checkpointing_func = fake_ops.offloaded(checkpoint)
    _fake(model, mode)
    return model, mode


def _autocast(settings: Settings) -> torch.autocast:
    return torch.autocast("cpu", getattr(torch, settings.mixed or "bfloat16"), settings.mixed is not None)


def _run(
    settings: Settings, config, layers, shape: Shape, on_gpu: bool, grad: bool, lesson: Lesson | None = None
) -> tuple[int, int]:
    """Run a pass of few layers; return its peak and the last layer's bytes for the backward."""
    from ...compat.memory import PeakTracker, divergence_tiles_of

    model, mode = _few_layers(settings, config, layers, on_gpu)
    causal = causal_model(model)
    vocabulary = config.get_text_config().vocab_size
    with torch.random.fork_rng(devices=[]), mode, divergence_tiles_of(vocabulary):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad and grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        existing = [*model.parameters(), *model.buffers(), *(parameter.grad for parameter in trained)]
        teachers_head_VH = None
        if lesson is not None:
            teachers_head_VH = torch.empty(vocabulary, lesson.width, dtype=lesson.dtype)
            existing.append(teachers_head_VH)
        tracker = PeakTracker(*existing)
        before = tracker.now
        after_layers = []
        stacks = (part for part in causal.get_decoder().modules() if isinstance(part, nn.ModuleList))
        for layer in next(stack for stack in stacks if len(stack) == len(layers)):
            layer.register_forward_hook(lambda *_: after_layers.append(tracker.now))
        autocast = _autocast(settings)
        with tracker:
            with torch.set_grad_enabled(grad), autocast:
                size = (1, 1, 1, 1) if shape.packed else (shape.rows, 1, shape.length, shape.length)
                mask = torch.ones(size, dtype=torch.bool)
                ids = torch.zeros(shape.rows, shape.length, dtype=torch.long)
                # Mamba's layers would multiply by a mask, so a model of Mamba layers alone gets none.
                attends = any(map(keeps_keys, layer_types(causal.config.get_text_config())))
                inputs = {"attention_mask": mask if attends else None, "position_ids": torch.zeros_like(ids)}
                values = causal.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
                kept = after_layers[-1] - after_layers[-2] if grad and len(layers) > 1 else 0
                if shape.returned is not None:
                    rows, columns = shape.returned
                    if shape.packed:
                        values = values.flatten(0, 1)[torch.zeros(rows * columns, dtype=torch.long)]
                        values = values.unflatten(0, shape.returned)
                    completion = shape.scored // rows
                    values = values[:, -columns:]
                    values = answered(causal, values, completion, settings, lesson, teachers_head_VH, on_gpu)
                elif shape.scored:
                    values = values.flatten(0, 1)[torch.zeros(shape.scored, dtype=torch.long)]
                    values = score(values, causal.get_output_embeddings().weight, shape.packed, on_gpu, settings)
            if grad:
                values.sum().backward()
        return tracker.peak - before, kept


def why_not_keep(settings: Settings, config: PretrainedConfig) -> str | None:
    """The reason why passes of this run cannot reuse values of other passes; `None` if they can.

    The answer goes as far as settings and modules show it (`prefix_sharing.sharing.PromptSharing.plan_step`).
    """
    if settings.launch.kind == "zero3":
        return "ZeRO-3"
    if settings.gradient_checkpointing and settings.checkpointing_kwargs.get("use_reentrant"):
        return "reentrant gradient checkpointing"
    if not all(goes_on_from_a_state(type(layer)) for layer in recurrent_layers(whole(settings, config))):
        return "its recurrent layers go on from no state"
    return None


def measure_of(settings: Settings, config: PretrainedConfig, step: Step, on_gpu: bool) -> int:
    """Peak bytes of a step's passes with gradients on packed rows."""
    longest = step.longest
    is_cut = step.passes_per_batch > 1
    if step.trunks:
        return measure_step(settings, config, longest, on_gpu, is_cut)
    shape = Shape(1, longest.tokens, longest.rows * settings.max_completion_length, True)
    return measure(settings, config, shape, on_gpu, grad=True)


def measure_step(
    settings: Settings, config: PretrainedConfig, longest: Pass, on_gpu: bool, is_cut: bool = False
) -> int:
    """Peak bytes that an optimizer step adds if its passes share trunks, measured on its first and its last pass.

    Args:
        longest: the pass that holds most; both passes are as long as this one.
        is_cut: values were computed before, without a graph and with a trunk of their own.
    """
    key = *_modules_key(settings, config), longest, on_gpu, is_cut
    if key not in _measured:
        kinds = _layers_by_kind(settings, config)
        # A model with a single layer has its peak in the head, other models may not.
        per_kind = 2 if len(kinds) == 1 else 1
        chosen = [layer for layers in kinds.values() for layer in layers[:per_kind]]
        # Each part of a step grows with the number of layers in its own way.
        peaks = np.array(_run_step(settings, config, chosen, longest, on_gpu, is_cut))
        peaks_of_all = peaks.copy()
        for layers in kinds.values():
            if len(layers) > per_kind:
                with_another = _run_step(settings, config, [*chosen, layers[-1]], longest, on_gpu, is_cut)
                peaks_of_all += (len(layers) - per_kind) * (np.array(with_another) - peaks)
        _measured[key] = int(peaks_of_all.max()) + _bytes_of_states(settings, config, longest.prompts)
    return _measured[key]


def _bytes_of_states(settings: Settings, config: PretrainedConfig, prompts: int) -> int:
    """Bytes that recurrent layers keep for `prompts` prompts: their states, and gradients of passes in float32."""
    width = config.get_text_config().hidden_size
    layers = recurrent_layers(whole(settings, config))
    return prompts * sum(3 * state_bytes(layer, width) for layer in layers)


def _run_step(settings: Settings, config, layers, longest: Pass, on_gpu: bool, is_cut: bool) -> list[int]:
    """Run a step of a model of few layers.

    Returns:
        Three peaks in bytes: of the trunk and its first pass, of its last pass, and of the trunk's backward.
    """
    from ...compat.memory import PeakTracker

    model, mode = _few_layers(settings, config, layers, on_gpu)
    causal = causal_model(model)
    layer_kinds = layer_types(causal.config.get_text_config())
    # Fake layers keep no states, so the backward of a trunk with recurrent layers begins at its end.
    ties_ends = settings.launch.kind == "fsdp2" or not all(map(keeps_keys, layer_kinds))
    attends = any(map(keeps_keys, layer_kinds))
    peaks = []
    with torch.random.fork_rng(devices=[]), mode:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        tracker = PeakTracker(*model.parameters(), *model.buffers(), *(parameter.grad for parameter in trained))
        before = tracker.now
        autocast = _autocast(settings)

        def run(forward: Forward) -> torch.Tensor | None:
            ids = torch.zeros(1, forward.forest.tokens, dtype=torch.long)
            mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
            mask.view_of_pass = forward.view  # a fake tensor cannot be a `RowMask`
            inputs = {"attention_mask": mask if attends else None, "position_ids": torch.zeros_like(ids)}
            hidden = causal.base_model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
            forward.view.end(hidden)
            if forward.view.scores_nothing:
                return None
            scored = torch.zeros(int(forward.sequences.scored_BL.sum()), dtype=torch.long)
            weight_VH = causal.get_output_embeddings().weight
            scores = score(hidden.flatten(0, 1)[scored], weight_VH, True, on_gpu, settings)
            return forward.view.with_collected(scores)

        def end_part() -> None:
            peaks.append(tracker.peak - before)
            tracker.peak = tracker.now

        with tracker, autocast:
            if is_cut:
                with torch.no_grad():
                    values = passes_like(longest, settings.max_completion_length)
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


def score(hidden_NH, weight_VH, packed: bool, on_gpu: bool, settings: Settings) -> torch.Tensor:
    """Log-probabilities `(N,)` by the kernel that scores on this device, or by a fake op that takes its bytes."""
    kernel = choose_head_kernel(
        settings.lm_head_kernel,
        "cuda" if on_gpu else "cpu",
        hidden_NH.dtype,
        trained=weight_VH.requires_grad,
        gathered=settings.launch.kind == "fsdp2",
        triton=True,  # torch's CUDA build contains Triton
    )
    if packed and kernel != "trl":
        keep_jacobian = torch.is_grad_enabled() and hidden_NH.requires_grad
        return fake_ops.FrozenHead.apply(hidden_NH, weight_VH, keep_jacobian, on_gpu)
    from ...compat.memory import TRL_VOCABULARY_CHUNK
    from ...compat.trl import ChunkedLogProbFunction

    chunk = VOCABULARY_TILE if packed else TRL_VOCABULARY_CHUNK
    if on_gpu:
        return fake_ops.TrainedHead.apply(hidden_NH, weight_VH, chunk)
    targets = torch.zeros(len(hidden_NH), dtype=torch.long)
    # TRL's buffer is as wide as its chunk, but the host allocates no pages for the part that is never written.
    width = min(chunk, len(weight_VH))
    outputs = ("log_probs", "entropy")
    return ChunkedLogProbFunction.apply(hidden_NH, weight_VH, None, targets, 1.0, width, None, 1.0, outputs)[0]


def _fake(model: nn.Module, mode) -> None:
    """Replace `model`'s meta tensors by fake tensors of the host; tied ones stay tied."""
    fake_by_meta: dict[int, nn.Parameter] = {}
    with mode:
        for module in model.modules():
            for name, meta in module._parameters.items():
                if meta is None:
                    continue
                if id(meta) not in fake_by_meta:
                    fake = torch.empty(meta.shape, dtype=meta.dtype)
                    fake_by_meta[id(meta)] = nn.Parameter(fake, meta.requires_grad)
                module._parameters[name] = fake_by_meta[id(meta)]
            for name, meta in module._buffers.items():
                if meta is not None:
                    module._buffers[name] = torch.empty(meta.shape, dtype=meta.dtype)
