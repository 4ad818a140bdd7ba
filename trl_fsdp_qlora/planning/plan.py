"""A run's bytes by phase and component, per rank, and whether they fit."""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from torch import nn
from transformers import PretrainedConfig

from . import components, passes, skeleton, static
from .hardware import (
    AT_WORK,
    CONTEXT,
    HEAP_SHARE,
    HEAP_SHARE_CHECKPOINTING,
    SLACK,
    Hardware,
    named_cards,
    read_hardware,
)
from .settings import Settings, from_config, from_yaml, read_launch

ACTIVATIONS = "activations"
HEAD = "head tiles"
COMPARISON = "first step's comparison"
FILE = "checkpoint's pages"
CACHE = "cache of generation"
LOGITS = "logits of a token step"
COPY = "copy of a layer's cache"
GATHERED = "gathered weights"
ENGINE = "vLLM"
PROCESS = "process"
LIBRARIES = "libraries at work"
ROOM = "allocator slack"
# Phases in a step's order, under the names that telemetry measures them by where it does.
PHASES = ("load", "generate", "score", "forward_backward", "optimizer", "save")


@dataclass(frozen=True)
class Plan:
    """What a run needs, in bytes.

    Attributes:
        settings, config, hardware: what was planned.
        phases: phase -> component -> bytes of the fullest rank.
        capacity: bytes that a rank may use.
        host: bytes of host memory by purpose, of all ranks of the node together.
        disk: bytes of one checkpoint.
        shm: bytes of `/dev/shm` that the ranks of a node use to talk to each other.
        parameters: `(of the base, trained)`.
        notes: what was assumed.
        packed: the loss is computed on packed rows.
        unwritten: bytes of a buffer of the loss that nothing is written to: an allocator counts them, a host's pages do not.
    """

    settings: Settings = field(repr=False)
    config: PretrainedConfig = field(repr=False)
    hardware: Hardware
    phases: dict[str, dict[str, int]]
    capacity: int
    host: dict[str, int]
    disk: int
    shm: int
    parameters: tuple[int, int]
    notes: tuple[str, ...] = ()
    packed: bool = True
    unwritten: int = 0

    def total(self, phase: str) -> int:
        """Bytes of a phase at its peak."""
        return sum(self.phases[phase].values())

    @property
    def limiting(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.limiting)

    @property
    def enough_cards(self) -> bool:
        return not self.hardware.gpu or self.hardware.cards >= self.settings.launch.processes

    @property
    def fits(self) -> bool:
        """The fullest phase fits a rank, the host memory fits where it is known, and there is a card for each rank."""
        known = self.hardware.gpu and self.hardware.host_memory is not None
        host = not known or sum(self.host.values()) <= self.hardware.host_memory
        return self.peak <= self.capacity and host and self.enough_cards


def make_plan(
    recipe: Any, accelerate_config: str | None = None, hardware: str | Hardware | None = None, **more: Any
) -> Plan:
    """Plan a run.

    Args:
        recipe: path of a recipe's YAML; a mapping of its fields; `(config, ModelConfig)` as a recipe parses them, which know
            their launch; or [`Settings`].
        accelerate_config: file or name; with a path or a mapping only.
        hardware: as `--hardware` takes it.
        more: `prompt_tokens`, `prompt_source`, and with a path `overrides`, `processes`, `types`.

    Raises:
        trl_fsdp_qlora.recipe.arguments.ConfigError: one line on what cannot be read or built.
    """
    if isinstance(recipe, Settings):
        settings = recipe
    elif isinstance(recipe, tuple):
        settings = from_config(*recipe, **more)
    else:
        launch = read_launch(accelerate_config, more.pop("processes", None) or named_cards(hardware))
        overrides = more.pop("overrides", {}) | (recipe if isinstance(recipe, dict) else {})
        path = None if isinstance(recipe, dict) else recipe
        settings = from_yaml(path, overrides, launch, more.pop("types", ()), **more)
    if not isinstance(hardware, Hardware):
        launch = settings.launch
        hardware = read_hardware(hardware, launch.processes, launch.use_cpu)
    config = skeleton.read_config(settings.model.model_name_or_path, settings.model.model_revision)
    return plan_settings(settings, config, hardware)


