"""A recipe of GRPO, RLOO, T-SPMO or A*-PO from its command to its end; the scripts of that name call [`train`]."""

from collections.abc import Callable
from typing import Any

from trl import ModelConfig

from .planning.first import plan_first
from .recipe.arguments import ScriptArguments, parse_recipe
from .recipe.checks import check_recipe
from .recipe.measuring import check_prompts, measurement_of
from .recipe.problems import load_data
from .recipe.record import check_output_dir
from .recipe.runner import build_trainer, run_recipe


def train(
    trainer_class: type,
    config_class: type,
    script_class: type = ScriptArguments,
    instead: Callable[[Any, Any], bool] = lambda trainer, script: False,
) -> None:
    """Check the arguments, read the data, plan the memory, build the trainer and train it.

    Args:
        trainer_class: a trainer with rewards, of this package.
        config_class: its config.
        script_class: what the recipe's other arguments are.
        instead: called with the trainer and the script's arguments; if it returns true, nothing is trained.
    """
    script, config, model = parse_recipe((script_class, config_class, ModelConfig))
    checked = check_recipe(script, config, model)
    check_output_dir(script, config, model)
    prompts, test = load_data(script)
    check_prompts(prompts, checked.tokenizer, measurement_of(script, config, checked.code))
    plan = plan_first(script, config, model, prompts, checked)
    trainer = build_trainer(trainer_class, script, config, model, prompts, eval_dataset=test)
    trainer.clock.planned = 0 if plan is None else plan.measurable_peak
    if instead(trainer, script):
        return
    run_recipe(trainer, script, test, config.resume_from_checkpoint, model)
