"""Self-distillation: the model answers a question, and as its own teacher it also reads how the question is solved.

    trl-fsdp-qlora sdft --config SmolLM2-135M-Instruct/sdft/basic_arithmetic

TRL's experimental `SDFTTrainer` on the problems of recipes/grpo.py, with each prompt computed once for its group by
student and teacher, and the loss in tiles of logits (`trl_fsdp_qlora/experimental/losses_in_tiles`). Every field of
`SDFTScriptArguments`, `SDFTConfig` and `trl.ModelConfig` can be in the YAML file and be overridden on the command
line; `trl-fsdp-qlora evaluate --adapter FOLDER` measures what came of it.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    from trl import ModelConfig
    from trl.experimental.sdft import SDFTConfig

    from trl_fsdp_qlora import share_prompts
    from trl_fsdp_qlora.experimental.losses_in_tiles import TiledSDFTTrainer
    from trl_fsdp_qlora.tools.recipe.arguments import parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_script, load_tokenizer
    from trl_fsdp_qlora.tools.recipe.privileged import SDFTScriptArguments, privileged_prompts
    from trl_fsdp_qlora.tools.recipe.problems import load_problems, to_measure
    from trl_fsdp_qlora.tools.recipe.record import check_output_dir
    from trl_fsdp_qlora.tools.recipe.runner import model_arguments, run_recipe
    from trl_fsdp_qlora.tools.recipe.script import run_main
    from trl_fsdp_qlora.utils.threads import fit_threads


def main() -> None:
    script, config, model = parse_recipe((SDFTScriptArguments, SDFTConfig, ModelConfig))
    check_script(script)
    check_output_dir(script, config, model)
    load_tokenizer(model.model_name_or_path, model.model_revision, script.chat)
    problems = load_problems(script)
    train = privileged_prompts(script, problems.train)
    test = to_measure(script, problems)
    arguments = model_arguments(config, model)
    config.model_init_kwargs["quantization_config"] = arguments.pop("quantization_config")  # no argument of SDFT's
    trainer = TiledSDFTTrainer(model.model_name_or_path, args=config, train_dataset=train, **arguments)
    fit_threads(trainer.model)
    share_prompts(trainer)
    run_recipe(trainer, script, test, config.resume_from_checkpoint, model)


if __name__ == "__main__":
    run_main(main)
