"""Seconds per optimizer step from a roofline: what has to be multiplied and read, over what a card can do, as a range.

The lower end takes the larger of the two times, as if the other were hidden behind it, at the upper shares of the card's figures;
the upper end adds them at the lower shares, with the launches of kernels. No run was compared with it on a card yet.
"""

import time
from dataclasses import dataclass

import torch

from . import components, passes, skeleton, static
from .hardware import Speed
from .plan import Plan
from .settings import Settings

# What it takes to start kernels on a card: assumed, as the shares of a card's figures that are reached are (`hardware.Speed`).
KERNELS = (20, 60)  # of a layer in one pass
LAUNCH = (5e-6, 10e-6)  # seconds of one kernel's start
PHASES = ("generate", "score", "forward_backward", "optimizer")


@dataclass(frozen=True)
class Work:
    """Of a phase, per rank and optimizer step.

    Attributes:
        flops: of products.
        bytes: of weights, cache and states that are read or written.
        layers: layers that are passed through, each a number of kernels.
    """

    flops: float = 0.0
    bytes: float = 0.0
    layers: float = 0.0

    def times(self, number: float) -> "Work":
        return Work(self.flops * number, self.bytes * number, self.layers * number)

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.layers + other.layers)


@dataclass(frozen=True)
class _Model:
    """Numbers of a model that count: weights of its layers and head, of its adapter, and of its attention."""

    layers: int
    base: float
    adapter: float
    head: float
    attention: float
    read: float
    head_bytes: float

    def forward(self, tokens: float, pairs: float) -> float:
        """Operations of the layers: two per weight and token, four per pair of tokens, layer and dimension of attention."""
        return 2 * (self.base + self.adapter) * tokens + 4 * pairs * self.attention


def _model(plan: Plan) -> _Model:
    settings, text = plan.settings, plan.config.get_text_config()
    base, trained = plan.parameters
    head = text.vocab_size * text.hidden_size
    layers = base - head * (1 if getattr(plan.config, "tie_word_embeddings", False) else 2)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    itemsize = skeleton.dtype_of(settings, plan.config).itemsize
    read = layers * itemsize
    if settings.model.load_in_4bit:  # read packed, written and read again as the dense weight that a product takes
        packed, state = skeleton.packed_bytes(layers, settings.model.use_bnb_nested_quant)
        read = packed + state + 2 * read
    return _Model(
        text.num_hidden_layers,
        layers,
        trained if settings.model.use_peft else 0,
        head,
        text.num_hidden_layers * text.num_attention_heads * width,
        read,
        head * itemsize,
    )


def _pairs(settings: Settings, packed: bool) -> float:
    """Pairs of tokens in a micro-batch that attend to each other, per layer."""
    rows, prompt, completion = (
        settings.per_device_train_batch_size,
        settings.prompt_tokens,
        settings.max_completion_length,
    )
    if packed:
        return settings.groups * prompt**2 / 2 + rows * (completion * prompt + completion**2 / 2)
    return rows * (prompt + completion) ** 2 / 2


def work(plan: Plan) -> dict[str, Work]:
    """Phase -> [`Work`], every completion as long as it may be.

    The backward of a frozen weight is one product, of a trained one two; checkpointing repeats the forward; the head makes its
    logits, again for the gradient, and that gradient: three products, four where it is trained.
    """
    settings, model = plan.settings, _model(plan)
    accumulation = settings.gradient_accumulation_steps
    shape = passes.loss_shape(settings, plan.packed, True)
    pairs = _pairs(settings, plan.packed)
    forward = model.forward(shape.length * shape.rows, pairs)
    tokens = shape.length * shape.rows
    trained = model.adapter or model.base
    backward = forward + 2 * trained * tokens + 4 * pairs * model.attention
    again = int(bool(settings.gradient_checkpointing))
    heads = 2 * shape.scored * model.head
    loss = Work(
        forward * (1 + again) + backward + heads * (3 if model.adapter else 4),
        (2 + again) * model.read + 3 * model.head_bytes,
        (2 + again) * model.layers,
    )
    scoring = Work(forward + heads, model.read + model.head_bytes, model.layers)
    uses = settings.num_iterations
    old = uses > 1 or settings.rollout_batches > accumulation
    resident = plan.phases["optimizer"]
    moved = 2 * resident.get(static.TRAINED, 0) + resident.get(static.GRADIENTS, 0)
    found = {
        "generate": _generation(plan, model).times(accumulation / (settings.rollout_batches * uses)),
        "score": scoring.times((int(bool(settings.beta)) + int(old)) * accumulation / uses),
        "forward_backward": loss.times(accumulation),
        "optimizer": Work(0.0, moved + 2 * resident.get(static.OPTIMIZER, 0), 0.0),
    }
    return {name: one for name, one in found.items() if one.flops or one.bytes}


