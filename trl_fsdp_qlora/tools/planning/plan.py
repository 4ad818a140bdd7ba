"""A run's bytes on the device by phase and component, per rank, and whether they fit."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig

from ...errors import UserError
from ...fsdp2_qlora.generation import FREE_SHARE
from ..recipe.checks import read_config
from . import model
from .fake_run import FakeRun, Padded
from .generation import Engine, cache_bytes, plan_engine
from .hardware import CONTEXT, GIB, SLACK, Hardware, read_hardware
from .launches import read_launch
from .settings import Settings, from_words
from .stored import counted_dense

ACTIVATIONS = "activations, head's tiles"
CACHE = "cache of generation"
TOKEN_STEP = "token step's copies"
UPDATE = "optimizer's update"
GATHERED = "gathered weights"
ENGINES_BASE = "vLLM's own base"
ENGINE = "vLLM"
PROCESS = "process"
ROOM = "allocator slack"


@dataclass(frozen=True)
class Plan:
    """The bytes that a run needs on each rank's device.

    Attributes:
        phases: phase -> component -> bytes of the fullest rank, in a step's order. The names are those that telemetry
            measures by.
        capacity: bytes that a rank can use.
        parameters: numbers of parameters, `(of the base, trained)`.
        engine: a vLLM engine in the trainer's process.
    """

    settings: Settings = field(repr=False)
    config: PretrainedConfig = field(repr=False)
    hardware: Hardware
    phases: dict[str, dict[str, int]]
    capacity: int
    parameters: tuple[int, int]
    engine: Engine | None = None

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
        ranks = self.settings.launch.ranks_per_machine
        return not self.hardware.gpu or ranks <= (self.hardware.cards or ranks)

    @property
    def fits(self) -> bool:
        """The fullest phase fits a rank, there is a card for each, and vLLM's share holds what vLLM needs."""
        starts = self.engine is None or self.engine.starts
        return self.peak <= self.capacity and self.enough_cards and starts

    @property
    def positions(self) -> float:
        """Number of positions of the model; infinite if it has no limit."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None) or math.inf

    @property
    def warning(self) -> str | None:
        """A line if prompt and completion are longer than the model has positions; `None` if they are not."""
        prompt = self.settings.prompt_tokens
        completion = self.settings.max_completion_length
        if prompt + completion <= self.positions:
            return None
        room = f"at most {self.positions - prompt}" if prompt < self.positions else "the prompts alone fill them"
        return (
            f"max_completion_length: {completion} and prompts of {prompt} tokens are more than the {self.positions} "
            f"positions of the model; {room}"
        )


def plan_recipe(
    words: Sequence[str],
    config: type,
    accelerate_config: str | None = None,
    hardware: str | None = None,
    processes: int | None = None,
    prompt_tokens: int = 256,
) -> Plan:
    """Plan a recipe's command line. The run has as many ranks as cards, unless `processes` is given.

    Args:
        words, config: see [`from_words`].
        accelerate_config: see [`read_launch`].
        hardware: see [`read_hardware`].

    Raises:
        UserError: something cannot be read or built; the message is one line.
    """
    devices = read_hardware(hardware) if hardware else None
    launch = read_launch(accelerate_config, processes)
    if devices and devices.cards and not processes:
        launch = read_launch(accelerate_config, devices.cards * launch.machines)
    settings = from_words(words, config, launch, prompt_tokens)
    return make_plan(settings, devices or read_hardware(None, settings.launch.use_cpu))


def make_plan(settings: Settings, hardware: Hardware | None = None, config: PretrainedConfig | None = None) -> Plan:
    """Plan a run on `hardware`, by default this machine's. If `config` is not given, the model's config is read.

    Raises:
        UserError: something cannot be read or built, or the launch is one of DeepSpeed; the message is one line.
    """
    if settings.launch.kind == "deepspeed":
        raise UserError("a launch with DeepSpeed is not planned; its peak is below that of --accelerate_config ddp")
    config = config or read_config(settings.model.model_name_or_path, settings.model.model_revision)
    hardware = hardware or read_hardware(None, settings.launch.use_cpu)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the libraries' messages are for a user who trains the model
    try:
        with warnings.catch_warnings(action="ignore"):
            run = FakeRun(settings, config, hardware.gpu)
            engine = plan_engine(run, hardware)
            phases = _phases(run, hardware, engine)
    finally:
        logger.setLevel(level)
    capacity = hardware.per_rank(settings.launch.ranks_per_machine)
    return Plan(settings, config, hardware, phases, capacity, _parameters(run), engine)


def _parameters(run: FakeRun) -> tuple[int, int]:
    """Numbers of parameters of the base, and of trained ones."""
    weights = dict(run.whole.named_parameters())
    base = sum(model.weights_in(parameter) for name, parameter in weights.items() if "lora_" not in name)
    return base, sum(p.numel() for p in weights.values() if p.requires_grad)


def changed(plan: Plan, **values: Any) -> Plan:
    """Plan the same run with other values of its trainer's fields."""
    settings = replace(plan.settings, values=plan.settings.values | values)
    return make_plan(settings, plan.hardware, plan.config)


