"""A*-PO on problems with exact answers: V* of every prompt once, then one completion per prompt.

One process, or any number of them; the cache of values is shared by all of them and by later runs:

    trl-fsdp-qlora a-star-po --config small-base/a_star_po/quick --accelerate_config cpu

`--stage estimate` stops after stage 1: it fills the cache, prints its progress, and continues after an interruption.
`--stage train`, the default, runs stage 1 for whatever is missing and then trains. Everything else is as in
`recipes/grpo.py`.
"""

from trl_fsdp_qlora.tools.cli.importing import importing

with importing():
    from dataclasses import dataclass, field

    from trl import ModelConfig

    from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer
    from trl_fsdp_qlora.tools.planning.first import plan_first
    from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments, parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_recipe
    from trl_fsdp_qlora.tools.recipe.problems import load_data
    from trl_fsdp_qlora.tools.recipe.runner import build_trainer, run_recipe
    from trl_fsdp_qlora.tools.recipe.same_command import check_output_dir
    from trl_fsdp_qlora.tools.recipe.script import run_main, say
    from trl_fsdp_qlora.utils.plain import counted


@dataclass
class AStarPOScriptArguments(ScriptArguments):
    """[`trl_fsdp_qlora.tools.recipe.arguments.ScriptArguments`] and the stage to stop after."""

    stage: str = field(
        default="train",
        metadata={"help": "estimate: fill the V* cache and stop; train: both.", "choices": ["estimate", "train"]},
    )


def main() -> None:
    script, config, model = parse_recipe((AStarPOScriptArguments, AStarPOConfig, ModelConfig))
    tokenizer = check_recipe(script, config, model)
    if script.stage == "train":
        check_output_dir(script, config, model)
    train, test = load_data(script)
    plan_first(script, config, model, train, tokenizer)
    trainer = build_trainer(AStarPOTrainer, script, config, model, train, eval_dataset=test)
    if script.stage == "estimate":
        report = trainer.estimate_values()
        say(
            f"V* of {counted(report.prompts, 'prompt')} is in {config.value_cache}: {report.already_known} "
            f"were there, {report.prompts - report.already_known} are new ({report.seconds:.1f} s)"
        )
        return
    run_recipe(trainer, script, test, config.resume_from_checkpoint)


if __name__ == "__main__":
    run_main(main)