def plan_settings(settings: Settings, config: PretrainedConfig, hardware: Hardware) -> Plan:
    """As [`make_plan`], from parts."""
    lying = _Lying.of(settings, config, hardware)
    packed = settings.prefix_sharing != "off"
    phases = _phases(settings, config, hardware, lying, packed)
    trained = sum(parameter.numel() for parameter in lying.model.parameters() if parameter.requires_grad)
    host, disk = _host_and_disk(settings, lying.whole, lying.held)
    ranks = settings.launch.processes
    return Plan(
        settings,
        config,
        hardware,
        phases,
        hardware.per_rank(ranks),
        host,
        disk,
        # NCCL's buffers between the ranks of a node: about 10 MB for each pair of neighbours and channel.
        0 if ranks == 1 else ranks * 64 * 2**20,
        (skeleton.numel(lying.model), trained),
        _notes(settings, config, hardware),
        packed,
        passes.loss(settings, config, packed, hardware.gpu).unwritten,
    )


def _phases(
    settings: Settings, config: PretrainedConfig, hardware: Hardware, lying: "_Lying", packed: bool
) -> dict[str, dict[str, int]]:
    model, _, held, resident, optimizer, _, (drawing, resting) = lying
    offloaded = settings.launch.offload
    gradients = {static.GRADIENTS: 0 if offloaded else held[static.GRADIENTS], static.BUCKETS: held[static.BUCKETS]}
    made = _Made.of(settings, model, held)

    phases = {
        "load": resident | {ENGINE: drawing} | _loading(settings, model, hardware),
        "generate": resident | optimizer | _generation(settings, config, hardware),
        "forward_backward": resident | optimizer | gradients | _pass(settings, config, hardware, packed, made),
        "optimizer": resident | optimizer | gradients | _stepping(settings, held),
        "save": resident | optimizer,
    }
    phases["generate"][ENGINE] = drawing
    for name in ("forward_backward", "optimizer", "save"):
        phases[name][ENGINE] = resting
    if settings.scores_again:
        phases["score"] = resident | optimizer | {ENGINE: resting}
        phases["score"] |= _pass(settings, config, hardware, packed, None)
    for name in ("generate", "score", "forward_backward"):
        if name in phases:
            training = name == "forward_backward"
            phases[name][GATHERED] = _gathered(settings, hardware, lying, phases[name], training)
    if not hardware.gpu:
        _leave_heap(phases, _heap_left(settings, config, packed, made), made)
    process = _process(hardware)  # after the passes: what planning them leaves in it is in the run as well
    for name, parts in phases.items():
        parts |= process if name != "load" else {PROCESS: process[PROCESS]}
        parts[ROOM] = parts.get(ROOM, 0) + _slack(parts, hardware)
    return {name: {k: v for k, v in phases[name].items() if v} for name in PHASES if name in phases}


class _Lying(NamedTuple):
    """What can be said before any pass is planned.

    Attributes:
        model: all its layers, without data.
        whole, held: component -> bytes, of the run and of a rank.
        resident, optimizer: component -> bytes that lie there from step to step: base and what is trained; its state.
        gathered: of weights that are sharded.
        engine: vLLM's bytes while it generates, and while the model is trained.
    """

    model: nn.Module
    whole: dict[str, int]
    held: dict[str, int]
    resident: dict[str, int]
    optimizer: dict[str, int]
    gathered: components.Gathered
    engine: tuple[int, int]

    @classmethod
    def of(cls, settings: Settings, config: PretrainedConfig, hardware: Hardware) -> "_Lying":
        model = skeleton.whole(skeleton.modules(settings, config))
        whole = static.whole_bytes(model, settings)
        held = static.rank_bytes(whole, settings)
        there = {name: 0 if settings.launch.offload else size for name, size in held.items()}
        resident = {name: there[name] for name in (static.BASE_4BIT, static.STATE, static.BASE, static.REFERENCE)}
        resident[FILE] = _file_pages(settings, config, model, hardware, held[static.BASE])
        resident[static.TRAINED] = there[static.TRAINED]
        optimizer = {static.OPTIMIZER: there[static.OPTIMIZER]}
        gathered = components.gathered_bytes(model, settings, hardware.gpu)
        engine = components.engine_bytes(settings, hardware)
        return cls(model, whole, held, resident, optimizer, gathered, engine)


