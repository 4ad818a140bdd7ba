"""What each rank of test_two_nodes.py runs: a few GRPO steps of a tiny model, under whatever config it was launched with.

node_worker.py KIND BASE OUT; KIND is ddp, hsdp or zero2. With DIE_AT=n in the environment, the last node dies in step n + 1,
once: its agent and its rank are killed.
"""

import os
import signal
import sys
from pathlib import Path

from tests.distributed.fsdp_on_gloo import force_fsdp, without_deepspeeds_operator

force_fsdp()

import torch  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from tests.tiny import lora, prompts, trainer  # noqa: E402
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer  # noqa: E402

SETTINGS = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_steps": 4,
    "save_strategy": "steps",
    "save_steps": 1,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "optim": "adamw_torch",  # with states, which a resumed run needs
}


class Die(TrainerCallback):
    def __init__(self, step: int, mark: Path):
        self.step, self.mark = step, mark

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def base_model(kind: str, base: str):
    if kind != "hsdp":
        return base
    from transformers import AutoModelForCausalLM

    from tests.fsdp2_qlora import tiny

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=tiny.quantization())


def main(kind: str, base: str, out: str) -> None:
    without_deepspeeds_operator()
    torch.manual_seed(0)  # the adapter's first weights
    made = trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, out, base_model(kind, base), lora(), dataset=prompts(8), **SETTINGS
    )
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
