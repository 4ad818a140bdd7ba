"""A*-PO on problems with exact answers: V* of every prompt once, then one completion a prompt.

One process, or any number of them; the cache of values is shared by all of them and by later runs:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/a_star_po.py \
        --config recipes/small-base/a_star_po/config_quick.yaml

`--stage estimate` stops after stage 1: it fills the cache, shows its progress, and continues where it was interrupted.
`--stage train`, the default, runs stage 1 for whatever is missing and then trains. Everything else is as in
`recipes/grpo.py`.
"""

import sys
from dataclasses import dataclass, field

from transformers import AutoTokenizer
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer
from trl_fsdp_qlora.a_star_po.fingerprint import FingerprintError
from trl_fsdp_qlora.a_star_po.value_cache import ValueCacheError
from trl_fsdp_qlora.checkpoints import CheckpointError, check_output_dir
from trl_fsdp_qlora.datasets import DatasetError
from trl_fsdp_qlora.recipe import (
    ConfigError,
    ScriptArguments,
    load_data,
    parse_recipe,
    reward_functions,
    run_recipe,
    say,
)
from trl_fsdp_qlora.rewards import UnparsableGoldAnswer


@dataclass
class AStarPOScriptArguments(ScriptArguments):
    """[`trl_fsdp_qlora.recipe.ScriptArguments`] and the stage to stop after."""

    stage: str = field(
        default="train",
        metadata={"help": "estimate: fill the V* cache and stop; train: both.", "choices": ["estimate", "train"]},
    )


def main() -> None:
    script, config, model = parse_recipe((AStarPOScriptArguments, AStarPOConfig, ModelConfig))
    if script.stage == "train":
        check_output_dir(config.output_dir, config.resume_from_checkpoint)
    train, test = load_data(script)
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    trainer = AStarPOTrainer(
        model.model_name_or_path,
        reward_functions(script),
        config,
        train,
        eval_dataset=test,
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    if script.stage == "estimate":
        report = trainer.estimate_values()
        say(
            f"V* of {report.prompts} prompts is in {config.value_cache}: {report.already_known} were there, "
            f"{report.prompts - report.already_known} are new ({report.seconds:.1f} s)"
        )
        return
    run_recipe(trainer, script, test, config.resume_from_checkpoint)


if __name__ == "__main__":
    try:
        main()
    except (
        CheckpointError,
        ConfigError,
        DatasetError,
        FingerprintError,
        UnparsableGoldAnswer,
        ValueCacheError,
    ) as error:
        sys.exit(f"error: {error}")
