"""A recipe of GRPO, RLOO, T-SPMO or A*-PO from its command to its end; the scripts of that name call [`train`]."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from trl import ModelConfig

from .planning.first import plan_first
from .recipe.arguments import ScriptArguments, parse_recipe
from .recipe.checks import check_recipe
from .recipe.problems import load_data
from .recipe.record import check_output_dir
from .recipe.rendering import longest_prompt
from .recipe.runner import build_trainer, run_recipe

if TYPE_CHECKING:
    from ..trainers.trainer_run import TrainerRun


def _nothing(trainer: "TrainerRun", script: ScriptArguments) -> bool:
    """The `instead` of a recipe that has nothing to do in place of its training."""
    return False


def train(
    trainer_class: type,
    config_class: type,
    script_class: type = ScriptArguments,
    instead: Callable[["TrainerRun", ScriptArguments], bool] = _nothing,
) -> None:
    """Check the arguments, read the data, plan the memory, build the trainer and train it.

    Args:
        trainer_class: a trainer with rewards, of this package.
        config_class: its config.
        script_class: what the recipe's other arguments are.
        instead: called with the trainer and the script's arguments; if it returns true, nothing is trained.
    """
    script, config, model = parse_recipe((script_class, config_class, ModelConfig))
    recipe = check_recipe(script, config, model)
    check_output_dir(script, config, model)
    prompts, test = load_data(script)
    longest = longest_prompt(recipe, prompts)
    plan = plan_first(config, model, longest, script.require_fit)
    trainer = build_trainer(trainer_class, recipe, prompts, eval_dataset=test)
    if instead(trainer, script):
        return
    run_recipe(trainer, recipe, test, plan)