def _phases(run: FakeRun, hardware: Hardware, engine: Engine | None) -> dict[str, dict[str, int]]:
    """Bytes by phase and component, see [`Plan`]."""
    settings = run.settings
    launch = settings.launch
    gpu = hardware.gpu
    static = model.static_bytes(run.whole, settings)
    held = {name: size for name, size in static.items() if not launch.offload or name == model.BUCKETS}
    gradients = {name: held.pop(name) for name in (model.GRADIENTS, model.BUCKETS) if name in held}
    # On a CPU it is this process without the model: what planning leaves in the process is in the run as well.
    process = CONTEXT if gpu else psutil.Process().memory_info().rss
    free = hardware.per_rank(launch.ranks_per_machine) - sum(held.values()) - process
    in_a_layer, whole = gathered_bytes(run)
    # Generation and scoring may gather the whole model, see `fsdp2_qlora.generation.choose`; with vLLM not.
    in_a_rollout = in_a_layer
    if launch.kind == "fsdp2" and not settings.use_vllm:
        gather = settings.fsdp_gather
        if gather == "once" or (gather != "per_layer" and whole <= FREE_SHARE * free):
            in_a_rollout = max(whole, in_a_layer)
    awake = {} if engine is None else {ENGINES_BASE: engine.base, ENGINE: engine.rest}
    asleep = awake
    if engine is not None and settings.vllm_enable_sleep_mode:
        asleep = {ENGINES_BASE: engine.base} if engine.keeps_base else {}
    # TRL's default optimizer is fused, and updates in place.
    update = 0 if "fused" in str(getattr(settings.optim, "value", settings.optim)) else static[model.GRADIENTS]

    # By phase: what comes and goes; what is there during the whole phase in addition to the weights; gathered weights.
    table = {"generate": (_generation(run), awake, in_a_rollout)}
    if settings.scores_again:
        table["score"] = ({ACTIVATIONS: run.scoring_bytes()}, asleep, in_a_rollout)
    loss = {ACTIVATIONS: run.loss_bytes()}
    table["forward_backward"] = (loss, {**gradients, **asleep}, in_a_layer)
    table["optimizer"] = ({}, {**gradients, UPDATE: update, **asleep}, 0)

    phases = {}
    for name, (temporary, further, gathered) in table.items():
        room = math.ceil(SLACK * (sum(temporary.values()) + gathered)) if gpu else 0
        parts = {**held, **temporary, **further, GATHERED: gathered, PROCESS: process, ROOM: room}
        phases[name] = {part: size for part, size in parts.items() if size}
    return phases


