"""What one rank, a node of its own, does in test_same_weights.py: nodes_worker.py OUT MODEL_0 MODEL_1."""

import os
from pathlib import Path

from tests.distributed.rank import run_rank
from tests.tiny import config, digit_share, lora, prompts
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.errors import UserError

RANK = int(os.environ["RANK"])


def main(out, *models):
    args = config(EfficientGRPOConfig, out)
    line = ""
    try:
        EfficientGRPOTrainer(models[RANK], digit_share, args, prompts(), peft_config=lora())
    except UserError as error:
        line = str(error)
    Path(out, f"rank{RANK}.txt").write_text(line)


if __name__ == "__main__":
    run_rank(main)
