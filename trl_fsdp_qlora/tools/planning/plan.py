"""A run's bytes on the device by phase and component, per rank, and whether they fit."""

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import psutil
from transformers import PretrainedConfig

from ...prefix_sharing.ranks import deciding_alone
from ..recipe.arguments import ScriptArguments
from ..recipe.checks import read_config
from . import model
from .fake_run import FakeRun
from .gathered import gathered_by
from .hardware import CONTEXT, SLACK, Hardware, read_hardware
from .launches import read_launch
from .rollout import Engine, plan_engine
from .settings import Settings, from_words

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
class MemoryPlan:
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
    def measurable_peak(self) -> int:
        """The peak as a run measures it: on a card without the CUDA context, which its allocator does not know."""
        if not self.hardware.gpu:
            return self.peak
        totals = [self.total(name) - parts[PROCESS] for name, parts in self.phases.items()]
        return max(totals)

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
        completion = self.settings.completion_tokens
        positions = self.positions
        if prompt + completion <= positions:
            return None
        answers = "answers of" if self.settings.is_paired else "max_completion_length:"
        room = "the prompts alone fill them"
        if prompt < positions:
            room = f"at most {positions - prompt}"
        assumed = " (assumed; --prompt_tokens changes it)" if self.settings.assumes_prompt else ""
        rows = f"{answers} {completion} and prompts of {prompt} tokens{assumed}"
        return f"{rows} are more than the {positions} positions of the model; {room}"


def plan_recipe(
    words: Sequence[str],
    config: type,
    accelerate_config: str | None = None,
    hardware: str | None = None,
    processes: int | None = None,
    prompt_tokens: int | None = None,
    script: type = ScriptArguments,
) -> MemoryPlan:
    """Plan a recipe's command line. The run has as many ranks as cards, unless `processes` is given.

    Args:
        words, config, script: see [`from_words`].
        accelerate_config: see [`read_launch`].
        hardware: see [`read_hardware`].

    Raises:
        UserError: something cannot be read or built; the message is one line.
    """
    devices = read_hardware(hardware) if hardware else None
    launch = read_launch(accelerate_config, processes)
    if devices and devices.cards and not processes:
        launch = read_launch(accelerate_config, devices.cards * launch.machines)
    settings = from_words(words, config, launch, prompt_tokens, script)
    return make_plan(settings, devices or read_hardware(None, settings.launch.use_cpu))


def make_plan(
    settings: Settings, hardware: Hardware | None = None, config: PretrainedConfig | None = None
) -> MemoryPlan:
    """Plan a run on `hardware`, by default this machine's. If `config` is not given, the model's config is read.

    Raises:
        UserError: something cannot be read or built; the message is one line.
    """
    config = config or read_config(settings.model.model_name_or_path, settings.model.model_revision)
    hardware = hardware or read_hardware(None, settings.launch.use_cpu)
    # The libraries' messages are for a user who trains the model.
    loggers = logging.getLogger("transformers"), logging.getLogger("torch._subclasses.fake_tensor")
    levels = [logger.level for logger in loggers]
    for logger, least in zip(loggers, (logging.ERROR, logging.CRITICAL), strict=True):
        logger.setLevel(least)
    try:
        # Within a launch the main rank plans alone.
        with warnings.catch_warnings(action="ignore"), deciding_alone():
            run = FakeRun(settings, config, hardware.gpu)
            engine = plan_engine(run, hardware)
            phases = _phases(run, hardware, engine)
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    capacity = hardware.per_rank(settings.launch.ranks_per_machine)
    return MemoryPlan(settings, config, hardware, phases, capacity, _parameters(run), engine)


def changed(plan: MemoryPlan, **values: bool | int | str | dict) -> MemoryPlan:
    """Plan the same run with other values of its trainer's fields."""
    settings = replace(plan.settings, values=plan.settings.values | values)
    return make_plan(settings, plan.hardware, plan.config)


def _parameters(run: FakeRun) -> tuple[int, int]:
    """Numbers of parameters of the base, and of trained ones."""
    base = trained = 0
    for name, parameter in run.whole.named_parameters():
        if "lora_" not in name:
            base += model.weights_in(parameter)
        if parameter.requires_grad:
            trained += parameter.numel()
    return base, trained


