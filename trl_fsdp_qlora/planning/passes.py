"""Bytes of a pass: two layers of the model run on fake tensors, the others by the slope from the first to the second.

What a layer keeps for the backward is what is there after the second layer and was not after the first, so a model of L layers has
(L - 2) of these more than the model of two as its backward begins. Towards its end they are gone, and (L - 2) layers' gradients
are there. The larger of the two is the peak. Nothing is allocated and no weight is read; the number of tokens is the run's own.
"""

import contextlib
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from ..prefix_sharing.support import keeps_keys, layer_types
from ..scoring.logprobs import VOCABULARY_TILE, choose_head_kernel
from . import fake_ops
from .model import build, causal_model
from .settings import Settings


class Shape(NamedTuple):
    """What a pass is run on.

    Attributes:
        rows, length: of the input; a packed row is one row of its tokens.
        scored: positions whose log-probability is taken; 0 for a pass without head.
        packed: rows need no mask, and a kernel of `scoring/` scores.
    """

    rows: int
    length: int
    scored: int
    packed: bool


class PassBytes(NamedTuple):
    """Bytes of a pass at its peak above what lies there, and what of it are gradients that it is the first to make."""

    peak: int
    gradients: int


def makes_gradients(settings: Settings) -> bool:
    """Whether the loss's pass is the first of its step to make gradients, whole ones, and so has them in its own bytes."""
    return settings.launch.kind in ("single", "ddp") and settings.gradient_accumulation_steps == 1


def loss_shape(settings: Settings, packed: bool, on_gpu: bool) -> Shape:
    """The micro-batch of the loss: P + G·C tokens per group on a packed row, B·(P + C) padded; every completion at full length."""
    rows, prompt, length = settings.per_device_train_batch_size, settings.prompt_tokens, settings.max_completion_length
    if packed:  # a segment starts with a copy of the prompt's last token
        return Shape(1, settings.groups * prompt + rows * length, rows * length, True)
    # On a CPU TRL's kernel projects every position.
    return Shape(rows, prompt + length, rows * (length if on_gpu else prompt + length - 1), False)


def loss(settings: Settings, config: PretrainedConfig, packed: bool, on_gpu: bool, grad: bool = True) -> PassBytes:
    """Bytes of the loss's forward and backward, or without `grad` of a scoring pass on the same tokens."""
    return measure(settings, config, loss_shape(settings, packed, on_gpu), on_gpu, grad, makes_gradients(settings))


# By what they depend on: plans of one run (for other numbers of ranks, say) ask for the same again.
_whole: dict[tuple, nn.Module] = {}
_measured: dict[tuple, PassBytes] = {}


def _modules_key(settings: Settings, config: PretrainedConfig) -> tuple:
    """What a pass depends on beside its shape. A setting that `build` or [`_run`] starts to read belongs here."""
    key = repr(settings.model), settings.mixed, settings.gradient_checkpointing, settings.lm_head_kernel
    return *key, settings.launch.kind, config.to_json_string(use_diff=False)


def whole(settings: Settings, config: PretrainedConfig) -> nn.Module:
    """The model with all its layers, without data, built once; nobody changes it."""
    key = _modules_key(settings, config)
    if key not in _whole:
        _whole.clear()
        _whole[key] = build(settings, config)
    return _whole[key]


def measure(
    settings: Settings, config: PretrainedConfig, shape: Shape, on_gpu: bool, grad: bool = False, first: bool = False
) -> PassBytes:
    """Bytes of a pass of the whole model.

    Args:
        settings, config: of the run and its base.
        shape: of the input.
        on_gpu: whose kernels' tiles are counted.
        grad: forward and backward; otherwise a forward alone.
        first: its backward finds no gradients, and makes them.
    """
    key = *_modules_key(settings, config), shape, on_gpu, grad, first
    if key in _measured:
        return _measured[key]
    # Layers by what they are: attention with or without a window, recurrent, both, an MLP alone.
    kinds: dict[str, list[int]] = {}
    for i, kind in enumerate(layer_types(config.get_text_config())):
        kinds.setdefault(kind, []).append(i)
    # One layer of each kind, and another one behind them, which shows what a layer of its kind adds.
    one_each = [layers[0] for layers in kinds.values()]
    alone = config.get_text_config().num_hidden_layers == 1
    runs = {
        kind: _run(
            settings, config, one_each if alone else [*one_each, layers[-1]], shape, on_gpu, grad, grad and first
        )
        for kind, layers in kinds.items()
    }
    kept = sum((len(kinds[kind]) - 1) * run.kept for kind, run in runs.items()) if grad else 0
    made = sum((len(kinds[kind]) - 1) * run.made for kind, run in runs.items()) if grad else 0
    peaks = []
    for run in runs.values():
        begin, end = run.begin, run.end
        if grad and not alone:
            begin = PassBytes(begin.peak + kept - run.kept, begin.gradients)
            end = PassBytes(end.peak + made - run.made, end.gradients + made - run.made)
        peaks += [begin, end]
    return _measured.setdefault(key, max(peaks))