@dataclass(frozen=True)
class _Made:
    """What the first step makes on a rank, in bytes.

    Attributes:
        by_pass: the loss's pass is the first of its step to make gradients: it has them in its own bytes.
        aside: gradients that the first step's comparison keeps of the packed pass beside those that are counted elsewhere.
        state: of the optimizer, which is made after the comparison.
        small, small_state: what of gradients and of `state` lies in blocks that a C library takes from its heap.
    """

    by_pass: bool
    aside: int
    state: int
    small: int
    small_state: int

    @classmethod
    def of(cls, settings: Settings, model: nn.Module, held: dict[str, int]) -> "_Made":
        from ..compat.memory import HEAP_BLOCK

        whole = passes.makes_gradients(settings)
        by_pass = passes.loss_makes_gradients(settings)
        deepspeed = settings.launch.kind.startswith("zero")  # compares no gradients, and makes its state at the start
        state = 0 if deepspeed or settings.launch.offload else held[static.OPTIMIZER]
        sizes = [static.size(parameter) for parameter in model.parameters() if parameter.requires_grad]
        share = sum(size for size in sizes if size < HEAP_BLOCK) / max(1, sum(sizes))
        # Of several micro-batches the first compares: those that the others add to are the ones that lie aside.
        aside = 0 if deepspeed or whole > by_pass else held[static.GRADIENTS]
        return cls(by_pass, aside, state, math.ceil(share * held[static.GRADIENTS]), math.ceil(share * state))


def _gathered(settings: Settings, hardware: Hardware, lying: _Lying, parts: dict[str, int], training: bool) -> int:
    """Bytes of gathered weights beside `parts` of a phase, at the fuller of two moments.

    What weights are received in is gone as a pass begins where the whole model is gathered once, and where a layer is computed
    again, with checkpointing: a host's is then. (A card's allocator keeps what another stream has used.) The root comes first.
    """
    coming = sum(parts.get(name, 0) for name in (ACTIVATIONS, HEAD, COMPARISON, CACHE, LOGITS, COPY))
    together, lies = lying.gathered, sum((lying.resident | lying.optimizer).values())
    free = hardware.per_rank(settings.launch.processes) - lies - sum(_process(hardware).values())
    if not training and components.gathers_once(settings, together.whole, free):
        return together.whole + max(0, together.transit - coming)
    gone = training and settings.gradient_checkpointing and not hardware.gpu
    received = max(0, together.transit - coming) if gone else together.transit
    return max(together.training + received, together.root - coming)


def at_least(settings: Settings, config: PretrainedConfig, hardware: Hardware) -> int:
    """Bytes that a rank needs beside every activation: what lies there and what generation adds. No pass is run for it."""
    lying = _Lying.of(settings, config, hardware)
    parts = lying.resident | lying.optimizer | _generation(settings, config, hardware, measured=False)
    parts |= {GATHERED: _gathered(settings, hardware, lying, parts, False), ENGINE: lying.engine[0]}
    return sum((parts | _process(hardware)).values())


