"""Bytes of a pass: two layers of the model run on fake tensors, the others by the slope from the first to the second.

What a layer leaves behind for the backward is what is there after the second layer and was not after the first, so a model of L
layers has (L - 2) of these more than the model of two as its backward begins. Towards its end they are gone, and (L - 2) layers'
gradients are there. The larger of the two is the peak. Nothing is allocated and no weight is read; the number of tokens
is the run's own.
"""

import contextlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from ..scoring.logprobs import VOCABULARY_TILE, choose_head_kernel
from . import skeleton, stand_ins
from .settings import Settings

if TYPE_CHECKING:
    from ..compat.memory import Peak

_PAGE = 1024  # float32 numbers of a page of memory


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
    """Bytes above what is resident (weights, and gradients where they lie there already), for all layers.

    Attributes:
        peak: the most at once.
        head: what the head's tiles are of it: 0 where the peak is elsewhere.
        gradients: what of it are gradients that this pass is the first to make.
        per_layer: what each layer keeps for the backward.
        small: what of the peak lies in blocks that a C library takes from its heap.
        heap: the most at once in such blocks, at the peak or at another time.
        unwritten: what of a buffer of the head nothing is written to: a host gives no page of it, and `peak` has it not.
    """

    peak: int
    head: int
    gradients: int
    per_layer: int
    small: int
    heap: int
    unwritten: int = 0

    @property
    def activations(self) -> int:
        return self.peak - self.head - self.gradients


def makes_gradients(settings: Settings) -> bool:
    """Whether a pass that finds no gradients makes whole ones; where weights or gradients are spread, a rank has parts of them."""
    return settings.launch.kind in ("single", "ddp")


def loss_makes_gradients(settings: Settings) -> bool:
    """Whether the loss's pass is the first of its step to make gradients, and so has them in its own bytes."""
    return makes_gradients(settings) and settings.gradient_accumulation_steps == 1


def loss_shape(settings: Settings, packed: bool, on_gpu: bool) -> Shape:
    """The micro-batch of the loss: P + G·C tokens per group on a packed row, B·(P + C) padded.

    Every completion is taken to be as long as it may be, and none to be left out for its advantage.
    """
    rows, prompt, completion = (
        settings.per_device_train_batch_size,
        settings.prompt_tokens,
        settings.max_completion_length,
    )
    if packed:
        # A segment starts with a copy of the prompt's last token.
        return Shape(1, settings.groups * prompt + rows * completion, rows * completion, True)
    return _padded(rows, prompt, completion, on_gpu)


def comparison_shape(settings: Settings, on_gpu: bool) -> Shape:
    """What the first step compares, padded: two completions of a prompt and one of another, as far as there are.

    More than what is compared now: padded rows go one by one, see `prefix_sharing.self_check.compare`.
    """
    other = int(settings.groups > 1)
    rows = min(2, settings.num_generations, settings.per_device_train_batch_size) + other
    return _padded(rows, settings.prompt_tokens, settings.max_completion_length, on_gpu)


def _padded(rows: int, prompt: int, completion: int, on_gpu: bool) -> Shape:
    # On a CPU TRL's kernel projects every position.
    scored = rows * completion if on_gpu else rows * (prompt + completion - 1)
    return Shape(rows, prompt + completion, scored, False)


def loss(settings: Settings, config: PretrainedConfig, packed: bool, on_gpu: bool, grad: bool = True) -> PassBytes:
    """Bytes of the loss's forward and backward, or without `grad` of the largest scoring pass on the same tokens."""
    shape, bare = loss_shape(settings, packed, on_gpu), not grad and _scores_bare(settings)
    return measure(settings, config, shape, grad, on_gpu, loss_makes_gradients(settings), bare)


def _scores_bare(settings: Settings) -> bool:
    """Whether the reference alone is scored: with LoRA, the base without its adapter."""
    return settings.model.use_peft and settings.scores_again and not settings.scores_policy


