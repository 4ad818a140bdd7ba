"""A recipe's plan before the model is loaded."""

from typing import TYPE_CHECKING

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import ModelConfig

from ...utils.ranks import on_main
from ..evaluation.drawing import MeasuringTrainer
from ..evaluation.measurement import Measurement
from ..recipe.arguments import ConfigError, ScriptArguments
from ..recipe.checks import Checked
from ..recipe.measuring import measurement_of
from ..recipe.runner import load_processing
from ..recipe.script import say
from .plan import MemoryPlan, make_plan
from .settings import from_config
from .table import format_bytes

if TYPE_CHECKING:
    from transformers import TrainingArguments

# Number of training prompts whose lengths are read.
_PROMPTS = 64
_PROMPTS_WITH_IMAGES = 8


def plan_first(
    script: ScriptArguments, config: "TrainingArguments", model: ModelConfig, train: Dataset, checked: Checked
) -> MemoryPlan | None:
    """Plan a recipe's run on the main rank, and warn if it does not fit.

    Returns `None` on other ranks, and if no plan can be made. An error in the plan itself is printed in one line and
    never ends a run. With `require_fit` the main rank sends the result to all ranks.

    Raises:
        ConfigError: on every rank, if `require_fit` is set and the plan does not fit.
    """
    plan = None
    refusal = None
    if is_deepspeed_zero3_enabled():
        # Transformers would partition the plan's model over the ranks, which are not here.
        say("memory was not planned, because ZeRO-3 is on: trl-fsdp-qlora plan with the same arguments has the table")
    elif PartialState().is_main_process:
        try:
            count = _PROMPTS_WITH_IMAGES if "images" in train.column_names else _PROMPTS
            sample = train.select(range(min(count, len(train))))
            measurement = measurement_of(script, config, checked.code)
            longest = longest_prompt(checked.tokenizer, sample, model, measurement)
            plan = make_plan(from_config(config, model, longest))
        except Exception as error:
            say(f"memory was not planned: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if plan is not None and not plan.fits:
        refusal = (
            f"by its plan this run needs {format_bytes(plan.peak)} per rank in {plan.limiting}, and there are "
            f"{format_bytes(plan.capacity)}: trl-fsdp-qlora plan with the same arguments has the table"
        )
    if script.require_fit:
        refusal = on_main(lambda: refusal)
        if refusal:
            raise ConfigError(f"require_fit: true, and {refusal}")
    for warning in filter(None, (plan and plan.warning, refusal)):
        say(f"warning: {warning}")
    return plan


def longest_prompt(
    tokenizer: PreTrainedTokenizerBase, sample: Dataset, model: ModelConfig, measurement: Measurement | None = None
) -> int:
    """Number of tokens of the longest prompt of `sample`, with the tokens of its images and tools."""
    processing = tokenizer
    if "images" in sample.column_names:
        processing = load_processing(model.model_name_or_path, model.model_revision, images=True)
    trainer = MeasuringTrainer(processing, measurement or Measurement())
    return max(map(len, trainer.prompt_ids(list(sample))))
