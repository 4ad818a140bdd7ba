"""T-SPMO on problems with exact answers: credit for single token transitions, see docs/token_selection.md.

One process, or any number of them:

    trl-fsdp-qlora t-spmo --config small-base/t_spmo/quick --accelerate_config cpu

Every field of `ScriptArguments`, `TSPMOConfig` and `trl.ModelConfig` can stand in the YAML file and be
overridden on the command line. Leaves the adapter, its card, `metrics.json` and `training.png` in `output_dir`; a run
that was killed goes on with `--resume_from_checkpoint auto`.
"""

from trl_fsdp_qlora.tools.cli.importing import importing

with importing():
    from trl import ModelConfig

    from trl_fsdp_qlora import TSPMOConfig, TSPMOTrainer
    from trl_fsdp_qlora.tools.planning.first import plan_first
    from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments, parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_recipe
    from trl_fsdp_qlora.tools.recipe.problems import load_data
    from trl_fsdp_qlora.tools.recipe.runner import build_trainer, run_recipe
    from trl_fsdp_qlora.tools.recipe.same_command import check_output_dir
    from trl_fsdp_qlora.tools.recipe.script import run_main


def main() -> None:
    script, config, model = parse_recipe((ScriptArguments, TSPMOConfig, ModelConfig))
    tokenizer = check_recipe(script, config, model)
    check_output_dir(script, config, model)
    train, test = load_data(script)
    plan_first(script, config, model, train, tokenizer)
    trainer = build_trainer(TSPMOTrainer, script, config, model, train)
    run_recipe(trainer, script, test, config.resume_from_checkpoint)


if __name__ == "__main__":
    run_main(main)
