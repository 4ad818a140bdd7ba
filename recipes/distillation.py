"""Distillation from a teacher with the same tokenizer: the student answers, and both models read its answers.

    trl-fsdp-qlora distillation --config small-base/distillation/quickstart

TRL's `DistillationTrainer` on the problems of recipes/grpo.py, with equal beginnings of prompts computed once by
student and teacher. The teacher is `teacher_model_name_or_path`; `teacher_model_init_kwargs` loads it, in 4 bits for
example. Every field of `ScriptArguments`, `trl.DistillationConfig` and `trl.ModelConfig` can be in the YAML file
and be overridden on the command line; `trl-fsdp-qlora evaluate --adapter FOLDER` measures what came of it.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    from trl import DistillationConfig, DistillationTrainer, ModelConfig

    from trl_fsdp_qlora import share_prompts
    from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments, parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_recipe, read_config
    from trl_fsdp_qlora.tools.recipe.problems import load_data
    from trl_fsdp_qlora.tools.recipe.record import check_output_dir
    from trl_fsdp_qlora.tools.recipe.runner import model_arguments, run_recipe
    from trl_fsdp_qlora.tools.recipe.script import run_main
    from trl_fsdp_qlora.utils.threads import fit_threads


def main() -> None:
    script, config, model = parse_recipe((ScriptArguments, DistillationConfig, ModelConfig))
    recipe = check_recipe(script, config, model)
    read_config(config.teacher_model_name_or_path, field="teacher_model_name_or_path")
    check_output_dir(script, config, model)
    prompts, test = load_data(script)
    trainer = DistillationTrainer(
        model.model_name_or_path,
        config.teacher_model_name_or_path,
        config,
        train_dataset=prompts.select_columns("prompt"),
        **model_arguments(config, model),
    )
    fit_threads(trainer.model)
    share_prompts(trainer)
    run_recipe(trainer, recipe, test)


if __name__ == "__main__":
    run_main(main)
