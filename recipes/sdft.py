"""Self-distillation: the model answers a question, and as its own teacher it also reads how the question is solved.

    trl-fsdp-qlora sdft --config SmolLM2-135M-Instruct/sdft/basic_arithmetic

TRL's experimental `SDFTTrainer` on the problems of recipes/grpo.py, with each prompt computed once for its group by
student and teacher. Every field of `SDFTScriptArguments`, `SDFTConfig` and `trl.ModelConfig` can stand in the YAML
file and be overridden on the command line; `trl-fsdp-qlora evaluate --adapter FOLDER` measures what came of it.
"""

from trl_fsdp_qlora.tools.cli.importing import importing

with importing():
    from trl import ModelConfig
    from trl.experimental.sdft import SDFTConfig, SDFTTrainer

    from trl_fsdp_qlora import share_prompts
    from trl_fsdp_qlora.tools.recipe.arguments import parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_script, load_tokenizer
    from trl_fsdp_qlora.tools.recipe.privileged import SDFTScriptArguments, privileged_prompts
    from trl_fsdp_qlora.tools.recipe.runner import accepted_arguments, train_with_trl
    from trl_fsdp_qlora.tools.recipe.same_command import check_output_dir
    from trl_fsdp_qlora.tools.recipe.script import run_main
    from trl_fsdp_qlora.tools.recipe.threads import fit_threads


def main() -> None:
    script, config, model = parse_recipe((SDFTScriptArguments, SDFTConfig, ModelConfig))
    check_script(script)
    check_output_dir(script, config, model)
    load_tokenizer(model.model_name_or_path, model.model_revision, script.chat)
    train = privileged_prompts(script)
    arguments = accepted_arguments(SDFTTrainer, config, model)
    trainer = SDFTTrainer(model.model_name_or_path, args=config, train_dataset=train, **arguments)
    fit_threads(trainer.model)
    share_prompts(trainer)
    train_with_trl(trainer, "distilling", script, config, model)


if __name__ == "__main__":
    run_main(main)