class _Run(NamedTuple):
    """A pass of few layers.

    Attributes:
        begin, end: until the second layer's backward is done, and from then on.
        kept: what the last layer keeps for its backward, in bytes.
        made: its gradients, where this pass makes them, in bytes.
    """

    begin: PassBytes
    end: PassBytes
    kept: int
    made: int


def _run(settings: Settings, config, layers, shape: Shape, on_gpu: bool, grad: bool, first: bool) -> _Run:
    from ..compat.memory import FakeTensorMode, PeakTracker  # names that a version of torch or TRL may not have

    model = build(settings, config, layers).train()
    causal, mode = causal_model(model), FakeTensorMode()
    if settings.gradient_checkpointing:
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if hasattr(model, "peft_config"):
            model.enable_input_require_grads()
    fake(model, mode)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.random.fork_rng(devices=[]), mode:
        for parameter in trained if grad and not first else ():
            parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        tracker = PeakTracker(*model.parameters(), *model.buffers(), *gradients)
        before, after, peaks = tracker.now, [], []

        def take_peak(_gradient=None) -> None:
            peaks.append(PassBytes(tracker.peak - before, tracker.gradients_at_peak))
            tracker.peak, tracker.gradients_at_peak = tracker.now, tracker.gradients

        def layer_done(_layer, _inputs, output) -> None:
            if len(after) == len(layers):
                return  # computed again for the backward
            hidden = output[0] if isinstance(output, tuple) else output
            after.append(tracker.now)
            if len(after) == 1 and len(layers) > 1 and hidden.requires_grad:
                hidden.register_hook(take_peak)

        def gradient_made(parameter) -> None:
            tracker.gradients += parameter.grad.nbytes

        stacks = (part for part in causal.get_decoder().modules() if isinstance(part, nn.ModuleList))
        stack = next(stack for stack in stacks if len(stack) == len(layers))
        for layer in stack:
            layer.register_forward_hook(layer_done)
        for parameter in trained if first else ():
            parameter.register_post_accumulate_grad_hook(gradient_made)
        autocast = contextlib.nullcontext()
        if settings.mixed is not None:
            autocast = torch.autocast("cpu", getattr(torch, settings.mixed))
        with tracker:
            with torch.set_grad_enabled(grad), autocast:
                size = (1, 1, 1, 1) if shape.packed else (shape.rows, 1, shape.length, shape.length)
                mask, ids = torch.ones(size, dtype=torch.bool), torch.zeros(shape.rows, shape.length, dtype=torch.long)
                if not any(map(keeps_keys, layer_types(causal.config.get_text_config()))):
                    mask = None  # of Mamba, whose layers would multiply by it
                inputs = {"attention_mask": mask, "position_ids": torch.zeros_like(ids), "use_cache": False}
                values = causal.base_model(input_ids=ids, **inputs).last_hidden_state
                if shape.scored:
                    values = values.flatten(0, 1)[torch.zeros(shape.scored, dtype=torch.long)]
                    values = score(values, causal.get_output_embeddings().weight, shape.packed, on_gpu, settings)
            if grad:
                values.sum().backward()
            take_peak()
    made = sum(p.nbytes for p in stack[-1].parameters() if p.requires_grad) if first else 0
    return _Run(peaks[0], peaks[-1], after[-1] - after[-2] if len(layers) > 1 else 0, made)


def score(hidden_NH, weight_VH, packed: bool, on_gpu: bool, settings: Settings) -> torch.Tensor:
    """Log-probabilities `(N,)` by the kernel that scores on this device, or what takes its bytes."""
    kernel = choose_head_kernel(
        settings.lm_head_kernel,
        "cuda" if on_gpu else "cpu",
        hidden_NH.dtype,
        trained=weight_VH.requires_grad,
        gathered=settings.launch.kind == "fsdp2",
        triton=True,  # torch's CUDA build brings it
    )
    if packed and kernel != "trl":
        return fake_ops.FrozenHead.apply(
            hidden_NH, weight_VH, torch.is_grad_enabled() and hidden_NH.requires_grad, on_gpu
        )
    from ..compat.memory import TRL_VOCABULARY_CHUNK
    from ..compat.trl import ChunkedLogProbFunction

    chunk = VOCABULARY_TILE if packed else TRL_VOCABULARY_CHUNK
    if on_gpu:
        return fake_ops.TrainedHead.apply(hidden_NH, weight_VH, chunk)
    targets = torch.zeros(len(hidden_NH), dtype=torch.long)
    # The buffer is as wide as the chunk; of what a smaller vocabulary never writes to, a host gives no page.
    asked = targets, 1.0, min(chunk, len(weight_VH)), None, 1.0, ("log_probs", "entropy")
    return ChunkedLogProbFunction.apply(hidden_NH, weight_VH, None, *asked)[0]


def fake(model: nn.Module, mode) -> None:
    """Put fake tensors of the host in the place of `model`'s meta tensors; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    with mode:
        for module in model.modules():
            for name, old in module._parameters.items():
                if old is None:
                    continue
                if id(old) not in made:
                    made[id(old)] = nn.Parameter(torch.empty(old.shape, dtype=old.dtype), old.requires_grad)
                module._parameters[name] = made[id(old)]
            for name, old in module._buffers.items():
                if old is not None:
                    module._buffers[name] = torch.empty(old.shape, dtype=old.dtype)