def _generation(run: FakeRun) -> dict[str, int]:
    """Bytes by component of generation, with all completions at full length.

    Caches that episodes keep between turns are not among them: they take what is free, and no more than half of it.
    """
    settings = run.settings
    if settings.use_vllm:
        return {}
    cache, prompt, step = cache_bytes(run)
    rows = settings.rollout_rows
    if settings.compact_generation:  # each distinct prompt is computed once
        rows = max(1, rows // settings.num_generations)
    # During the prefill the cache holds the prompts only. A token step has activations of one token per row only.
    prefill = run.padded_bytes(Padded(rows, settings.prompt_tokens, 0), grad=False) + rows * prompt
    return {CACHE: cache, TOKEN_STEP: step, ACTIVATIONS: max(0, prefill - cache - step)}


def gathered_bytes(run: FakeRun) -> tuple[int, int]:
    """Bytes of gathered weights that a rank of a sharded model holds next to its shards; zeros if none are sharded.

    Returns:
        Two numbers. The first is for a pass that gathers unit by unit: the weights of the unit that computes and of
        those around it, the next unit, which is being gathered, and the buffers that receive it (FSDP2 receives a unit
        in one buffer, gloo in two). If units stay gathered until the backward, it is all of them. The second is the
        whole model.
    """
    settings = run.settings
    launch = settings.launch
    if not launch.is_sharded or launch.processes == 1:
        return 0, 0

    def weights(module: torch.nn.Module) -> int:
        total = model.state_bytes(module)
        for parameter in module.parameters():
            cast = parameter.is_floating_point() and settings.mixed is not None
            total += parameter.numel() * 2 if cast else parameter.nbytes
        return total

    whole = weights(run.whole)
    units = _units(model.causal_model(run.whole), launch.units, weights)
    next_unit = max(list(units.values())[1:], default=0)
    around = [sum(size for outer, size in units.items() if f"{name}.".startswith(outer)) for name in units]
    # `fsdp_keep_gathered` keeps the units of a 4-bit base.
    stays = not launch.reshards or (settings.fsdp_keep_gathered and model.state_bytes(run.whole) > 0)
    buffers = 1 if run.on_gpu else 2
    return (whole if stays else max(around) + next_unit) + buffers * next_unit, whole


def _units(
    causal: torch.nn.Module, units: tuple[str, ...] | int | str | None, weights: Callable[[torch.nn.Module], int]
) -> dict[str, int]:
    """By prefix of their names, the bytes of the modules that are gathered at once, without those inside of them.

    The first is the model itself, with what belongs to no other unit.

    Args:
        units: see [`launches.Launch`].
        weights: returns the bytes of a module.
    """
    names = units if isinstance(units, tuple) else getattr(causal, "_no_split_modules", None) or ()

    def is_unit(module: torch.nn.Module) -> bool:
        if isinstance(units, int):
            return sum(parameter.numel() for parameter in module.parameters()) > units
        return units != "model" and type(module).__name__ in names

    own = {"": weights(causal)}
    for name, module in causal.named_modules():
        if name and is_unit(module):
            around = max((outer for outer in own if f"{name}.".startswith(outer)), key=len)
            own[f"{name}."] = weights(module)
            own[around] -= own[f"{name}."]
    return own


def format_bytes(size: float) -> str:
    """`3.04 GiB`, or MiB if the size is less than a tenth of one GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def format_plan(plan: Plan) -> str:
    """The table of phases and components, whether it fits, and what was assumed."""
    settings = plan.settings
    launch = settings.launch
    hardware = plan.hardware
    unit, unit_name = (GIB, "GiB") if plan.peak >= GIB else (2**20, "MiB")
    heads = [f"{phase}{' *' if phase == plan.limiting else ''}" for phase in plan.phases]
    rows = [(f"{unit_name} per rank", heads)]
    for component in dict.fromkeys(component for phase in plan.phases.values() for component in phase):
        sizes = [phase.get(component) for phase in plan.phases.values()]
        rows.append((component, ["" if size is None else f"{size / unit:.2f}" for size in sizes]))
    rows.append(("together", [f"{plan.total(phase) / unit:.2f}" for phase in plan.phases]))
    width = max(len(label) for label, _ in rows)
    widths = [max(10, len(head)) for head in heads]
    devices = f"{launch.processes} × {hardware.name}" if launch.processes > 1 else hardware.name
    if launch.machines > 1:
        devices += f" on {launch.machines} machines"
    fits = "it fits" if plan.fits else "it does not fit"
    if not plan.enough_cards:
        fits += f": a machine has {hardware.cards} cards for {launch.ranks_per_machine} ranks"
    lines = [
        f"{settings.model.model_name_or_path}: {plan.parameters[0] / 1e9:.2f}e9 weights, "
        f"{plan.parameters[1] / 1e6:.1f}e6 trained; {launch.kind} on {devices}, "
        f"{format_bytes(plan.capacity)} per rank",
        "",
        *(f"{label:<{width}}  " + "  ".join(map(str.rjust, cells, widths)) for label, cells in rows),
        "",
        f"* {plan.limiting} needs most: {format_bytes(plan.peak)} of {format_bytes(plan.capacity)}, {fits}",
    ]
    if plan.engine:
        lines.append(_format_engine(plan.engine))
    if plan.warning:
        lines.append(f"warning: {plan.warning}")
    lines.append(
        f"assumed: prompts of {settings.prompt_tokens} tokens (--prompt_tokens), completions of "
        f"{settings.max_completion_length}"
    )
    unknown_format = counted_dense(settings.model, plan.config)
    if unknown_format:
        lines.append(f"assumed: a base in {unknown_format} counts dense, so the plan is too high")
    if hardware.gpu:
        lines.append("assumed, not measured: the CUDA context and the allocator's slack")
    else:
        lines.append("not counted: memory that the C library's heap keeps in addition to tensors")
    return "\n".join(lines)


def _format_engine(engine: Engine) -> str:
    """A line on the share of a vLLM engine."""
    base = f"{format_bytes(engine.base)} of a base of its own" if engine.base else "the base is the trainer's"
    line = f"vLLM: {format_bytes(engine.rest)} of {format_bytes(engine.share)} for its cache and passes, {base}"
    if engine.starts:
        return line
    row = format_bytes(engine.row)
    return f"{line}; it cannot start, because a row's cache is {row}: raise vllm_gpu_memory_utilization"
