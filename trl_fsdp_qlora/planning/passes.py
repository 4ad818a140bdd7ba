"""Bytes of a pass: two layers of the model run on fake tensors, the others by the slope from the first to the second.

What a layer keeps for the backward is what is there after the second layer and was not after the first, so a model of L layers has
(L - 2) of these more than the model of two as its backward begins. Towards its end they are gone, and (L - 2) layers' gradients
are there. The larger of the two is the peak. Nothing is allocated and no weight is read; the number of tokens is the run's own.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from ..prefix_sharing.self_check import ROWS_HALF
from ..prefix_sharing.support import layer_types
from ..scoring.logprobs import VOCABULARY_TILE, choose_head_kernel
from . import stand_ins
from .model import build, causal_model, compute_dtype, quiet
from .settings import Settings


@dataclass(frozen=True)
class Shape:
    """What a pass is run on.

    Attributes:
        rows, length: of the input; a packed row is one row of its tokens.
        scored: positions whose log-probability is taken; 0 for a pass without head.
        packed: rows need no mask, and a kernel of `scoring/head_choice.py` scores.
    """

    rows: int
    length: int
    scored: int
    packed: bool


@dataclass(frozen=True)
class PassBytes:
    """Bytes above what lies there (weights, and gradients where they were made before), for all layers.

    Attributes:
        peak: the most at once.
        head: what the head's tiles are of it: 0 where the peak is elsewhere.
        gradients: what of it are gradients that this pass is the first to make.
        per_layer: what each layer keeps for the backward.
    """

    peak: int
    head: int
    gradients: int
    per_layer: int

    @property
    def activations(self) -> int:
        return self.peak - self.head - self.gradients


def loss_makes_gradients(settings: Settings) -> bool:
    """Whether the loss's pass is the first of its step to make gradients, whole ones, and so has them in its own bytes."""
    return settings.launch.kind in ("single", "ddp") and settings.gradient_accumulation_steps == 1


def loss_shape(settings: Settings, packed: bool, on_gpu: bool) -> Shape:
    """The micro-batch of the loss: P + G·C tokens per group on a packed row, B·(P + C) padded; every completion at full length."""
    rows, prompt, completion = (
        settings.per_device_train_batch_size,
        settings.prompt_tokens,
        settings.max_completion_length,
    )
    if packed:  # a segment starts with a copy of the prompt's last token
        return Shape(1, settings.groups * prompt + rows * completion, rows * completion, True)
    return _padded(rows, prompt, completion, on_gpu)


def _padded(rows: int, prompt: int, completion: int, on_gpu: bool) -> Shape:
    # On a CPU TRL's kernel projects every position.
    scored = rows * completion if on_gpu else rows * (prompt + completion - 1)
    return Shape(rows, prompt + completion, scored, False)


def loss(settings: Settings, config: PretrainedConfig, packed: bool, on_gpu: bool, grad: bool = True) -> PassBytes:
    """Bytes of the loss's forward and backward, or without `grad` of a scoring pass on the same tokens."""
    # With LoRA the reference is the base without its adapter.
    bare = not grad and settings.model.use_peft and settings.scores_again and not settings.scores_policy
    shape, first = loss_shape(settings, packed, on_gpu), loss_makes_gradients(settings)
    return measure(settings, config, shape, grad, on_gpu, first, bare)


def comparison(settings: Settings, config: PretrainedConfig, on_gpu: bool) -> int:
    """Bytes that the comparison before the first pass takes beside the gradients of its packed rows (`prefix_sharing.self_check`).

    Padded rows go one by one, with gradients; in half precision all of them once more without. The packed pass of the same
    rows has no more tokens than the loss's own. Nothing draws in it; a backward under DeepSpeed cannot be undone, so there values
    alone are compared.
    """
    prompt, completion = settings.prompt_tokens, settings.max_completion_length
    settings = replace(settings, model=replace(settings.model, lora_dropout=0.0))
    grad = not settings.launch.kind.startswith("zero")
    one = measure(settings, config, _padded(1, prompt, completion, on_gpu), grad, on_gpu).peak
    if compute_dtype(settings, config) == torch.float32:
        return one
    rows = min(ROWS_HALF, settings.per_device_train_batch_size)
    return max(one, measure(settings, config, _padded(rows, prompt, completion, on_gpu), False, on_gpu).peak)


