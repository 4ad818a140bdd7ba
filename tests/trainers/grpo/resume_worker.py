"""One training process of the resume tests, killed at a given point: resume_worker.py OUTPUT_DIR KILL RESUME."""

import os
import signal
import sys

from tests.tiny import lora, prompts, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.trainers.saving import checkpoints

# Generation cycles of 2 × 2 = 4 micro-steps and 4-step epochs: checkpoints fall inside a cycle and past an epoch's
# end.
SETTINGS = {
    "per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 1,
    "steps_per_generation": 2, "num_iterations": 2, "beta": 0.05, "max_steps": 9, "save_strategy": "steps",
    "save_steps": 1, "save_total_limit": 2, "optim": "adamw_torch", "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
}  # fmt: skip


def dies(function, when):
    """`function`, in front of which the process is killed when `when` of its arguments is true."""

    def wrapped(*args, **kwargs):
        if when(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


def run(output_dir: str, kill: str | None, resume: str | None, model=None) -> EfficientGRPOTrainer:
    """Train in `output_dir`; `kill` is None, "step", "saving" (files half written) or "generating"."""
    data = prompts(4)
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, output_dir, model, lora(), dataset=data, **SETTINGS)
    if kill == "step":
        grpo.accelerator.backward = dies(grpo.accelerator.backward, lambda *_: grpo.state.global_step == 6)
    elif kill == "saving":
        checkpoints.commit = dies(checkpoints.commit, lambda staging, folder, _: folder.name == "checkpoint-5")
    elif kill == "generating":
        grpo._generate_single_turn = dies(grpo._generate_single_turn, lambda *_: grpo.state.global_step == 4)
    grpo.train(resume_from_checkpoint=resume)
    grpo.save_model(f"{output_dir}/final")
    return grpo


if __name__ == "__main__":
    output_dir, kill, resume = sys.argv[1:]
    run(output_dir, kill or None, resume or None)
