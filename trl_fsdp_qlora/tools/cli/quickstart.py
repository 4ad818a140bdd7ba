"""`trl-fsdp-qlora quickstart`: builds the small base model, and trains it with GRPO, in one command."""

import sys

from ..run.one_line import OneLineParser
from .scripts import called, launched

_DOES = (
    "Build a small model (0.6M parameters) and train it with GRPO and LoRA; the same command resumes a stopped run."
)


def quickstart(words: list[str]) -> int:
    """Run `small-base`, then `grpo` with the recipe small-base/grpo/quickstart; returns the exit status of the run."""
    parser = OneLineParser(prog="trl-fsdp-qlora quickstart", description=_DOES)
    parser.add_argument("--base", default="runs/small-base", help="folder of the model; built if it is not there")
    parser.add_argument("--output_dir", default="runs/quickstart", help="folder of the run")
    parser.add_argument("--seed", default="0", help="of the model, the data and the run")
    options = parser.parse_args(words)
    called("small_base", [options.base, "--seed", options.seed])
    run = ["--config", "small-base/grpo/quickstart", "--accelerate_config", "cpu", "--resume_from_checkpoint", "auto"]
    run += ["--model_name_or_path", options.base, "--output_dir", options.output_dir, "--seed", options.seed]
    sys.argv = ["trl-fsdp-qlora", "grpo", *run]  # the card of the run has the command that trains
    return launched("grpo", run)
