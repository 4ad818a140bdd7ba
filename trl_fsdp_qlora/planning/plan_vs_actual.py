"""A recipe's plan before it loads anything, and a comparison with its first step that has something to learn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import ModelConfig

from ..evaluation.accuracy import encode_images
from ..evaluation.episodes import Agent, begin
from ..recipe.arguments import ConfigError, ScriptArguments
from ..recipe.episodes import agent_of
from ..recipe.runner import load_processing
from ..recipe.script import say
from ..run.nonfatal import nonfatal
from ..run.one_line import stop_at_once, stop_by_exception
from ..run.ranks import on_main
from ..telemetry.phases import MIB
from .plan import PROCESS, ROOM, Plan, format_bytes, make_plan
from .settings import from_config

_PROMPTS, _PICTURES = 64, 8  # training prompts whose lengths are read: in all, and with images


def plan_first(
    script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset, tokenizer: PreTrainedTokenizerBase
) -> Plan | None:
    """Plan a recipe's run on the main rank, and warn if it does not fit.

    Returns `None` on other ranks, and if no plan can be made. An error in the plan itself is logged in one line and
    never ends a run. With `require_fit` all ranks learn the result.

    Raises:
        ConfigError: on every rank, if `require_fit` is set and the plan does not fit.
    """
    plan = refusal = None
    if getattr(config.deepspeed_plugin, "zero_stage", None) == 3:
        # Transformers fills every model that it builds under ZeRO-3, which takes all ranks.
        say("memory is not planned under ZeRO-3")
    elif PartialState().is_main_process:
        try:
            few = train.select(range(min(_PICTURES if "images" in train.column_names else _PROMPTS, len(train))))
            agent = agent_of(script, getattr(config, "chat_template_kwargs", None))
            longest = longest_prompt(tokenizer, few, model, agent)
            stop_at_once()  # a callback may raise KeyboardInterrupt on fake tensors, which loses it
            settings = from_config(config, model, prompt_tokens=longest)
            of_episodes = {name: getattr(script, name, None) for name in ("tools", "environment")}
            plan = make_plan(replace(settings, values=settings.values | of_episodes))
        except Exception as error:
            say(f"memory was not planned: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
        finally:
            stop_by_exception()
    if plan is not None and not plan.fits:
        needed = f"{format_bytes(plan.peak)} per rank in {plan.limiting}, and there are {format_bytes(plan.capacity)}"
        refusal = f"by its plan this run needs {needed}: trl-fsdp-qlora plan with the same arguments has the table"
    if script.require_fit and (refusal := on_main(lambda: refusal)):
        raise ConfigError(f"require_fit: true, and {refusal}")
    for line in (plan and plan.warning, refusal):
        if line:
            say(f"warning: {line}")
    return plan


def longest_prompt(
    tokenizer: PreTrainedTokenizerBase, few: Dataset, model: ModelConfig, agent: Agent | None = None
) -> int:
    """Tokens of the longest of a few prompts, including those of their images."""
    if "images" in few.column_names:
        processor = load_processing(model.model_name_or_path, model.model_revision, images=True)
        return max(map(len, encode_images(list(few), processor)[0]))
    if agent is not None:
        return max(episode.prompt_length for episode in begin(agent, list(few), tokenizer))
    lengths = []
    for prompt in few["prompt"]:
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        lengths.append(len(tokenizer(prompt)["input_ids"]))
    return max(lengths)


class PlanVsActual(TrainerCallback):
    """Puts `memory/planned_mib` among the trainer's `metrics` of training, and prints planned and measured bytes once.

    It does so after the first step that had an advantage other than zero, because a step without one computes next to
    nothing in its loss. On a GPU the allocator is measured. The allocator knows neither the context nor its own slack,
    so both are left out of the plan.
    """

    def __init__(self, metrics: Callable[[], dict[str, list]], plan: Plan):
        self.metrics = metrics
        unseen = {PROCESS, ROOM} if plan.hardware.gpu else set()
        seen = {phase: [parts[name] for name in parts.keys() - unseen] for phase, parts in plan.phases.items()}
        self.planned_mib = {phase: sum(sizes) / MIB for phase, sizes in seen.items()}
        self._printed, self._learns = False, True

    @nonfatal("planned and measured bytes")
    def on_step_end(self, args, state, control, **kwargs):
        metrics = self.metrics()
        metrics["memory/planned_mib"].append(max(self.planned_mib.values()))
        if zero := metrics.get("efficiency/zero_advantage_fraction"):  # for the newest generation batch
            self._learns = zero[-1] < 1
        if self._printed or not self._learns:
            return
        self._printed, lines = True, []
        for phase, planned in self.planned_mib.items():
            names = ("old_policy_pass", "reference_pass") if phase == "score" else (phase,)
            if found := [values[-1] for name in names if (values := metrics.get(f"memory/{name}_peak_mib"))]:
                lines.append(f"\n  {phase:<16} {planned:>9,.0f} MiB {max(found):>9,.0f} MiB")
        if lines:
            say(f"memory of step {state.global_step} on rank 0, planned and measured:{''.join(lines)}")


def watch(trainer: Any, plan: Plan | None) -> None:
    """Compare one step of `trainer` with its plan. Without a plan it does nothing."""
    if plan is not None:
        trainer.add_callback(PlanVsActual(lambda: trainer._metrics["train"], plan))
