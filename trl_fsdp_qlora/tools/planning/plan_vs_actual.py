"""A recipe's plan before the model is loaded, and a comparison of the plan with the first step that learns."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import ModelConfig

from ...compat.deepspeed import zero_stage
from ...trainers.run.phases import MIB
from ...utils.nonfatal import nonfatal
from ...utils.ranks import on_main
from ..cli.one_line import stop_at_once, stop_by_exception
from ..evaluation.accuracy import encode_images
from ..evaluation.episodes import Agent, begin
from ..recipe.arguments import ConfigError, ScriptArguments
from ..recipe.episodes import agent_of
from ..recipe.runner import load_processing
from ..recipe.script import say
from .drawn import longest_privileged
from .plan import PROCESS, ROOM, Plan, format_bytes, make_plan
from .settings import from_config

# Number of training prompts whose lengths are read.
_PROMPTS = 64
_PROMPTS_WITH_IMAGES = 8


def plan_first(
    script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset, tokenizer: PreTrainedTokenizerBase
) -> Plan | None:
    """Plan a recipe's run on the main rank, and warn if it does not fit.

    Returns `None` on other ranks, and if no plan can be made. An error in the plan itself is printed in one line and
    never ends a run. With `require_fit` the main rank sends the result to all ranks.

    Raises:
        ConfigError: on every rank, if `require_fit` is set and the plan does not fit.
    """
    plan = None
    refusal = None
    if zero_stage(config.deepspeed_plugin) == 3:
        # Under ZeRO-3 transformers initialises every model that it builds, which is collective.
        say("memory is not planned under ZeRO-3")
    elif PartialState().is_main_process:
        try:
            count = _PROMPTS_WITH_IMAGES if "images" in train.column_names else _PROMPTS
            sample = train.select(range(min(count, len(train))))
            agent = agent_of(script, getattr(config, "chat_template_kwargs", None))
            longest = longest_prompt(tokenizer, sample, model, agent)
            # A KeyboardInterrupt that a callback on fake tensors raises would be lost.
            stop_at_once()
            privileged = 0
            if "privileged_context" in sample.column_names:
                contexts = sample["privileged_context"]
                privileged = longest_privileged(contexts, tokenizer, config.teacher_prompt_template)
            settings = from_config(config, model, prompt_tokens=longest, privileged_tokens=privileged)
            of_episodes = {"tools": script.tools, "environment": script.environment}
            plan = make_plan(replace(settings, values=settings.values | of_episodes))
        except Exception as error:
            say(f"memory was not planned: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        finally:
            stop_by_exception()
    if plan is not None and not plan.fits:
        refusal = (
            f"by its plan this run needs {format_bytes(plan.peak)} per rank in {plan.limiting}, and there are "
            f"{format_bytes(plan.capacity)}: trl-fsdp-qlora plan with the same arguments has the table"
        )
    if script.require_fit:
        refusal = on_main(lambda: refusal)
        if refusal:
            raise ConfigError(f"require_fit: true, and {refusal}")
    for warning in () if plan is None else filter(None, (plan.warning, plan.host_warning)):
        say(f"warning: {warning}")
    if refusal:
        say(f"warning: {refusal}")
    return plan


def longest_prompt(
    tokenizer: PreTrainedTokenizerBase, sample: Dataset, model: ModelConfig, agent: Agent | None = None
) -> int:
    """Number of tokens of the longest prompt of `sample`, with the tokens of its images."""
    if "images" in sample.column_names:
        processor = load_processing(model.model_name_or_path, model.model_revision, images=True)
        return max(map(len, encode_images(list(sample), processor)[0]))
    if agent is not None:
        return max(episode.prompt_length for episode in begin(agent, list(sample), tokenizer))
    lengths = []
    for prompt in sample["prompt"]:
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(prompt)["input_ids"]))
    return max(lengths)


class PlanVsActual(TrainerCallback):
    """Adds `memory/planned_mib` to the trainer's `metrics` of training, and prints planned and measured bytes once.

    The bytes are printed after the first step that had an advantage other than zero, because the loss of a step
    without such an advantage computes next to nothing. On a GPU the allocator's bytes are measured. They contain
    neither the CUDA context nor the allocator's slack, so both are left out of the plan.
    """

    def __init__(self, metrics: Callable[[], dict[str, list]], plan: Plan):
        self.metrics = metrics
        unmeasured = {PROCESS, ROOM} if plan.hardware.gpu else set()
        self.planned_mib = {}
        for phase, parts in plan.phases.items():
            self.planned_mib[phase] = sum(parts[name] for name in parts.keys() - unmeasured) / MIB
        self._printed = False
        self._learns = True

    @nonfatal("planned and measured bytes")
    def on_step_end(self, args, state, control, **kwargs):
        metrics = self.metrics()
        metrics["memory/planned_mib"].append(max(self.planned_mib.values()))
        if zero_fractions := metrics.get("efficiency/zero_advantage_fraction"):
            self._learns = zero_fractions[-1] < 1  # of the newest generation batch
        if self._printed or not self._learns:
            return
        self._printed = True
        lines = []
        for phase, planned in self.planned_mib.items():
            names = ("old_policy_pass", "reference_pass") if phase == "score" else (phase,)
            peaks = [metrics.get(f"memory/{name}_peak_mib") for name in names]
            measured = [values[-1] for values in peaks if values]
            if measured:
                lines.append(f"\n  {phase:<16} {planned:>9,.0f} MiB {max(measured):>9,.0f} MiB")
        if lines:
            say(f"memory of step {state.global_step} on rank 0, planned and measured:{''.join(lines)}")


def watch(trainer: Any, plan: Plan | None) -> None:
    """Compare one step of `trainer` with its plan. Without a plan it does nothing."""
    if plan is not None:
        trainer.add_callback(PlanVsActual(lambda: trainer._metrics["train"], plan))
