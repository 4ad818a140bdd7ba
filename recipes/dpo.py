"""DPO on preference pairs, for example of right and wrong answers to problems with exact answers.

    trl-fsdp-qlora dpo --config SmolLM2-135M-Instruct/dpo/svamp_pairs --accelerate_config cpu

The pairs are read from what `pairs` names, in any of TRL's formats. If it is a .jsonl file that does not exist, it is
written: the model answers each training problem `pair_samples` times, and right answers are preferred to wrong ones.
Every field of `DPOScriptArguments`, `EfficientDPOConfig` and `trl.ModelConfig` can be in the YAML file and be
overridden on the command line. `trl-fsdp-qlora evaluate` measures the result with `--adapter FOLDER`, and the model
before with `--model_name_or_path`.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    import sys

    import torch
    from accelerate import PartialState
    from trl import ModelConfig

    from trl_fsdp_qlora import EfficientDPOConfig, EfficientDPOTrainer
    from trl_fsdp_qlora.tools.data.worked import worked
    from trl_fsdp_qlora.tools.publishing.loading import load_model
    from trl_fsdp_qlora.tools.recipe.arguments import ConfigError, parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_recipe
    from trl_fsdp_qlora.tools.recipe.pairs import (
        DPOScriptArguments,
        must_be_made,
        read_pairs,
        sample_pairs,
        write_pairs,
    )
    from trl_fsdp_qlora.tools.recipe.problems import load_data, load_problems, prompts_of
    from trl_fsdp_qlora.tools.recipe.record import check_output_dir
    from trl_fsdp_qlora.tools.recipe.runner import model_arguments, run_recipe
    from trl_fsdp_qlora.tools.recipe.script import run_main, say
    from trl_fsdp_qlora.utils.ranks import on_main


def make_pairs(script: DPOScriptArguments, config: EfficientDPOConfig, model: ModelConfig, tokenizer) -> None:
    """Write `script.pairs`; the ranks share the work."""
    if script.dataset is None:
        raise ConfigError(f"pairs={script.pairs}: no such file; set dataset to problems that it can be made of")
    problems = load_problems(script).train[: script.pair_problems]
    taught = [worked(problem["columns"]) for problem in problems]
    dtype = "auto" if model.dtype in (None, "auto") else getattr(torch, model.dtype)
    answering = load_model(model.model_name_or_path, None, revision=model.model_revision, dtype=dtype)
    prompts = prompts_of(script, problems)
    pairs = sample_pairs(answering.to(config.device), tokenizer, prompts, taught, script, config)
    if not pairs:
        raise ConfigError(f"none of {len(problems)} problems has both a right and a wrong answer; raise pair_samples")
    on_main(lambda: write_pairs(script.pairs, pairs))
    say(f"{len(pairs)} pairs of {len(problems)} problems are in {script.pairs}")


def main() -> None:
    script, config, model = parse_recipe((DPOScriptArguments, EfficientDPOConfig, ModelConfig))
    tokenizer = check_recipe(script, config, model)
    is_made = on_main(lambda: must_be_made(script.pairs, sys.argv))
    check_output_dir(script, config, model)
    test = None if script.dataset is None else load_data(script)[1]
    if is_made:
        make_pairs(script, config, model, tokenizer)
    PartialState().wait_for_everyone()
    trainer = EfficientDPOTrainer(
        model.model_name_or_path,
        args=config,
        train_dataset=read_pairs(script.pairs, script.dataset_split),
        **model_arguments(config, model),
    )
    trainer.card_info.settings = (script, model)
    run_recipe(trainer, script, test, config.resume_from_checkpoint, model)


if __name__ == "__main__":
    run_main(main)
