"""A*-PO on problems with exact answers: V* of every prompt once, then one completion per prompt.

One process, or any number of them; the cache of values is shared by all of them and by later runs:

    trl-fsdp-qlora a-star-po --config small-base/a_star_po/quick --accelerate_config cpu

`--stage estimate` stops after stage 1: it fills the cache, prints its progress, and continues after an interruption.
`--stage train`, the default, runs stage 1 for what is missing and then trains. Everything else is as in
`recipes/grpo.py`.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    from dataclasses import dataclass, field

    from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer
    from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
    from trl_fsdp_qlora.tools.recipe.script import run_main, say
    from trl_fsdp_qlora.tools.train import train
    from trl_fsdp_qlora.utils.plain import counted


@dataclass
class AStarPOScriptArguments(ScriptArguments):
    """[`trl_fsdp_qlora.tools.recipe.arguments.ScriptArguments`] and the stage to stop after."""

    stage: str = field(
        default="train",
        metadata={"help": "estimate: fill the V* cache and stop; train: both.", "choices": ["estimate", "train"]},
    )


def estimate(trainer: AStarPOTrainer, script: AStarPOScriptArguments) -> bool:
    """Fill the cache of values if `--stage estimate` asks for that alone."""
    if script.stage != "estimate":
        return False
    report = trainer.estimate_values()
    say(
        f"V* of {counted(report.prompts, 'prompt')} is in {trainer.args.value_cache}: {report.already_known} "
        f"were there, {report.prompts - report.already_known} are new"
    )
    return True


if __name__ == "__main__":
    run_main(train, AStarPOTrainer, AStarPOConfig, AStarPOScriptArguments, instead=estimate)
