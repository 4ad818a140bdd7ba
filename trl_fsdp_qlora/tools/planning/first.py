"""A recipe's plan before the model is loaded."""

from accelerate import PartialState
from transformers import TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import ModelConfig

from ...utils.ranks import on_main
from ..recipe.arguments import ConfigError
from ..recipe.script import say
from .plan import MemoryPlan, make_plan
from .settings import from_config
from .table import format_bytes


def plan_first(
    config: TrainingArguments, model: ModelConfig, longest: int | None, require_fit: bool
) -> MemoryPlan | None:
    """Plan a recipe's run on the main rank, and warn if it does not fit.

    An error in the plan itself is printed in one line and never ends a run. With `require_fit` the main rank sends the
    result to all ranks.

    Args:
        config, model: of the recipe.
        longest: number of tokens of the longest prompt; `None` if it is not known.
        require_fit: end the run if the plan does not fit.

    Returns:
        `None` on other ranks, and if no plan can be made.

    Raises:
        ConfigError: on every rank, if `require_fit` is set and the plan does not fit.
    """
    plan = None
    refusal = None
    if is_deepspeed_zero3_enabled():
        # Transformers would partition the plan's model over the ranks, which are not here.
        say("memory was not planned, because ZeRO-3 is on: trl-fsdp-qlora plan with the same arguments has the table")
    elif PartialState().is_main_process and longest is not None:
        try:
            plan = make_plan(from_config(config, model, longest))
        except Exception as error:
            reason = " ".join(str(error).split())
            say(f"memory was not planned: {type(error).__name__}: {reason[:200]}")
    if plan is not None and not plan.fits:
        refusal = (
            f"by its plan this run needs {format_bytes(plan.peak)} per rank in {plan.limiting}, and there are "
            f"{format_bytes(plan.capacity)}: trl-fsdp-qlora plan with the same arguments has the table"
        )
    if require_fit:
        refusal = on_main(lambda: refusal)
        if refusal:
            raise ConfigError(f"require_fit: true, and {refusal}")
    for warning in filter(None, (plan and plan.warning, refusal)):
        say(f"warning: {warning}")
    return plan
