"""GRPO on problems with exact answers.

One process, or any number of them:

    trl-fsdp-qlora grpo --config small-base/grpo/quickstart --accelerate_config cpu

Every field of `ScriptArguments`, `EfficientGRPOConfig` and `trl.ModelConfig` can be in the YAML file and be
overridden on the command line. Leaves the adapter, its card, `metrics.json` and `report.html` in `output_dir`; a run
that was killed continues with `--resume_from_checkpoint auto`.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
    from trl_fsdp_qlora.tools.recipe.script import run_main
    from trl_fsdp_qlora.tools.train import train

if __name__ == "__main__":
    run_main(train, EfficientGRPOTrainer, EfficientGRPOConfig)