# --- the table of phases ---------------------------------------------------------------------------------------------


class _Phase(NamedTuple):
    """What a phase has on the device next to the weights.

    Attributes:
        temporary: bytes by component that come and go.
        present: bytes by component that are there during the whole phase.
        gathered: bytes of gathered weights.
    """

    temporary: dict[str, int]
    present: dict[str, int]
    gathered: int


def _phases(run: FakeRun, hardware: Hardware, engine: Engine | None) -> dict[str, dict[str, int]]:
    """Bytes by phase and component, see [`MemoryPlan`]."""
    settings = run.settings
    always, gradients = _static(run)
    # On a CPU it is this process without the model: what planning leaves in the process is in the run as well.
    process = CONTEXT if hardware.gpu else psutil.Process().memory_info().rss
    capacity = hardware.per_rank(settings.launch.ranks_per_machine)
    free = capacity - sum(always.values()) - sum(gradients.values()) - process
    gathered = gathered_by(run, free)
    awake, asleep = _of_engine(engine, bool(settings.values.get("vllm_enable_sleep_mode")))

    table = {}
    if not settings.is_paired:
        table["generate"] = _Phase(_generation(run), awake, gathered.in_a_rollout)
    if settings.scores_again:
        scoring = {ACTIVATIONS: run.scoring_bytes()}
        table["score"] = _Phase(scoring, asleep, gathered.in_a_rollout)
    loss = {ACTIVATIONS: run.loss_bytes()}
    table["forward_backward"] = _Phase(loss, gradients | asleep, gathered.in_a_pass)
    update = {UPDATE: _update(run, gradients)}
    table["optimizer"] = _Phase({}, gradients | update | asleep, 0)

    phases = {}
    for name, phase in table.items():
        parts = always | phase.temporary | phase.present
        parts[GATHERED] = phase.gathered
        parts[PROCESS] = process
        if hardware.gpu:
            come_and_go = sum(phase.temporary.values()) + phase.gathered
            parts[ROOM] = math.ceil(SLACK * come_and_go)
        phases[name] = {part: size for part, size in parts.items() if size}
    return phases


def _static(run: FakeRun) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by component that are on the device during the whole run, and those of gradients."""
    static = model.static_bytes(run.whole, run.settings)
    parts_on_host = {
        "": set(),
        "optimizer": {model.OPTIMIZER},
        "all": static.keys() - {model.BUCKETS},
    }
    on_host = parts_on_host[run.settings.launch.offload]
    held = {}
    gradients = {}
    for part, size in static.items():
        if part in on_host:
            continue
        parts = gradients if part in (model.GRADIENTS, model.BUCKETS) else held
        parts[part] = size
    return held, gradients


def _of_engine(engine: Engine | None, sleeps: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by component of a vLLM engine, while it generates and while the trainer computes."""
    if engine is None:
        return {}, {}
    awake = {ENGINES_BASE: engine.base, ENGINE: engine.rest}
    if not sleeps:
        return awake, awake
    return awake, {ENGINES_BASE: engine.base} if engine.keeps_base else {}


def _update(run: FakeRun, gradients: dict[str, int]) -> int:
    """Bytes that the optimizer's update needs in addition."""
    settings = run.settings
    size = gradients.get(model.GRADIENTS, 0)
    if settings.launch.is_deepspeed and settings.mixed:  # a partition's gradients in float32
        return 2 * size
    # TRL's default optimizer is fused, and updates in place.
    if "fused" in settings.optimizer:
        return 0
    return size


def _generation(run: FakeRun) -> dict[str, int]:
    """Bytes by component of generation, with all completions at full length.

    Caches that episodes keep between turns are not among them: they take what is free, and no more than half of it.
    """
    settings = run.settings
    if settings.use_vllm:
        return {}
    needed = run.generation_bytes()
    # A token's step needs less than the prompts' forward if the prompts are long.
    above_a_token_step = max(0, needed.prefill - needed.cache - needed.step)
    return {CACHE: needed.cache, TOKEN_STEP: needed.step, ACTIVATIONS: above_a_token_step}
