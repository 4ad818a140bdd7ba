"""What each rank of test_two_nodes.py runs: a few GRPO steps of a tiny model, under whatever config it was launched with.

node_worker.py KIND BASE OUT; of KIND hsdp, the base is in 4 bits. With DIE_AT=n in the environment, the last node dies in
step n + 1, once: its agent and its rank are killed.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.distributed.fsdp_on_gloo import force_fsdp, without_deepspeeds_operator
from tests.fsdp2_qlora import tiny
from tests.tiny import lora, prompts, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

SETTINGS = {"per_device_train_batch_size": 4, "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
SETTINGS |= {"learning_rate": 1e-3, "optim": "adamw_torch"}  # with states, which a resumed run needs


class Die(TrainerCallback):
    def __init__(self, step: int, mark: Path):
        self.step, self.mark = step, mark

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def main(kind: str, base: str, out: str) -> None:
    force_fsdp()
    without_deepspeeds_operator()
    model = base
    if kind == "hsdp":
        how = {"dtype": torch.float32, "quantization_config": tiny.quantization()}
        model = AutoModelForCausalLM.from_pretrained(base, **how)
    torch.manual_seed(0)  # the adapter's first weights
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, out, model, lora(), dataset=prompts(8), **SETTINGS)
    if "DIE_AT" in os.environ and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        made.add_callback(Die(int(os.environ["DIE_AT"]), Path(f"{out}.died")))
    made.train(resume_from_checkpoint="auto")
    made.save_model(f"{out}/final")
    if kind == "hsdp":
        assert made.base_bytes.world_size == 2 and made.base_bytes.ratio <= 0.52, made.base_bytes
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