def _pass(settings, config, hardware: Hardware, packed: bool, made: _Made | None) -> dict[str, int]:
    """Of the loss, or without gradients of a scoring pass; and what the first step's comparison needs beyond it.

    The comparison comes before the first step's own pass, when there is no optimizer's state yet.
    """
    own = passes.loss(settings, config, packed, hardware.gpu, made is not None)
    parts = {ACTIVATIONS: own.activations, HEAD: own.head}
    if made is not None and made.by_pass:
        parts[static.GRADIENTS] = own.gradients
    other = _comparison(settings, config, hardware, packed, made)
    more = -(made.state if made else 0) + (other.peak if other else 0)
    if hardware.gpu:
        return parts | {COMPARISON: max(0, more - own.peak)}
    room = max(0, _heap(settings, own) - own.small)
    more += max(0, _heap(settings, other) - other.small) if other else 0
    return parts | {ROOM: room, COMPARISON: max(0, more - own.peak - room)}


def _heap_left(settings, config, packed: bool, made: _Made) -> int:
    """What a CPU's heap is after the first step, without what of the optimizer's state came to lie in it."""
    cpu = Hardware("", 0, 1, gpu=False)
    other = _comparison(settings, config, cpu, packed, made)
    own = _heap(settings, passes.loss(settings, config, packed, False))
    return max(own, _heap(settings, other) - made.small_state if other else 0)


def _leave_heap(phases: dict[str, dict[str, int]], heap: int, made: _Made) -> None:
    """Put what the first step leaves in the heap beside the phases that follow it: what they need themselves lies in it."""
    for name in ("generate", "score", "optimizer", "save"):
        if name not in phases:
            continue
        coming = sum(phases[name].get(part, 0) for part in (ACTIVATIONS, CACHE, LOGITS, COPY))
        if name == "optimizer" and made.by_pass:
            coming += made.small
        phases[name][ROOM] = max(phases[name].get(ROOM, 0), heap - coming)


def _comparison(settings, config, hardware: Hardware, packed: bool, made: _Made | None) -> passes.PassBytes | None:
    """The first step's comparison with the gradients that lie aside in it; `None` where nothing is compared."""
    if not packed:
        return None
    other = passes.comparison(settings, config, made is not None, hardware.gpu)
    if made is None or not made.aside:
        return other
    more = (other.peak + made.aside, other.small + made.small, other.heap + made.small)
    return replace(other, peak=more[0], small=more[1], heap=more[2])


def _heap(settings: Settings, most: passes.PassBytes) -> int:
    """What the C library's heap grows to in a pass on a CPU, and stays at."""
    share = HEAP_SHARE_CHECKPOINTING if settings.gradient_checkpointing else HEAP_SHARE
    return math.ceil((1 + share) * most.heap)


def _file_pages(settings, config, model: nn.Module, hardware: Hardware, others: int) -> int:
    """Of a mapped checkpoint whose linear weights were quantized: its pages stay while a tensor, the embeddings, lies in it."""
    asked = skeleton.dtype_of(settings, config)
    if hardware.gpu or not settings.model.load_in_4bit or settings.launch.sharded:
        return 0
    if (config.dtype or asked) != asked:
        return 0  # every tensor was converted, that is copied
    read = skeleton.checkpoint_bytes(str(settings.model.model_name_or_path or ""))
    return max(0, (read or skeleton.numel(model) * asked.itemsize) - others)


def _generation(settings, config, hardware: Hardware, measured: bool = True) -> dict[str, int]:
    """Of all completions at full length; without `measured` the prefill's activations are left out."""
    if settings.use_vllm:
        return {}
    rows = components.prompts_at_once(settings) if settings.compact_generation else settings.rollout_rows
    shape = passes.Shape(rows, settings.prompt_tokens, 0, False)
    prefill = passes.measure(settings, config, shape, False, hardware.gpu).peak if measured else 0
    shared = components.shares_prompts(settings, config, hardware)
    cache, _ = components.cache_bytes(settings, config, shared)
    logits, copy = components.decoding_bytes(settings, config, shared)
    step = max(logits, copy)  # one is gone when the other comes
    # The prefill comes before the cache has grown beyond its prompts; a token step's activations are of one token per row.
    prefill += components.prompts_cache_bytes(settings, config, rows)
    name = LOGITS if logits >= copy else COPY
    return {CACHE: cache, name: step, ACTIVATIONS: max(0, prefill - cache - step)}