def comparison(settings: Settings, config: PretrainedConfig, grad: bool, on_gpu: bool) -> PassBytes:
    """Bytes of the first step's comparison of packed with padded rows, at its peak (`prefix_sharing.self_check.compare`).

    One pass follows the other, nothing draws in them, and the gradients of the first lie aside while the second makes its own.
    """
    bare = not grad and _scores_bare(settings)
    if settings.launch.kind.startswith("zero"):
        grad = False  # DeepSpeed's backward cannot be undone, so that the values alone are compared
    settings = replace(settings, model=replace(settings.model, lora_dropout=0.0))
    shape = comparison_shape(settings, on_gpu)
    return measure(settings, config, shape, grad, on_gpu, makes_gradients(settings), bare)


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
        settings: of the run.
        config: of the base.
        shape: of the input.
        grad: forward and backward; otherwise a forward alone.
        on_gpu: whose kernels' tiles are counted.
        first: it finds no gradients, and makes them.
        bare: without the adapter.
    """
    return _measure(skeleton.modules(settings, config), shape, grad, on_gpu, grad and first, bare)


@lru_cache(maxsize=256)
def _measure(of: skeleton.Modules, shape: Shape, grad: bool, on_gpu: bool, first: bool, bare: bool) -> PassBytes:
    layers = of.config.get_text_config().num_hidden_layers
    run = _run(of.settings, of.config, min(2, layers), shape, grad, on_gpu, first, bare)
    others = max(0, layers - 2) if grad else 0
    begin = run.begin.above(run.before, others * run.slope, 0, others * run.slope_small)
    end = run.end.above(run.before, others * run.gradients, others * run.gradients, others * run.gradients_small)
    peak = max(begin, end, key=lambda one: one.total)
    head = run.tiles if peak.place == "head" else 0
    heap = max(begin.most_small, end.most_small)
    return PassBytes(peak.total, head, peak.gradients, run.slope, peak.small, heap, run.unwritten)


@dataclass
class _Run:
    """What a pass of a few layers took.

    Attributes:
        before: what lay there.
        begin, end: the peak up to the moment when the second layer's backward is done, and from then on.
        slope, slope_small: what the second layer keeps for its backward, all and in small blocks.
        gradients, gradients_small: of a layer, where this pass makes them.
        tiles: what the head's tiles add.
        unwritten: see [`PassBytes`].
    """

    before: "Peak"
    begin: "Peak"
    end: "Peak"
    slope: int
    slope_small: int
    gradients: int
    gradients_small: int
    tiles: int
    unwritten: int


def _run(settings, config, layers, shape: Shape, grad, on_gpu, first: bool, bare: bool = False) -> _Run:
    from ..compat.memory import FakeTensorMode, PeakTracker

    with skeleton.quiet(), torch.random.fork_rng(devices=[]):
        model = skeleton.build(settings, config, layers)
        _as_trained(model, settings)
        mode = FakeTensorMode()
        fake(model, mode)
        with mode:
            for parameter in model.parameters():
                if parameter.requires_grad and grad and not first:
                    parameter.grad = torch.zeros_like(parameter)
            tracker = PeakTracker()
            tracker.track(model)
            with tracker:
                before = tracker.take()
                watch = _Watch(model, layers, tracker, first)
                adapter = model.disable_adapter() if bare else contextlib.nullcontext()
                with torch.set_grad_enabled(grad), _autocast(settings), adapter:
                    forward = _forward(model, shape, on_gpu, tracker, settings)
                if grad:
                    forward.values.sum().backward()
                end = tracker.take()
            gradients = watch.layer_gradients()
            return _Run(before, watch.begin or end, end, *watch.slope(), *gradients, forward.tiles, forward.unwritten)


class _Watch:
    """Looks at a pass where its second layer ends: in the forward, and in the backward, which then comes to the first.

    Attributes:
        begin: the peak so far when the second layer's backward is done; `None` without a backward or a second layer.
    """

    def __init__(self, model: nn.Module, layers: int, tracker, first: bool):
        self.tracker, self.begin = tracker, None
        self._after: list[tuple[int, int]] = []
        stacks = (part for part in skeleton.backbone(model).modules() if isinstance(part, nn.ModuleList))
        self._layers = next(stack for stack in stacks if len(stack) == layers)
        for layer in self._layers:
            layer.register_forward_hook(self._layer_done)
        self._trained = [p for p in self._layers[-1].parameters() if p.requires_grad] if first else []
        for parameter in model.parameters() if first else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient_made)

    def _layer_done(self, _layer, _inputs, output) -> None:
        if len(self._after) == len(self._layers):
            return  # computed again for the backward
        hidden = output[0] if isinstance(output, tuple) else output
        self._after.append((self.tracker.now(), self.tracker.small))
        if len(self._after) == 1 and len(self._layers) > 1 and hidden.requires_grad:
            hidden.register_hook(self._back_at_first)

    def _back_at_first(self, _grad) -> None:
        self.begin = self.tracker.take()

    def _gradient_made(self, parameter) -> None:
        self.tracker.gradients += parameter.grad.nbytes

    def slope(self) -> tuple[int, int]:
        """What the last layer left, all and in small blocks."""
        if len(self._after) < 2:
            return 0, 0
        (one, one_small), (two, two_small) = self._after[-2:]
        return two - one, two_small - one_small

    def layer_gradients(self) -> tuple[int, int]:
        from ..compat.memory import HEAP_BLOCK

        sizes = [parameter.nbytes for parameter in self._trained]
        return sum(sizes), sum(size for size in sizes if size < HEAP_BLOCK)


class _Forward(NamedTuple):
    """What a backward starts from, what the head's tiles add, and what of its buffer nothing is written to."""

    values: torch.Tensor
    tiles: int = 0
    unwritten: int = 0