def measure(
    settings: Settings,
    config: PretrainedConfig,
    shape: Shape,
    grad: bool,
    on_gpu: bool,
    first: bool = False,
    bare: bool = False,
) -> PassBytes:
    """Bytes of a pass of the whole model, measured once for all plans with these modules.

    Args:
        settings, config: of the run and its base.
        shape: of the input.
        grad: forward and backward; otherwise a forward alone.
        on_gpu: whose kernels' tiles are counted.
        first: it finds no gradients, and makes them.
        bare: without the adapter.
    """
    return _measure(_Modules.of(settings, config), shape, grad, on_gpu, grad and first, bare)


@dataclass(frozen=True)
class _Modules:
    """What a pass depends on beside its shape. A setting that `build` or [`_run`] starts to read belongs into `key`."""

    key: tuple
    run: tuple

    @classmethod
    def of(cls, settings: Settings, config: PretrainedConfig) -> "_Modules":
        key = repr(settings.model), settings.mixed, settings.gradient_checkpointing, settings.lm_head_kernel
        return cls((*key, settings.launch.kind, config.to_json_string(use_diff=False)), (settings, config))

    def __eq__(self, other) -> bool:
        return self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=1)
def _whole(modules: _Modules) -> nn.Module:
    return build(*modules.run)


def whole(settings: Settings, config: PretrainedConfig) -> nn.Module:
    """The model with all its layers, without data, built once; nobody changes it."""
    return _whole(_Modules.of(settings, config))


@lru_cache(maxsize=256)
def _measure(modules: _Modules, shape: Shape, grad: bool, on_gpu: bool, first: bool, bare: bool) -> PassBytes:
    kinds = _layers_of_each_kind(modules.run[1])
    alone = sum(map(len, kinds)) == 1
    # One layer of each kind, and another one behind them, which shows what a layer of its kind adds.
    one_each = [kind[0] for kind in kinds]
    runs = [
        _run(*modules.run, one_each if alone else [*one_each, kind[-1]], shape, grad, on_gpu, first, bare)
        for kind in kinds
    ]
    others = sum((len(kind) - 1) * run.slope for kind, run in zip(kinds, runs, strict=True))
    gradients = sum((len(kind) - 1) * run.gradients for kind, run in zip(kinds, runs, strict=True))
    found = []
    for run in runs:
        more, made = (others - run.slope, gradients - run.gradients) if grad and not alone else (0, 0)
        found.append((run.begin[0] + more, *run.begin[1:]))
        found.append((run.end[0] + made, run.end[1] + made, run.end[2]))
    peak, gradients, in_head = max(found, key=lambda one: one[0])
    return PassBytes(peak, runs[0].tiles if in_head else 0, gradients, max(run.slope for run in runs))


def _layers_of_each_kind(config: PretrainedConfig) -> list[list[int]]:
    """The layers of a decoder by what they are: attention with or without a window, recurrent, both, an MLP alone."""
    text, found = config.get_text_config(), {}
    for i, kind in enumerate(layer_types(text)):
        found.setdefault(kind, []).append(i)
    return list(found.values())


class _Run(NamedTuple):
    """A pass of few layers, in bytes above what lay there before it.

    Attributes:
        begin, end: `(peak, gradients made then, whether in the head)` until the second layer's backward is done, and from then on.
        slope: what the second layer keeps for its backward.
        gradients: of a layer, where this pass makes them.
        tiles: what the head's tiles add.
    """

    begin: tuple[int, int, bool]
    end: tuple[int, int, bool]
    slope: int
    gradients: int
    tiles: int


