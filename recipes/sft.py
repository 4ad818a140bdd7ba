"""Supervised fine-tuning on worked answers, to give reinforcement something to select from.

One process, or any number of them with a copy of the model each:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py \
        --config recipes/SmolLM2-135M-Instruct/sft/config_svamp.yaml

TRL's `SFTTrainer` on SVAMP's equations or GSM8K's rationales, in the prompts of recipes/grpo.py. Every field of
`SFTScriptArguments`, `trl.SFTConfig` and `trl.ModelConfig` can stand in the YAML file and be overridden on the command
line. Leaves the model and `metrics.json` in `output_dir`; recipes/grpo.py takes that folder as `model_name_or_path`. A
run that was killed goes on with `--resume_from_checkpoint auto`.
"""

import trl_fsdp_qlora.run.importing  # noqa: F401  # before the libraries: Ctrl-C while they load is one word

# isort: split

from dataclasses import dataclass, field

from trl import ModelConfig, SFTConfig

from trl_fsdp_qlora.checkpoints.checkpoints import check_output_dir
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments, parse_recipe
from trl_fsdp_qlora.recipe.checks import check_counts, check_script, load_tokenizer
from trl_fsdp_qlora.recipe.script import run_main
from trl_fsdp_qlora.recipe.supervised import build_sft_trainer, run_sft, worked_data


@dataclass
class SFTScriptArguments(ScriptArguments):
    """[`trl_fsdp_qlora.recipe.arguments.ScriptArguments`], how much is taught, and how long a measured answer may be."""

    sft_problems: int | None = field(default=None, metadata={"help": "Teach this many problems; all by default."})
    max_new_tokens: int = field(default=96, metadata={"help": "Length limit of a completion that is measured."})


def main() -> None:
    script, config, model = parse_recipe((SFTScriptArguments, SFTConfig, ModelConfig))
    check_script(script)
    check_counts(script, {"sft_problems": (1, "leave it out for all"), "max_new_tokens": (1, "try 96")})
    if script.max_train_seconds is not None:
        raise ConfigError("max_train_seconds is of the recipes that reinforce; set num_train_epochs or max_steps")
    check_output_dir(config.output_dir, config.resume_from_checkpoint)
    load_tokenizer(model.model_name_or_path, model.model_revision, script.chat)
    train, test = worked_data(script, script.sft_problems)
    trainer = build_sft_trainer(config, model, train)
    run_sft(trainer, script, test, script.max_new_tokens, config.resume_from_checkpoint)


if __name__ == "__main__":
    run_main(main)
