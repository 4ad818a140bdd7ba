"""DPO on preference pairs, for example of right and wrong answers to problems with exact answers.

    trl-fsdp-qlora dpo --config SmolLM2-135M-Instruct/dpo/svamp_pairs --accelerate_config cpu

The pairs are read from what `pairs` names, in any of TRL's formats. If `dataset` names problems, accuracy on those
that are held out is measured before and after.
Every field of `DPOScriptArguments`, `EfficientDPOConfig` and `trl.ModelConfig` can be in the YAML file and be
overridden on the command line. `trl-fsdp-qlora evaluate` measures the result with `--adapter FOLDER`, and the model
before with `--model_name_or_path`.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    from trl import ModelConfig

    from trl_fsdp_qlora import EfficientDPOConfig, EfficientDPOTrainer
    from trl_fsdp_qlora.tools.planning.first import plan_first
    from trl_fsdp_qlora.tools.recipe.arguments import parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_recipe
    from trl_fsdp_qlora.tools.recipe.pairs import DPOScriptArguments, read_pairs
    from trl_fsdp_qlora.tools.recipe.problems import load_data
    from trl_fsdp_qlora.tools.recipe.record import check_output_dir
    from trl_fsdp_qlora.tools.recipe.rendering import longest_prompt
    from trl_fsdp_qlora.tools.recipe.runner import model_arguments, run_recipe
    from trl_fsdp_qlora.tools.recipe.script import run_main


def main() -> None:
    script, config, model = parse_recipe((DPOScriptArguments, EfficientDPOConfig, ModelConfig))
    recipe = check_recipe(script, config, model)
    pairs = read_pairs(script.pairs, script.dataset_split)
    check_output_dir(script, config, model)
    test = None if script.dataset is None else load_data(script)[1]
    plan = plan_first(config, model, longest_prompt(recipe, pairs), script.require_fit)
    trainer = EfficientDPOTrainer(
        model.model_name_or_path, args=config, train_dataset=pairs, **model_arguments(config, model)
    )
    trainer.card_info.settings = (script, model)
    run_recipe(trainer, recipe, test, plan)


if __name__ == "__main__":
    run_main(main)