def _forward(model: nn.Module, shape: Shape, on_gpu: bool, tracker, settings) -> _Forward:
    mask = torch.ones((1, 1, 1, 1) if shape.packed else (shape.rows, 1, shape.length, shape.length), dtype=torch.bool)
    ids = torch.zeros(shape.rows, shape.length, dtype=torch.long)
    positions = torch.zeros_like(ids)
    weight = _head_weight(skeleton.causal_model(model)) if shape.scored else None
    out = skeleton.backbone(model)(
        input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).last_hidden_state
    if not shape.scored:
        return _Forward(out)
    hidden = out.flatten(0, 1)[torch.zeros(shape.scored, dtype=torch.long)]
    del out
    before = tracker.now()
    values, unwritten = _head(hidden, weight, shape, on_gpu, tracker, settings)
    return _Forward(values, max(0, tracker.peak() - before), unwritten)


def _head_weight(causal: nn.Module) -> torch.Tensor:
    """The head's; where it is tied to trained embeddings, these look up rows of another view of it from now on."""
    weight, embeddings = causal.get_output_embeddings().weight, causal.get_input_embeddings()
    if embeddings.weight is not weight or not (weight.requires_grad and torch.is_grad_enabled()):
        return weight
    looked_up, weight = stand_ins.BothUses.apply(weight)
    del embeddings.weight
    embeddings.weight = looked_up
    return weight


def _head(hidden_NH, weight_VH, shape: Shape, on_gpu: bool, tracker, settings: Settings) -> tuple[torch.Tensor, int]:
    """Log-probabilities, and the bytes of the kernel's buffer that nothing is written to."""
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
        tiles = stand_ins.tiles(on_gpu)
        return stand_ins.FrozenHead.apply(hidden_NH, weight_VH, tiles, keep, tracker), 0
    from ..compat.memory import TRL_TOKEN_CHUNK, TRL_VOCABULARY_CHUNK
    from ..compat.trl import ChunkedLogProbFunction

    chunk = VOCABULARY_TILE if shape.packed else TRL_VOCABULARY_CHUNK
    if on_gpu:
        return stand_ins.TrainedHead.apply(hidden_NH, weight_VH, chunk, tracker), 0

    # The buffer is as wide as the chunk, however small the vocabulary: a host never gives the pages that nothing is written to.
    written = min(chunk, -(-len(weight_VH) // _PAGE) * _PAGE)
    unwritten = min(TRL_TOKEN_CHUNK, len(hidden_NH)) * (chunk - written) * 4
    targets = torch.zeros(len(hidden_NH), dtype=torch.long)
    tracker.place = "head"
    values, *_ = ChunkedLogProbFunction.apply(
        hidden_NH, weight_VH, None, targets, 1.0, written, None, 1.0, ("log_probs", "entropy")
    )
    tracker.place = None
    return values, unwritten


def _as_trained(model: nn.Module, settings: Settings) -> None:
    model.train()
    if settings.gradient_checkpointing:
        causal = skeleton.causal_model(model)
        causal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if hasattr(model, "peft_config"):
            model.enable_input_require_grads()


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


def _autocast(settings: Settings):
    if settings.mixed is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, settings.mixed))
