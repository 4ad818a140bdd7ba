"""A run's bytes on the device by phase and component, per rank: whether they fit, and changes that make them fit."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil
import torch
from torch import nn
from transformers import PretrainedConfig

from ...fsdp2_qlora.generation import FREE_SHARE
from ...utils.plain import counted
from ..recipe.checks import read_config
from . import model, passes
from .cache import cache_bytes
from .distillation import teacher_of
from .engine import Engine, plan_engine
from .hardware import CONTEXT, GIB, PCIE, SLACK, Hardware, read_hardware
from .settings import Settings, from_words, optimizer_name, read_launch
from .split import Splits, draws_ahead_here, find_splits, format_splits, with_split
from .steps import Call, Step, call_of, plan_step
from .stored import stored_format

ACTIVATIONS = "activations, head's tiles"
CACHE = "cache of generation"
TEACHER = "teacher"
TURNS = "caches kept between turns"
TOKEN_STEP = "token step's copies"
GATHERED = "gathered weights"
ENGINES_BASE = "vLLM's own base"
ENGINE = "vLLM"
PROCESS = "process"
ROOM = "allocator slack"
# The largest numbers that are tried: tokens of a row, and completions of a rank's optimizer step.
_MOST_TOKENS = 2**17
_MOST_COMPLETIONS = 2**13
_CARDS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)  # of a node, then whole nodes of eight


@dataclass(frozen=True)
class Teacher:
    """A teacher next to the model that is trained.

    Attributes:
        name: a model's, or what it is of the trained one.
        held: bytes that a rank holds for it during the whole run.
        gathered: bytes of its gathered weights during its forward.
        call: the tokens of a micro-batch that it reads.
    """

    name: str
    held: int
    gathered: int
    call: Call


@dataclass(frozen=True)
class Plan:
    """The bytes that a run needs on each rank's device.

    Attributes:
        phases: phase -> component -> bytes of the fullest rank, in a step's order. The names are those that telemetry
            measures by.
        capacity: bytes that a rank can use.
        parameters: numbers of parameters, `(of the base, trained)`.
        step: the passes of an optimizer step; `None` if planning stopped before them.
        teacher: the teacher of a run of TRL's own trainers that have one.
        splits: of this machine's cards between a vLLM server and the ranks; `None` without `rollouts_ahead`.
    """

    settings: Settings = field(repr=False)
    config: PretrainedConfig = field(repr=False)
    hardware: Hardware
    phases: dict[str, dict[str, int]]
    capacity: int
    parameters: tuple[int, int]
    step: Step | None
    engine: Engine | None = None
    splits: Splits | None = None
    teacher: Teacher | None = None

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
    def host_bytes(self) -> int:
        """Bytes of pinned host memory in which a rank's checkpointed activations wait for the backward."""
        if not (self.settings.offloads and self.hardware.gpu):
            return 0
        longest = self.step.longest
        return sum(map(self._bytes_of_inputs, (longest.tokens, longest.trunk)))

    def _bytes_of_inputs(self, tokens: int) -> int:
        """Bytes of the inputs of all layers; torch takes pinned memory in powers of two."""
        text = self.config.get_text_config()
        size = tokens * text.hidden_size * model.compute_dtype(self.settings, self.config).itemsize
        return self._checkpointed_layers * (1 << (size - 1).bit_length()) if tokens else 0

    @property
    def _checkpointed_layers(self) -> int:
        return -(-self.config.get_text_config().num_hidden_layers // self.settings.every_n_layers)

    @property
    def host_warning(self) -> str | None:
        """A line if the activations of all ranks do not fit this machine's memory; `None` if they do."""
        together = self.host_bytes * self.settings.launch.processes
        free = psutil.virtual_memory().available
        if together <= free:
            return None
        return (
            f"this machine has {format_bytes(free)} of host memory free, and offloaded activations need "
            f"{format_bytes(together)}: set a smaller {self.settings.length_field}, or "
            "gradient_checkpointing_kwargs without offload"
        )

    @property
    def pcie_seconds(self) -> float:
        """Estimated seconds of an optimizer step in which activations cross PCIe, out and back."""
        if not self.host_bytes:
            return 0.0
        text = self.config.get_text_config()
        token = self._checkpointed_layers * text.hidden_size * model.compute_dtype(self.settings, self.config).itemsize
        return 2 * self.step.computed * token / PCIE

    @property
    def enough_cards(self) -> bool:
        processes = self.settings.launch.processes
        return not self.hardware.gpu or processes <= (self.hardware.cards or processes)

    @property
    def fits(self) -> bool:
        """The fullest phase fits a rank, there is a card for each, and vLLM's share holds what vLLM needs."""
        starts = self.engine is None or self.engine.starts
        return self.peak <= self.capacity and self.enough_cards and starts

    @property
    def warning(self) -> str | None:
        """A line if prompt and completion are longer than the model has positions; `None` if they are not."""
        positions = _positions(self.config)
        prompt = self.settings.prompt_tokens
        completion = self.settings.completion_tokens
        if prompt + completion <= positions:
            return None
        completions = "answers of" if self.settings.is_paired else "max_completion_length:"
        room = f"at most {positions - prompt}" if prompt < positions else "the prompts alone fill them"
        return (
            f"{completions} {completion} and prompts of {prompt} tokens are more than the {positions} positions of "
            f"the model; {room}"
        )


def _positions(config: PretrainedConfig) -> float:
    """Number of positions of a model; infinite if it has no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def plan_recipe(
    words: Sequence[str],
    config: type,
    accelerate_config: str | None = None,
    hardware: str | None = None,
    processes: int | None = None,
    **options: Any,
) -> Plan:
    """Plan a recipe's command line.

    The run has as many ranks as cards, unless `processes` is given. If a vLLM server on the same cards draws ahead, it
    has the other cards, and without `processes` the run is that of the fastest split.

    Args:
        words, config: see [`from_words`], which also gets the further `options`.
        accelerate_config: see [`read_launch`].
        hardware: see [`read_hardware`].

    Raises:
        UserError: something cannot be read or built; the message is one line.
    """
    devices = read_hardware(hardware) if hardware else None
    ranks = processes or (devices and devices.cards)
    settings = from_words(words, config, read_launch(accelerate_config, ranks), **options)
    devices = devices or read_hardware(None, settings.launch.use_cpu)
    if not (draws_ahead_here(settings) and devices.gpu):
        return make_plan(settings, devices)
    model_config = read_config(settings.model.model_name_or_path, settings.model.model_revision)
    splits = find_splits(settings, model_config, devices, devices.cards or 1, processes)
    if splits.chosen is not None:
        settings = with_split(settings, splits.chosen)
    return replace(make_plan(settings, devices, model_config), splits=splits)


def make_plan(
    settings: Settings,
    hardware: Hardware | None = None,
    config: PretrainedConfig | None = None,
    stops_early: bool = False,
) -> Plan:
    """Plan a run on `hardware`, by default this machine's. If `config` is not given, the model's config is read.

    With `stops_early`, a run that does not fit while it generates has no passes with gradients in its plan, because
    these take most of the time of a search.

    Raises:
        ConfigError: something cannot be read or built; the message is one line.
    """
    config = config or read_config(settings.model.model_name_or_path, settings.model.model_revision)
    hardware = hardware or read_hardware(None, settings.launch.use_cpu)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the libraries' messages are for a user who trains the model
    try:
        with warnings.catch_warnings(action="ignore"):
            row = cache_bytes(settings, config)[0] // settings.rollout_rows if settings.values.get("use_vllm") else 0
            engine = plan_engine(settings, config, hardware, passes.whole(settings, config), row)
            teacher = _plan_teacher(settings, config, hardware.gpu) if settings.has_teacher else None
            phases, step = _phases(settings, config, hardware, engine, teacher, stops_early)
    finally:
        logger.setLevel(level)
    weights = dict(passes.whole(settings, config).named_parameters())
    trained = sum(p.numel() for p in weights.values() if p.requires_grad)
    # Two 4-bit weights are packed in a byte: count the weights that the byte unpacks to.
    base = sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for name, p in weights.items() if "lora_" not in name)
    capacity = hardware.per_rank(settings.launch.processes)
    return Plan(settings, config, hardware, phases, capacity, (base, trained), step, engine, teacher=teacher)


def _plan_teacher(settings: Settings, config: PretrainedConfig, gpu: bool) -> Teacher:
    of_teacher, teachers_config = teacher_of(settings, config)
    call = call_of(of_teacher, settings.privileged_tokens)
    if not (settings.compares_states or settings.teacher_is_a_copy):
        held = 0
        name = "the model itself"
        if settings.teacher_model_kind == "base":
            name += " without its adapter"
        elif settings.teacher_model_kind == "ema":
            name += " with a mean of its adapters"
            # TRL's callback has it twice: as a second adapter, and as the mean that it is written from.
            held = 2 * model.static_bytes(passes.whole(settings, config), settings)[model.TRAINED]
        return Teacher(name, held, 0, call)
    weights = passes.whole(of_teacher, teachers_config)
    parts = (*weights.parameters(), *weights.buffers())
    held = sum(part.nbytes for part in parts) + model.state_bytes(weights)
    # TRL shards a copy of the model in one unit. It leaves a teacher of `DistillationTrainer` whole under FSDP2.
    sharded = ("zero3",) if settings.compares_states else ("zero3", "fsdp2")
    gathered = 0
    if settings.launch.kind in sharded:
        held = -(-held // settings.launch.processes)
        in_a_layer, whole = gathered_bytes(weights, of_teacher, gpu)
        gathered = in_a_layer if settings.launch.kind == "zero3" else whole
    name = of_teacher.model.model_name_or_path if settings.compares_states else "a copy of the model"
    return Teacher(name, held, gathered, call)


def _phases(
    settings: Settings,
    config: PretrainedConfig,
    hardware: Hardware,
    engine: Engine | None,
    teacher: Teacher | None,
    stops_early: bool,
) -> tuple[dict[str, dict[str, int]], Step | None]:
    """Bytes by phase and component, and the passes of a step; see [`Plan`], and [`make_plan`] for `stops_early`."""
    launch = settings.launch
    skeleton = passes.whole(settings, config)
    gpu = hardware.gpu
    static = model.static_bytes(skeleton, settings)
    on_device = static
    if launch.offload:  # only the gradient buckets stay on the device
        on_device = {name: size if name == model.BUCKETS else 0 for name, size in static.items()}
    gradients = {name: on_device[name] for name in (model.GRADIENTS, model.BUCKETS)}
    weights = {name: size for name, size in on_device.items() if name not in gradients}  # with optimizer and reference
    if teacher is not None:
        weights[TEACHER] = teacher.held
    drawing_engine = waiting_engine = {}
    if engine is not None:
        drawing_engine = waiting_engine = {ENGINES_BASE: engine.base, ENGINE: engine.rest}
        if settings.vllm_enable_sleep_mode:
            waiting_engine = {ENGINES_BASE: engine.base} if engine.keeps_base else {}
    # On a CPU it is this process without the model: whatever planning leaves in the process is in the run as well.
    process = CONTEXT if gpu else psutil.Process().memory_info().rss
    free = hardware.per_rank(launch.processes) - sum(weights.values()) - process
    in_a_layer, whole = gathered_bytes(skeleton, settings, gpu)
    gathers_whole = _gathers_whole(settings, whole, free)

    def completed(name: str, parts: dict[str, int]) -> dict[str, int]:
        temporary = sum(parts.get(part, 0) for part in (ACTIVATIONS, CACHE, TURNS, TOKEN_STEP))
        if name != "optimizer":
            parts[GATHERED] = whole if gathers_whole and name in ("generate", "score") else in_a_layer
        if name == "forward_backward" and teacher is not None:
            parts[GATHERED] += teacher.gathered
        parts[PROCESS] = process
        if gpu:
            parts[ROOM] = math.ceil(SLACK * (temporary + parts.get(GATHERED, 0)))
        return {part: size for part, size in parts.items() if size}

    phases = {}
    if not settings.is_paired:
        parts = {**weights, **_generation(settings, config, gpu), **drawing_engine}
        if settings.keeps_turns:
            # A row's cache is kept when its turn has ended; the last rows of a batch are then still in the cache.
            parts[TURNS] = min(parts[CACHE], max(0, int(FREE_SHARE * free)))
        phases["generate"] = completed("generate", parts)
        if stops_early and sum(phases["generate"].values()) > hardware.per_rank(launch.processes):
            return phases, None
    if settings.scores_again:
        scored = passes.measure(settings, config, passes.scored_shape(settings, gpu), gpu)
        phases["score"] = completed("score", {**weights, ACTIVATIONS: scored, **waiting_engine})
    step = plan_step(settings, passes.why_not_keep(settings, config))
    loss = _loss_bytes(settings, config, step, gpu)
    parts = {**weights, **gradients, ACTIVATIONS: loss, **waiting_engine}
    phases["forward_backward"] = completed("forward_backward", parts)
    # TRL's default optimizer is fused, and updates in place.
    update = 0 if "fused" in optimizer_name(settings) else static[model.GRADIENTS]
    parts = {**weights, **gradients, "optimizer's update": update, **waiting_engine}
    phases["optimizer"] = completed("optimizer", parts)
    return phases, step


def _loss_bytes(settings: Settings, config: PretrainedConfig, step: Step, gpu: bool) -> int:
    """Peak bytes of the passes with gradients, and of the padded forward that checks the first one."""
    if settings.compares_states and settings.launch.kind in ("single", "ddp"):
        # TRL calls the backbone, and accelerate's mixed precision lies around the model's forward.
        settings = replace(settings, launch=replace(settings.launch, mixed_precision="no"))
    shape = passes.loss_shape(settings, settings.prefix_sharing != "off", gpu)
    if settings.has_teacher:
        shape = passes.call_shape(settings)
        loss = passes.measure_with_teacher(settings, config, gpu)
    elif step.is_shared:
        loss = passes.measure_of(settings, config, step, gpu)
    else:
        loss = passes.measure(settings, config, shape, gpu, grad=True)
    # The check has no gradients under DeepSpeed, nor if a call for hidden states or logits is checked under FSDP2.
    without = ("zero2", "zero3", "fsdp2") if settings.has_teacher else ("zero2", "zero3")
    if not shape.packed or settings.launch.kind in without:
        return loss
    compared = passes.compared_shape(settings, config, gpu)
    if settings.has_teacher:  # last hidden states are compared
        compared = compared._replace(scored=0)
    return max(loss, passes.measure(settings, config, compared, gpu, grad=True))


def _gathers_whole(settings: Settings, whole: int, free: int) -> bool:
    """Whether generation and scoring gather the whole model, of `whole` bytes, next to the shards."""
    if settings.launch.kind != "fsdp2" or settings.is_paired or settings.fsdp_gather == "per_layer":
        return False
    if settings.use_vllm:  # the model does not generate, see `fsdp2_qlora.trainer`
        return False
    return settings.fsdp_gather == "once" or whole <= FREE_SHARE * free  # as in `fsdp2_qlora.generation.choose`


def gathered_bytes(skeleton: nn.Module, settings: Settings, on_gpu: bool) -> tuple[int, int]:
    """Bytes of gathered weights that a rank of a sharded model holds next to its shards; zeros if none are sharded.

    Returns:
        Two numbers. The first is for a layer's pass: the root's weights, two layers (one computes, the next one is
        being gathered), and the buffers that receive a layer (FSDP2 receives a unit in one buffer, gloo in two). The
        second is the whole model.
    """
    if settings.launch.kind not in ("fsdp2", "zero3") or settings.launch.processes == 1:
        return 0, 0

    def weights(module: nn.Module) -> int:
        total = model.state_bytes(module)
        for parameter in module.parameters():
            cast = parameter.is_floating_point() and settings.mixed is not None
            total += parameter.numel() * 2 if cast else parameter.nbytes
        return total

    causal = model.causal_model(skeleton)
    total = weights(skeleton)
    names = set(getattr(causal, "_no_split_modules", None) or ())
    inside = [weights(module) for module in causal.modules() if type(module).__name__ in names]
    buffers = 0
    if settings.launch.kind == "fsdp2":
        buffers = 1 if on_gpu else 2
    return total - sum(inside) + (2 + buffers) * max(inside, default=0), total


def _generation(settings: Settings, config: PretrainedConfig, gpu: bool) -> dict[str, int]:
    """Bytes by component of generation, with all completions at full length."""
    if settings.use_vllm:
        return {}
    if settings.values.get("generate_from_teacher"):
        settings = replace(settings, prompt_tokens=settings.prompt_tokens + settings.privileged_tokens)
    cache, prompt, step = cache_bytes(settings, config)
    rows = settings.rollout_rows
    if settings.compact_generation:  # each distinct prompt is computed once
        rows = max(1, rows // settings.num_generations)
    # During the prefill the cache holds the prompts only. A token step has activations of one token per row only.
    shape = passes.Shape(rows, settings.prompt_tokens, 0, False)
    prefill = passes.measure(settings, config, shape, gpu) + rows * prompt
    return {CACHE: cache, TOKEN_STEP: step, ACTIVATIONS: max(0, prefill - cache - step)}


def changed(plan: Plan, stops_early: bool = False, **values: Any) -> Plan:
    """Plan the same run with other values of its fields; `load_in_4bit` and `processes` work too.

    See [`make_plan`] for `stops_early`.
    """
    settings = plan.settings
    if "load_in_4bit" in values:
        settings = replace(settings, model=replace(settings.model, load_in_4bit=values.pop("load_in_4bit")))
    if "processes" in values:
        settings = replace(settings, launch=replace(settings.launch, processes=values.pop("processes")))
    return make_plan(replace(settings, values=settings.values | values), plan.hardware, plan.config, stops_early)


# What makes rows longer on one card, in the order in which it costs time.
NONE = "checkpointing alone"
TILES = "tiles"
OFFLOAD = "offload"
BOTH = "offload and tiles"


def longest_rows(plan: Plan, found: Callable[[], Any] = int) -> dict[str, dict[str, float]]:
    """The most tokens of the length field that fit, by what makes rows longer, with everything else as planned.

    Each entry has the field, the bytes of pinned host memory of a rank, and the seconds of a step on PCIe. `found` is
    called after each of the four searches.
    """
    settings = plan.settings
    name = settings.length_field
    has_tiles = "mlp_tokens_per_tile" in settings.values  # TRL's own trainers have none
    tiles = "auto" if settings.mlp_tokens_per_tile == "off" else settings.mlp_tokens_per_tile
    rows = {}
    for label, size, offload in (
        (NONE, "off", False),
        (TILES, tiles, False),
        (OFFLOAD, "off", True),
        (BOTH, tiles, True),
    ):
        if size != "off" and not has_tiles:
            continue
        kwargs = {**settings.checkpointing_kwargs, "offload": offload}
        values = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs, "mlp_tokens_per_tile": size}
        here = changed(plan, stops_early=True, **values)
        length = largest(here, name, 16)
        found()
        here = changed(here, **{name: length}) if length else here
        rows[label] = {name: length, "host_bytes": here.host_bytes, "pcie_seconds": here.pcie_seconds}
    return rows


def format_longest(plan: Plan, rows: dict[str, dict[str, float]]) -> str:
    """The result of [`longest_rows`] as a table."""
    name = plan.settings.length_field
    width = max(len(name), *map(len, rows))
    lines = [f"{'longest row':<{width}}  {name:>21}  {'host memory':>11}  {'PCIe, s a step':>14}"]
    for label, row in rows.items():
        host = format_bytes(row["host_bytes"]) if row["host_bytes"] else "-"
        seconds = f"{row['pcie_seconds']:.1f}" if row["host_bytes"] else "-"
        lines.append(f"{label:<{width}}  {row[name]:>21,}  {host:>11}  {seconds:>14}")
    limit = _longest(plan)
    if any(row[name] > limit - 16 for row in rows.values()):
        lines.append(f"the model has positions for {limit:,} tokens of it")
    return "\n".join(lines)


def largest(plan: Plan, name: str, step: int = 1) -> int:
    """The largest value of the field `name`, in multiples of `step`, with which the run fits.

    It is 0 if not even the smallest one fits. A length is never more than the model's positions leave.
    """
    if name == plan.settings.length_field:
        most = _longest(plan)
    else:
        most = _MOST_COMPLETIONS // plan.settings.gradient_accumulation_steps
    now = getattr(plan.settings, name) or 0

    def planned(count: int) -> Plan:
        return changed(plan, stops_early=True, **{name: count * step})

    return step * _most_that_fits(planned, most // step, now // step)


def _longest(plan: Plan) -> int:
    """The most tokens that the length field may allow: prompt and completion have positions in the model."""
    settings = plan.settings
    positions = _positions(plan.config)
    if math.isinf(positions):
        return _MOST_TOKENS
    prompt = 0 if settings.is_paired else settings.prompt_tokens  # `max_length` of pairs contains it
    return min(_MOST_TOKENS, max(0, positions - prompt))


def _most_that_fits(plan_of: Callable[[int], Plan], most: int, start: int = 1) -> int:
    """The largest count up to `most` whose plan fits; 0 if a count of 1 does not fit.

    Bytes grow nearly linearly. The next count is therefore the one at which the line through the two counts next to
    the capacity reaches it.

    Args:
        start: the first count that is tried, for example the run's own, whose plan is made already.
    """
    fitting = 0
    too_many = most + 1
    free = {}  # by count, the bytes that its plan leaves
    count = min(max(start, 1), most)
    while too_many - fitting > 1:
        plan = plan_of(count)
        free[count] = plan.capacity - plan.peak
        if plan.fits:
            fitting = count
        else:
            too_many = count
        count = _next_count(free, fitting, too_many, most)
    return fitting


def _next_count(free: dict[int, int], fitting: int, too_many: int, most: int) -> int:
    """A count between `fitting` and `too_many`, see [`_most_that_fits`]."""
    guess = 8 * fitting if too_many > most else (fitting + too_many) // 2
    # Every fourth guess halves the interval, because at a kink the line's guesses may hardly advance.
    if len(free) > 1 and len(free) % 4:
        first, second = sorted(free, key=lambda count: abs(free[count]))[:2]
        if free[first] != free[second]:
            guess = math.floor(first + free[first] * (second - first) / (free[first] - free[second]))
    return min(max(guess, fitting + 1), too_many - 1)


# The runs that `most_that_fits` plans.
_STOCK = {"prefix_sharing": "off", "mlp_tokens_per_tile": "off", "compact_generation": False}
STOCK = "stock TRL"
HERE = "here"


def with_group(plan: Plan, group: int, **values: Any) -> Plan:
    """Plan the same run with as many prompts per step and `group` completions of each.

    The number of micro-batches grows, not their size.
    """
    settings = plan.settings
    factor = group / settings.num_generations
    numbers = {}
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        number = settings.values.get(name)
        numbers[name] = max(1, round(number * factor)) if number else number
    completions = settings.values.get("generation_batch_size")
    if completions:
        completions = completions * group // settings.num_generations
    return changed(plan, **values, num_generations=group, generation_batch_size=completions, **numbers)


def most_that_fits(plan: Plan, found: Callable[[], Any] = int) -> dict[str, dict[str, int]]:
    """The largest group and the longest completion that fit, each with everything else as planned.

    They are planned for stock TRL and for this package. Each entry also has the tokens that one rank computes with
    gradients per optimizer step, with the run's own group and lengths. `found` is called after each of the four
    searches.
    """
    settings = plan.settings
    # The number of prompts per step stays the same.
    step = settings.num_generations // math.gcd(settings.num_generations, settings.gradient_accumulation_steps)
    completions = settings.gradient_accumulation_steps * settings.rows
    most_groups = settings.num_generations * _MOST_COMPLETIONS // (completions * step)
    changes = {
        STOCK: _STOCK,
        HERE: {"prefix_sharing": "auto"} if settings.prefix_sharing == "off" else {},
    }

    most = {}
    for name, values in changes.items():

        def planned(groups: int, values=values) -> Plan:
            return with_group(plan, groups * step, stops_early=True, **values)

        base = with_group(plan, settings.num_generations, **values)
        group = step * _most_that_fits(planned, most_groups, settings.num_generations // step)
        found()
        length = largest(base, "max_completion_length", 16)
        found()
        most[name] = {"num_generations": group, "max_completion_length": length, "tokens": base.step.computed}
    return most


def format_most(plan: Plan, most: dict[str, dict[str, int]]) -> str:
    """The result of [`most_that_fits`] as a table."""
    rows = plan.settings.per_device_train_batch_size
    labels = {
        STOCK: f"stock TRL, micro-batches of {rows}",
        HERE: f"prompts once per step, micro-batches of {rows}",
    }
    width = max(map(len, labels.values()))
    lines = [f"{'at most':<{width}}  {'group':>8}  {'completion':>10}  {'tokens of a step now':>20}"]
    for name, label in labels.items():
        numbers = most[name]
        lines.append(
            f"{label:<{width}}  {numbers['num_generations']:>8,}  {numbers['max_completion_length']:>10,}  "
            f"{numbers['tokens']:>20,}"
        )
    return "\n".join(lines)


def as_dict(plan: Plan) -> dict[str, Any]:
    """A plan for `json`: bytes, and the passes of an optimizer step."""
    step = plan.step
    return {
        "model": plan.settings.model.model_name_or_path,
        "hardware": plan.hardware.name,
        "launch": plan.settings.launch.kind,
        "ranks": plan.settings.launch.processes,
        "parameters": {"base": plan.parameters[0], "trained": plan.parameters[1]},
        "phases": plan.phases,
        "limiting": plan.limiting,
        "peak": plan.peak,
        "capacity": plan.capacity,
        "fits": plan.fits,
        "host_bytes": plan.host_bytes,
        "pcie_seconds": plan.pcie_seconds,
        "splits": plan.splits and asdict(plan.splits),
        "teacher": plan.teacher and {**asdict(plan.teacher), "call": plan.teacher.call._asdict()},
        "step": {
            **step._asdict(),
            "longest": step.longest._asdict(),
            "forwards": step.forwards,
            "gathers": step.gathers,
        },
    }


def fewest_cards(plan: Plan) -> int:
    """The smallest number of cards of this kind with which the run fits, one rank each.

    It is 0 if not even the largest number that is tried is enough.
    """
    # Only sharding makes a rank's part smaller, so a launch without sharding needs one card or does not fit.
    is_sharded = plan.settings.launch.kind in ("fsdp2", "zero2", "zero3")
    for cards in _CARDS if is_sharded else (1,):
        if changed(replace(plan, hardware=replace(plan.hardware, cards=cards)), processes=cards).fits:
            return cards
    return 0


def changes_that_fit(plan: Plan, most: int = 3) -> list[str]:
    """Lines of the recipe, each of which alone makes the run fit.

    Lines that do not change the result come first.
    """
    settings = plan.settings
    lines = []
    rows = settings.per_device_train_batch_size
    length = settings.values[settings.length_field] or 0
    batches = 1 if settings.is_paired else settings.rollout_batches
    sharded = settings.launch.kind == "fsdp2" and not settings.is_paired
    dense = settings.model.use_peft and not settings.model.load_in_4bit and stored_format(plan.config) is None
    can_share = plan.engine is not None and not plan.engine.is_shared
    changes = [
        (not settings.gradient_checkpointing, {"gradient_checkpointing": True}),
        (settings.mlp_tokens_per_tile == "off", {"mlp_tokens_per_tile": "auto"}),
        (sharded and settings.fsdp_gather != "per_layer", {"fsdp_gather": "per_layer"}),
        (batches > 1, {"steps_per_generation": max(1, batches // 4)}),
        (can_share, {"vllm_share_base": True}),
        (
            settings.gradient_checkpointing and not settings.offloads and plan.hardware.gpu,
            {"gradient_checkpointing_kwargs": {**settings.checkpointing_kwargs, "offload": True}},
        ),
        (dense, {"load_in_4bit": True}),
        (length >= 32, {settings.length_field: length // 2}),
        (length >= 64, {settings.length_field: length // 4}),
        (length >= 128, {settings.length_field: length // 8}),
    ]
    # TRL's own trainers have fewer fields.
    changes = [(applies and values.keys() <= settings.values.keys(), values) for applies, values in changes]
    for divisor in range(2, rows + 1):
        if rows % divisor:
            continue
        values = {"per_device_train_batch_size": rows // divisor}
        for name in ("gradient_accumulation_steps", "steps_per_generation"):
            if settings.values.get(name):
                values[name] = settings.values[name] * divisor
        if changed(plan, stops_early=True, **values).fits:
            lines.append(_recipe_line(values))
            break
    for applies, values in changes:
        if applies and len(lines) < most and changed(plan, stops_early=True, **values).fits:
            lines.append(_recipe_line(values))
    return lines


def _recipe_line(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in values.items())


def _format_step(plan: Plan) -> str:
    """A line on the passes of an optimizer step."""
    settings = plan.settings
    step = plan.step
    rows = settings.per_device_train_batch_size
    batches = settings.gradient_accumulation_steps
    parts = ["1 pass" if step.passes == 1 else f"{step.passes:,} passes"]
    if step.trunks:
        parts.append(f"{counted(step.trunks, 'forward')} of prompts")
    if step.values:
        parts.append(f"{counted(step.values, 'forward')} without gradients")
    stock = batches * rows * (settings.prompt_tokens + settings.max_completion_length)
    if settings.has_teacher:
        stock = batches * call_of(settings).padded
    line = (
        f"an optimizer step: {batches} x {rows} completions in {', '.join(parts)}: {step.computed:,} tokens, "
        f"{stock:,} in stock TRL"
    )
    if settings.launch.kind == "fsdp2":
        line += f"; the weights are gathered {step.gathers} times"
    if step.reason and settings.prefix_sharing != "off":
        line += f"; each micro-batch computes its own prompts ({step.reason})"
    return line


def _format_teacher(plan: Plan) -> str | None:
    """A line on the teacher; `None` without one."""
    teacher = plan.teacher
    if teacher is None:
        return None
    line = f"teacher: {teacher.name}"
    line += f", {format_bytes(teacher.held)} per rank" if teacher.held else ""
    line += f"; it reads {teacher.call.computed:,} tokens of a micro-batch, {teacher.call.padded:,} in stock TRL"
    if plan.settings.compares_states:
        return line
    besides = f"{plan.settings.privileged_tokens} besides each prompt"
    if plan.settings.data is not None:
        return f"{line}, at most {besides}"
    return f"{line}; assumed: {besides} (--privileged_tokens, or --dataset FILE counts them)"


def _format_host(plan: Plan) -> str | None:
    """A line on the host memory that offloaded activations take; `None` if none are."""
    if not plan.host_bytes:
        return None
    ranks = plan.settings.launch.processes
    line = f"offloaded activations: {format_bytes(plan.host_bytes)} of pinned host memory per rank"
    line += f", {format_bytes(plan.host_bytes * ranks)} together" if ranks > 1 else ""
    line += f"; about {plan.pcie_seconds:.1f} s of a step on PCIe (at {PCIE / 1e9:.0f} GB/s, assumed)"
    return f"{line}. Warning: {plan.host_warning}" if plan.host_warning else line


def format_bytes(size: float) -> str:
    """`3.04 GiB`, or MiB if the size is less than a tenth of one GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _format_engine(engine: Engine) -> str:
    """A line on the share of a vLLM engine."""
    base = "the base is the trainer's" if engine.is_shared else "the rest is its own base"
    if engine.is_shared and engine.base:
        base += f", but for {format_bytes(engine.base)}"
    rest = f"{format_bytes(engine.rest)} of {format_bytes(engine.share)}"
    row = format_bytes(engine.row)
    line = f"vLLM: {rest} for its cache and passes, {base}"
    if engine.starts:
        return f"{line}; a row's cache at full length is {row}"
    return f"{line}; it cannot start, because a row's cache is {row}: raise vllm_gpu_memory_utilization"


def _assumed(settings: Settings) -> list[str]:
    """Lines on the numbers of tokens that were counted, and those that were assumed."""
    data = settings.data
    drawn = settings.drawn
    prompt = settings.prompt_tokens
    lines = []
    if drawn is not None:
        roots, *deeper = drawn.levels
        levels = [f"{roots:,} in the roots"]
        levels += [f"{tokens:,} on level {level}" for level, tokens in enumerate(deeper, 1)]
        counted_line = (
            f"counted: micro-batches drawn from {data.source} compute {drawn.tokens:,} of {drawn.padded_tokens:,} "
            f"padded tokens at most ({', '.join(levels)}); its longest prompt has {prompt:,} tokens"
        )
        if settings.prefix_sharing == "off":
            counted_line += "; prefix_sharing: off computes all"
        lines.append(counted_line)
    if settings.is_paired and drawn is None:
        lines.append(
            f"assumed: prompts of {prompt} tokens (--prompt_tokens), answers of {settings.completion_tokens} "
            "(--pairs FILE counts them)"
        )
    elif not settings.is_paired:
        prompts = ""
        if drawn is None:
            prompts = f"prompts of {prompt} tokens (--prompt_tokens, or --dataset FILE counts them), "
        advantages = "" if settings.has_teacher else ", none without an advantage"
        lines.append(f"assumed: {prompts}every completion {settings.max_completion_length} tokens long{advantages}")
    if settings.model.load_in_8bit:
        lines.append("assumed: load_in_8bit makes no weight smaller; the plan of an 8-bit base is therefore too high")
    return lines


def format_plan(plan: Plan) -> str:
    """The table of phases and components, whether it fits, and what was assumed."""
    settings = plan.settings
    launch = plan.settings.launch
    hardware = plan.hardware
    unit, unit_name = (GIB, "GiB") if plan.peak >= GIB else (2**20, "MiB")
    heads = [f"{phase}{' *' if phase == plan.limiting else ''}" for phase in plan.phases]
    rows = [(f"{unit_name} per rank", heads)]
    components = dict.fromkeys(component for phase in plan.phases.values() for component in phase)
    for component in components:
        sizes = [phase.get(component) for phase in plan.phases.values()]
        rows.append((component, ["" if size is None else f"{size / unit:.2f}" for size in sizes]))
    rows.append(("together", [f"{plan.total(phase) / unit:.2f}" for phase in plan.phases]))
    width = max(len(label) for label, _ in rows)
    widths = [max(10, len(head)) for head in heads]
    devices = f"{launch.processes} × {hardware.name}" if launch.processes > 1 else hardware.name
    fits = "it fits" if plan.fits else "it does not fit"
    if not plan.enough_cards:
        fits += f": there are {hardware.cards} cards for {launch.processes} ranks"
    lines = [
        f"{settings.model.model_name_or_path}: {plan.parameters[0] / 1e9:.2f}e9 weights, "
        f"{plan.parameters[1] / 1e6:.1f}e6 trained; {launch.kind} on {devices}, {format_bytes(plan.capacity)} per "
        "rank",
        "",
        *(f"{label:<{width}}  " + "  ".join(map(str.rjust, cells, widths)) for label, cells in rows),
        "",
        f"* {plan.limiting} needs most: {format_bytes(plan.peak)} of {format_bytes(plan.capacity)}, {fits}",
        None if settings.is_paired else _format_step(plan),
        plan.engine and _format_engine(plan.engine),
        _format_teacher(plan),
        _format_host(plan),
        *(format_splits(plan.splits, hardware.name) if plan.splits else ()),
        plan.warning and f"warning: {plan.warning}",
        *_assumed(settings),
        "assumed, not measured: the CUDA context and the allocator's slack"
        if hardware.gpu
        else "not counted: memory that the C library's heap keeps in addition to tensors",
        "not counted: DeepSpeed's own buffers" if launch.kind.startswith("zero") else None,
    ]
    return "\n".join(line for line in lines if line is not None)
