"""A run's plan before it loads anything, and beside what its first step with something to learn then took."""

from collections.abc import Callable
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import ModelConfig

from ..recipe.arguments import ConfigError, ScriptArguments
from ..recipe.script import say
from .plan import PROCESS, ROOM, Plan, make_plan, too_long
from .table import amount

_PROMPTS = 64  # training prompts whose lengths are looked at
_MIB = 2**20
# Phases of a plan -> phases on the trainer's clock.
MEASURED = {
    "generate": ("generate",),
    "score": ("old_policy_pass", "reference_pass"),
    "forward_backward": ("forward_backward",),
    "optimizer": ("optimizer",),
}


def plan_first(
    script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset, tokenizer: PreTrainedTokenizerBase
) -> Plan | None:
    """The plan of a recipe's run, on the main rank; says where it does not fit. Elsewhere, and where none can be made, `None`.

    A mistake of the plan's own never ends a run: it is one line. With `require_fit` all ranks hear the verdict.

    Args:
        script, config, model: the recipe's parsed arguments.
        train: its training prompts.
        tokenizer: the model's.

    Raises:
        ConfigError: on every rank, where `require_fit` is set and the plan does not fit.
    """
    plan, line = None, None
    if getattr(config.deepspeed_plugin, "zero_stage", None) == 3:
        # Transformers fills every model that it builds under ZeRO-3, with all ranks taking part.
        line = "memory is not planned under ZeRO-3"
    elif PartialState().is_main_process:
        try:
            plan = _plan(config, model, train, tokenizer)
        except Exception as error:
            line = f"memory was not planned: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if line is not None:
        say(line)
    refusal = [None if plan is None or plan.fits else _refusal(plan)]
    if script.require_fit and PartialState().num_processes > 1:
        broadcast_object_list(refusal)
    if plan is not None and (line := too_long(plan.settings, plan.config)) is not None:
        say(f"warning: {line}")
    if refusal[0] is not None:
        if script.require_fit:
            raise ConfigError(f"require_fit: true, and {refusal[0]}")
        say(f"warning: {refusal[0]}")
    return plan


def _plan(config: Any, model: ModelConfig, train: Dataset, tokenizer: PreTrainedTokenizerBase) -> Plan:
    longest = _longest_prompt(tokenizer, train)
    source = f"the longest of the first {min(_PROMPTS, len(train))} training prompts"
    return make_plan((config, model), prompt_tokens=longest, prompt_source=source)


def _longest_prompt(tokenizer: PreTrainedTokenizerBase, train: Dataset) -> int:
    """Tokens of the longest of the first prompts."""
    lengths = []
    for prompt in train[:_PROMPTS]["prompt"]:
        if isinstance(prompt, str):
            text = prompt
        else:
            text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(text)["input_ids"]))
    return max(lengths)


def _refusal(plan: Plan) -> str:
    return (
        f"by its plan this run needs {amount(plan.peak)} per rank in {plan.limiting}, and there are {amount(plan.capacity)}: "
        "trl-fsdp-qlora plan with the same arguments has the table"
    )


def comparable(plan: Plan, phase: str) -> int:
    """Planned bytes of a phase as telemetry measures it: on a GPU the allocator knows neither context nor its own slack."""
    unseen = (PROCESS, ROOM) if plan.hardware.gpu else ()
    return sum(size for part, size in plan.phases[phase].items() if part not in unseen)


def beside(plan: Plan, measured: dict[str, float], step: int) -> str:
    """Planned and measured bytes of each phase that was measured in `step`, as lines.

    Args:
        plan: of the run.
        measured: phase on the trainer's clock -> MiB.
        step: that was measured.
    """
    lines = [f"memory of step {step} on rank 0, planned and measured:"]
    for phase, names in MEASURED.items():
        found = [measured[name] for name in names if name in measured]
        if found and phase in plan.phases:
            lines.append(f"  {phase:<16} {comparable(plan, phase) / _MIB:>9,.0f} MiB {max(found):>9,.0f} MiB")
    return "\n".join(lines)


class BesideCallback(TrainerCallback):
    """Puts `memory/planned_mib` among the metrics, and prints planned and measured bytes once.

    After the first step that had an advantage other than zero: a step without computes next to nothing in its loss.

    Args:
        metrics: gives the trainer's metrics of training; its telemetry callback comes before this one.
        plan: of the run.
    """

    def __init__(self, metrics: Callable[[], dict[str, list]], plan: Plan):
        self.metrics, self.plan = metrics, plan
        self._planned_mib = max(comparable(plan, phase) for phase in plan.phases) / _MIB
        self._printed, self._learns = False, True

    def on_step_end(self, args, state, control, **kwargs):
        metrics = self.metrics()
        metrics["memory/planned_mib"].append(self._planned_mib)
        if zero := metrics.get("efficiency/zero_advantage_fraction"):  # of the newest generation batch
            self._learns = zero[-1] < 1
        if self._printed or not self._learns:
            return
        self._printed = True
        prefix, suffix = "memory/", "_peak_mib"
        measured = {
            name.removeprefix(prefix).removesuffix(suffix): values[-1]
            for name, values in metrics.items()
            if name.endswith(suffix) and values
        }
        if measured:
            say(beside(self.plan, measured, state.global_step))


def watch(trainer: Any, plan: Plan | None) -> None:
    """Compare `trainer`'s first step with its plan; nothing without one."""
    if plan is not None:
        trainer.add_callback(BesideCallback(lambda: trainer._metrics["train"], plan))
