"""Run by test_equals_stock.py in two processes: train under DDP, then one step in which rank 1 has nothing to score."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from prefix_sharing.helpers import RECURRENT, SUPPORTED, awkward_batch, build, loss_inputs, make_trainer

from trl_fsdp_qlora import EfficientGRPOTrainer


def main(folder: Path, name: str) -> None:
    make = SUPPORTED.get(name) or RECURRENT[name][0]
    results = {}
    for choice in ("off", "auto"):
        torch.manual_seed(0)
        trainer = make_trainer(
            EfficientGRPOTrainer,
            build(make),
            folder,
            prefix_sharing=choice,
            per_device_train_batch_size=4,
            max_steps=2,
            steps_per_generation=2,
            num_iterations=2,
            mask_truncated_completions=True,
        )
        trainer.train()
        assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer.model_wrapped.zero_grad()
        inputs = loss_inputs(*awkward_batch())
        if trainer.accelerator.process_index == 1:
            inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
        trainer.accelerator.backward(trainer._compute_loss(trainer.model_wrapped, inputs))
        results[choice] = {
            "packed": trainer.prefix_sharing.active(),
            "loss": [row["loss"] for row in trainer.state.log_history if "loss" in row],
            "weights": [p.detach().clone() for p in trainer.model.parameters()],
            "empty_gradient": [p.grad.clone() for p in trainer.model.parameters()],
        }
    if trainer.accelerator.is_main_process:
        torch.save(results, folder / "results.pt")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
