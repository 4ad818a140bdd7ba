"""A run's bytes by phase and component, per rank, and whether they fit."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch import nn
from transformers import PretrainedConfig

from . import components, passes, skeleton, static
from .hardware import AT_WORK, CONTEXT, HEAP_SHARE, HEAP_SHARE_CHECKPOINTING, SLACK, Hardware, read_hardware
from .settings import Settings, from_config, from_yaml, read_launch

ACTIVATIONS = "activations"
HEAD = "head tiles"
COMPARISON = "first step's comparison"
FILE = "checkpoint's pages"
CACHE = "cache of generation"
LOGITS = "logits of a token step"
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
        launch = read_launch(accelerate_config, more.pop("processes", None))
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
    model = skeleton.whole(skeleton.modules(settings, config))
    whole = static.whole_bytes(model, settings)
    held = static.rank_bytes(whole, settings)
    packed = settings.prefix_sharing != "off"
    phases = _phases(settings, config, hardware, model, held, packed)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    host, disk = _host_and_disk(settings, whole, held)
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
        (skeleton.numel(model), trained),
        _notes(settings, hardware),
        packed,
        passes.loss(settings, config, packed, hardware.gpu).unwritten,
    )


def _phases(
    settings: Settings,
    config: PretrainedConfig,
    hardware: Hardware,
    model: nn.Module,
    held: dict[str, int],
    packed: bool,
) -> dict[str, dict[str, int]]:
    base = {name: held[name] for name in (static.BASE_4BIT, static.STATE, static.BASE, static.REFERENCE)}
    if settings.launch.offload:
        base = dict.fromkeys(base, 0)
    on_card = not settings.launch.offload
    base[FILE] = _file_pages(settings, config, model, hardware, held[static.BASE])
    resident = base | {static.TRAINED: held[static.TRAINED] if on_card else 0}
    optimizer = {static.OPTIMIZER: held[static.OPTIMIZER] if on_card else 0}
    gradients = {static.GRADIENTS: held[static.GRADIENTS] if on_card else 0, static.BUCKETS: held[static.BUCKETS]}
    training, whole = components.gathered_bytes(model, settings)
    gathered = {GATHERED: training}
    drawing, resting = components.engine_bytes(settings, hardware)

    phases = {
        "load": resident | {ENGINE: drawing} | _loading(settings, model, hardware),
        "generate": resident
        | optimizer
        | _generation(settings, config, hardware, resident | optimizer, (training, whole)),
        "forward_backward": resident
        | optimizer
        | gradients
        | gathered
        | _pass(settings, config, hardware, packed, True),
        "optimizer": resident | optimizer | gradients | _stepping(settings, held),
        "save": resident | optimizer,
    }
    phases["generate"][ENGINE] = drawing
    for name in ("forward_backward", "optimizer", "save"):
        phases[name][ENGINE] = resting
    if settings.scores_again:
        phases["score"] = resident | optimizer | gathered | {ENGINE: resting}
        phases["score"] |= _pass(settings, config, hardware, packed, False)
    if not hardware.gpu:
        _leave_heap(phases, _heap(settings, _fullest(settings, config, hardware, packed, True)))
    process = _process(hardware)  # after the passes: what planning them leaves in it is in the run as well
    for name, parts in phases.items():
        parts |= process if name != "load" else {PROCESS: process[PROCESS]}
        parts[ROOM] = parts.get(ROOM, 0) + _slack(parts, hardware)
    return {name: {k: v for k, v in phases[name].items() if v} for name in PHASES if name in phases}


def _pass(settings, config, hardware: Hardware, packed: bool, grad: bool) -> dict[str, int]:
    """Of the loss, or without gradients a scoring pass; and what the first step's comparison, which comes before, needs beyond."""
    own = passes.loss(settings, config, packed, hardware.gpu, grad)
    fullest = _fullest(settings, config, hardware, packed, grad)
    parts = {ACTIVATIONS: own.activations, HEAD: own.head, COMPARISON: fullest.peak - own.peak}
    return parts if hardware.gpu else parts | {ROOM: max(0, _heap(settings, fullest) - fullest.small)}


def _leave_heap(phases: dict[str, dict[str, int]], heap: int) -> None:
    """Put what the fullest pass leaves in the heap beside the phases that follow it: what they need themselves lies in it."""
    for name in ("generate", "optimizer", "save"):
        coming = sum(phases[name].get(part, 0) for part in (ACTIVATIONS, CACHE, LOGITS))
        phases[name][ROOM] = max(0, heap - coming)


def _fullest(settings, config, hardware: Hardware, packed: bool, grad: bool) -> passes.PassBytes:
    """The loss's pass, or the first step's comparison where that needs more."""
    own = passes.loss(settings, config, packed, hardware.gpu, grad)
    if not packed:
        return own
    return max(own, passes.comparison(settings, config, grad, hardware.gpu), key=lambda one: one.peak)


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


def _generation(settings, config, hardware, resident, gathered: tuple[int, int]) -> dict[str, int]:
    training, whole = gathered
    free = hardware.per_rank(settings.launch.processes) - sum(resident.values()) - sum(_process(hardware).values())
    once = components.gathers_once(settings, whole, free)
    parts = {GATHERED: whole - whole // settings.launch.processes if once else training}
    if settings.use_vllm:
        return parts
    rows = components.prompts_at_once(settings) if settings.compact_generation else settings.rollout_rows
    shape = passes.Shape(rows, settings.prompt_tokens, 0, False)
    prefill = passes.measure(settings, config, shape, False, hardware.gpu).peak
    shared = components.shares_prompts(settings, config, hardware)
    cache, _ = components.cache_bytes(settings, config, shared)
    logits = components.decoding_bytes(settings, config, shared)
    # The prefill comes before the cache has grown; a token step's activations are of one token per row.
    return parts | {CACHE: cache, LOGITS: logits, ACTIVATIONS: max(0, prefill - cache - logits)}


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
    coming = (ACTIVATIONS, HEAD, COMPARISON, CACHE, LOGITS, GATHERED)
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


def _notes(settings: Settings, hardware: Hardware) -> tuple[str, ...]:
    notes = [f"prompts of {settings.prompt_tokens} tokens ({settings.prompt_source})"]
    notes.append(f"every completion {settings.max_completion_length} tokens long, none without an advantage")
    if hardware.gpu:
        notes.append("the CUDA context and the allocator's slack are assumed, not measured")
    if settings.launch.kind.startswith("zero"):
        notes.append("DeepSpeed's own buffers are not counted")
    if Path(str(settings.model.model_name_or_path)).is_dir() and settings.max_completion_length > 4096:
        notes.append("long completions: the cache is counted at full length")
    return tuple(notes)
