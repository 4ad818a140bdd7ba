"""A rank of a run that does not fit, with `require_fit`: what it hears. Arguments: a base's folder, a folder to write to."""

import os
import sys
from dataclasses import replace

import torch.distributed
from trl import ModelConfig

from tests.tiny import config, prompts
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.planning import plan_vs_actual
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments
from trl_fsdp_qlora.recipe.small_base import character_tokenizer


def main() -> None:
    base, folder = sys.argv[1:]
    args = config(EfficientGRPOConfig, folder)
    rank, real = int(os.environ["RANK"]), plan_vs_actual.make_plan

    def on_a_small_machine(*words, **more):
        assert rank == 0, "one rank plans"
        return replace(real(*words, **more), capacity=2**20)

    plan_vs_actual.make_plan = on_a_small_machine
    script = ScriptArguments(dataset="addition", require_fit=True)
    model = ModelConfig(model_name_or_path=base, use_peft=True, lora_target_modules=["all-linear"])
    try:
        plan_vs_actual.plan_first(script, args, model, prompts(), character_tokenizer())
    except ConfigError as error:
        print(f"refused: {error}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
