"""T-SPMO on problems with exact answers: credit for single token transitions, see docs/token_selection.md.

One process, or any number of them:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/t_spmo.py \
        --config recipes/small-base/t_spmo/config_quick.yaml

Every field of `ScriptArguments`, `TSPMOConfig` and `trl.ModelConfig` can stand in the YAML file and be
overridden on the command line. Leaves the adapter, its card, `metrics.json` and `training.png` in `output_dir`; a run
that was killed goes on with `--resume_from_checkpoint auto`.
"""

import sys

from transformers import AutoTokenizer
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_fsdp_qlora import TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.checkpoints import CheckpointError, check_output_dir
from trl_fsdp_qlora.datasets import DatasetError
from trl_fsdp_qlora.recipe import ConfigError, ScriptArguments, load_data, parse_recipe, reward_functions, run_recipe
from trl_fsdp_qlora.rewards import UnparsableGoldAnswer


def main() -> None:
    script, config, model = parse_recipe((ScriptArguments, TSPMOConfig, ModelConfig))
    check_output_dir(config.output_dir, config.resume_from_checkpoint)
    train, test = load_data(script)
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    trainer = TSPMOTrainer(
        model.model_name_or_path,
        reward_functions(script),
        config,
        train,
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    run_recipe(trainer, script, test, config.resume_from_checkpoint)


if __name__ == "__main__":
    try:
        main()
    except (CheckpointError, ConfigError, DatasetError, UnparsableGoldAnswer) as error:
        sys.exit(f"error: {error}")