def _loading(settings: Settings, model: nn.Module, hardware: Hardware) -> dict[str, int]:
    """A weight is read whole before it is quantized."""
    if not settings.model.load_in_4bit or settings.launch.kind == "fsdp2":
        return {}
    largest = max(p.out_features * p.in_features for p in model.modules() if isinstance(p, skeleton.FourBitLinear))
    return {"weight being quantized": 2 * largest}


def _stepping(settings: Settings, held: dict[str, int]) -> dict[str, int]:
    # The fused optimizer, TRL's default, updates in place; others make one more copy.
    fused = "fused" in str(getattr(settings.optim, "value", settings.optim))
    return {} if fused else {"optimizer's update": held[static.GRADIENTS]}


def _process(hardware: Hardware) -> dict[str, int]:
    """A process without a model's tensors: on a card the CUDA context; on a CPU this one as it is, and what it grows by."""
    if hardware.gpu:
        return {PROCESS: CONTEXT}
    return {PROCESS: psutil.Process().memory_info().rss, LIBRARIES: AT_WORK}


def _slack(parts: dict[str, int], hardware: Hardware) -> int:
    if not hardware.gpu:
        return 0
    coming = (ACTIVATIONS, HEAD, COMPARISON, CACHE, LOGITS, COPY, GATHERED)
    return math.ceil(SLACK * sum(parts.get(name, 0) for name in coming))


def _host_and_disk(settings: Settings, whole: dict[str, int], held: dict[str, int]) -> tuple[dict[str, int], int]:
    launch, process = settings.launch, 2**30  # of a Python process with torch and TRL, about
    host = {"processes": launch.processes * process}
    base = sum(whole[name] for name in (static.BASE_4BIT, static.STATE, static.BASE))
    if launch.kind == "fsdp2":
        host["base, read by rank 0"] = base
    if launch.offload:
        host["shards"] = launch.processes * sum(held.values())
    read = skeleton.checkpoint_bytes(str(settings.model.model_name_or_path or ""))
    host["largest file of the checkpoint"] = min(read or 5 * 10**9, 5 * 10**9)
    return host, whole[static.TRAINED] + whole[static.OPTIMIZER]


def too_long(settings: Settings, config: PretrainedConfig) -> str | None:
    """What is wrong with `max_completion_length`, as a line; `None` where prompt and completion have positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is None or settings.prompt_tokens + settings.max_completion_length <= positions:
        return None
    return (
        f"max_completion_length: {settings.max_completion_length} and prompts of {settings.prompt_tokens} tokens are more than "
        f"the {positions} positions of the model; at most {max(0, positions - settings.prompt_tokens)}"
    )


def _notes(settings: Settings, config: PretrainedConfig, hardware: Hardware) -> tuple[str, ...]:
    notes = [f"prompts of {settings.prompt_tokens} tokens ({settings.prompt_source})"]
    notes.append(f"every completion {settings.max_completion_length} tokens long, none without an advantage")
    if hardware.gpu:
        notes.append("the CUDA context and the allocator's slack are assumed, not measured")
    if settings.launch.kind.startswith("zero"):
        notes.append("DeepSpeed's own buffers are not counted")
    if skeleton.checkpoint_bytes(str(settings.model.model_name_or_path or "")) is None:
        notes.append("no checkpoint lies here: its bytes are the config's, its largest file 5 GB")
    if Path(str(settings.model.model_name_or_path)).is_dir() and settings.max_completion_length > 4096:
        notes.append("long completions: the cache is counted at full length")
    return tuple(notes)