def _run(
    settings: Settings, config, kept: list[int], shape: Shape, grad, on_gpu, first: bool, bare: bool = False
) -> _Run:
    from ..compat.memory import FakeTensorMode, PeakTracker

    with quiet(), torch.random.fork_rng(devices=[]):
        model, layers = build(settings, config, kept).train(), len(kept)
        if settings.gradient_checkpointing:
            causal = causal_model(model)
            causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            if hasattr(model, "peft_config"):
                model.enable_input_require_grads()
        mode = FakeTensorMode()
        fake(model, mode)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with mode:
            for parameter in trained if grad and not first else ():
                parameter.grad = torch.zeros_like(parameter)
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            tracker = PeakTracker(*model.parameters(), *model.buffers(), *gradients)
            before, after, peaks = tracker.now, [], []

            def take(_gradient=None) -> None:
                peaks.append((tracker.peak - before, *tracker.at_peak))
                tracker.peak, tracker.at_peak = tracker.now, (tracker.gradients, tracker.in_head)

            def layer_done(_layer, _inputs, output) -> None:
                if len(after) == layers:
                    return  # computed again for the backward
                hidden = output[0] if isinstance(output, tuple) else output
                after.append(tracker.now)
                if len(after) == 1 and layers > 1 and hidden.requires_grad:
                    hidden.register_hook(take)

            def gradient_made(parameter) -> None:
                tracker.gradients += parameter.grad.nbytes

            stacks = (part for part in causal_model(model).get_decoder().modules() if isinstance(part, nn.ModuleList))
            stack = next(stack for stack in stacks if len(stack) == layers)
            for layer in stack:
                layer.register_forward_hook(layer_done)
            for parameter in trained if first else ():
                parameter.register_post_accumulate_grad_hook(gradient_made)
            autocast = contextlib.nullcontext()
            if settings.mixed is not None:
                autocast = torch.autocast("cpu", getattr(torch, settings.mixed))
            with tracker:
                adapter = model.disable_adapter() if bare else contextlib.nullcontext()
                with torch.set_grad_enabled(grad), autocast, adapter:
                    values, tiles = _forward(model, shape, on_gpu, tracker, settings)
                if grad:
                    values.sum().backward()
                take()
        made = sum(p.nbytes for p in stack[-1].parameters() if p.requires_grad) if first else 0
        slope = after[-1] - after[-2] if layers > 1 else 0
        return _Run(peaks[0], peaks[-1], slope, made, tiles)


def _forward(model: nn.Module, shape: Shape, on_gpu: bool, tracker, settings: Settings) -> tuple[torch.Tensor, int]:
    """What a backward starts from, and what the head's tiles add."""
    causal = causal_model(model)
    mask = torch.ones((1, 1, 1, 1) if shape.packed else (shape.rows, 1, shape.length, shape.length), dtype=torch.bool)
    ids = torch.zeros(shape.rows, shape.length, dtype=torch.long)
    weight = _head_weight(causal) if shape.scored else None
    arguments = {"attention_mask": mask, "position_ids": torch.zeros_like(ids), "use_cache": False}
    out = causal.base_model(input_ids=ids, **arguments).last_hidden_state
    if not shape.scored:
        return out, 0
    hidden = out.flatten(0, 1)[torch.zeros(shape.scored, dtype=torch.long)]
    del out
    before = tracker.now
    values = _head(hidden, weight, shape, on_gpu, tracker, settings)
    return values, max(0, tracker.peak - before)


def _head_weight(causal: nn.Module) -> torch.Tensor:
    """The head's; where it is tied to trained embeddings, these look up rows of another view of it from now on."""
    weight, embeddings = causal.get_output_embeddings().weight, causal.get_input_embeddings()
    if embeddings.weight is not weight or not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    looked_up, weight = stand_ins.BothUses.apply(weight)
    del embeddings.weight
    embeddings.weight = looked_up
    return weight


def _head(hidden_NH, weight_VH, shape: Shape, on_gpu: bool, tracker, settings: Settings) -> torch.Tensor:
    kernel = choose_head_kernel(
        settings.lm_head_kernel,
        "cuda" if on_gpu else "cpu",
        hidden_NH.dtype,
        trained=weight_VH.requires_grad,
        gathered=settings.launch.kind == "fsdp2",
        triton=True,  # torch's CUDA build brings it
    )
    if shape.packed and kernel != "trl":
        keep = torch.is_grad_enabled() and hidden_NH.requires_grad
        return stand_ins.FrozenHead.apply(hidden_NH, weight_VH, stand_ins.tiles(on_gpu), keep, tracker)
    from ..compat.memory import TRL_VOCABULARY_CHUNK
    from ..compat.trl import ChunkedLogProbFunction

    chunk = VOCABULARY_TILE if shape.packed else TRL_VOCABULARY_CHUNK
    if on_gpu:
        return stand_ins.TrainedHead.apply(hidden_NH, weight_VH, chunk, tracker)
    targets = torch.zeros(len(hidden_NH), dtype=torch.long)
    # The buffer is as wide as the chunk; of what a smaller vocabulary never writes to, a host gives no page.
    chunk = min(chunk, len(weight_VH))
    tracker.in_head = True
    values, *_ = ChunkedLogProbFunction.apply(
        hidden_NH, weight_VH, None, targets, 1.0, chunk, None, 1.0, ("log_probs", "entropy")
    )
    tracker.in_head = False
    return values


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