def _generation(plan: Plan, model: _Model) -> Work:
    """Of one generation batch: a prefill, and a pass of one token per row for every column."""
    settings = plan.settings
    rows, prompt, completion = settings.rollout_rows, settings.prompt_tokens, settings.max_completion_length
    prompts = components.prompts_at_once(settings) if settings.compact_generation or settings.use_vllm else rows
    prefill = Work(model.forward(prompts * prompt, prompts * prompt**2 / 2), model.read, model.layers)
    context = prompt + completion / 2
    cache, _ = components.cache_bytes(settings, plan.config)
    step = Work(
        model.forward(rows, rows * context) + 2 * model.head * rows,
        model.read + model.head_bytes + cache * context / (prompt + completion),
        0.0 if settings.use_vllm else model.layers,  # it replays a graph
    )
    return prefill + step.times(completion)


def span(one: Work, speed: Speed) -> tuple[float, float]:
    """Seconds of `one` at least and at most."""
    slow, fast = ((speed.flops * c, speed.bandwidth * b) for c, b in zip(speed.compute, speed.memory, strict=True))
    start = [kernels * seconds for kernels, seconds in zip(KERNELS, LAUNCH, strict=True)]
    least = max(one.flops / fast[0], one.bytes / fast[1], one.layers * start[0])
    return least, one.flops / slow[0] + one.bytes / slow[1] + one.layers * start[1]


def measured_speed(dtype: torch.dtype = torch.float32) -> Speed:
    """This process's own, from the best of three products of 1024 x 1024 and copies of 64 MiB: some tenths of a second."""
    a, b = (torch.ones(1024, 1024, dtype=dtype) for _ in range(2))
    source = torch.ones(2**24)
    product = min(_seconds(lambda: a @ b) for _ in range(3))
    copy = min(_seconds(source.clone) for _ in range(3))
    return Speed(2 * 1024**3 / product, 2 * source.nbytes / copy, "measured now", (0.3, 1.0), (0.3, 1.0))


def _seconds(function) -> float:
    start = time.perf_counter()
    function()
    return max(time.perf_counter() - start, 1e-9)


def told(plan: Plan) -> str:
    """A line on the seconds of a step, or on why they are not estimated."""
    text, hardware = plan.config.get_text_config(), plan.hardware
    reason, speed = None, hardware.speed
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        reason = "which experts a token takes is not known"
    elif not hardware.gpu and plan.settings.launch.processes > 1:
        reason = "the ranks share this machine's processor"
    elif not hardware.gpu:
        speed = measured_speed(
            torch.bfloat16 if components.compute_bytes(plan.settings, plan.config) == 2 else torch.float32
        )
    elif speed is None:
        reason = f"the speed of {hardware.name} is not known; name the card: --hardware h100"
    if reason is not None:
        return f"seconds per step: not estimated, {reason}"
    spans = {name: span(one, speed) for name, one in work(plan).items()}
    phases = ", ".join(f"{name} {_range(*spans[name])}" for name in PHASES if name in spans)
    least, most = (sum(ends) for ends in zip(*spans.values(), strict=True))
    return (
        f"seconds per step: {_range(least, most)} ({phases}), a roofline of {speed.flops / 1e12:.3g} TFLOP/s and "
        f"{speed.bandwidth / 1e9:.0f} GB/s ({speed.source}), of which {_percent(speed.compute)} and {_percent(speed.memory)} are "
        "assumed to be reached; rewards, and what ranks send each other, are not counted"
    )


def _range(least: float, most: float) -> str:
    if most < 0.1:
        return "under 0.1"
    digits = 0 if least >= 10 else 1 if most >= 1 else 2
    return f"{least:.{digits}f} to {most:.{digits}f}"


def _percent(shares: tuple[float, float]) -> str:
    return f"{100 * shares[0]:.0f} to {100 * shares[1]:.0f}%"
