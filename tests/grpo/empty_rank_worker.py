"""Run in two processes, under DDP by test_token_budget.py: a step with work on rank 0 only, and one with work on none."""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.grpo.test_token_budget import batch_of, made


def gradients(ours, batch):
    ours.model_wrapped.zero_grad()
    ours.accelerator.backward(ours._compute_loss(ours.model_wrapped, dict(batch)))
    found = [p.grad for p in ours.model.parameters() if p.grad is not None]
    return torch.cat([(grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten() for grad in found])


def measure(ours) -> dict[str, float]:
    """How far gradients with skipping are from those without, where rank 1 has only zero advantages."""
    ours.train()
    ours.model.train()
    ours.current_gradient_accumulation_steps = 1
    batch = batch_of(ours)
    if ours.accelerator.process_index == 1:
        batch["advantages"].zero_()
    got = gradients(ours, batch)
    ours.telemetry.flush()
    share = ours._metrics["train"]["tokens/scored_fraction"][-1]
    ours.budget.kept_by = "the reference computes everything"
    want = gradients(ours, batch)
    ours.budget.kept_by = None
    batch["advantages"].zero_()
    nothing = gradients(ours, batch)
    return {
        "scored_share": share,
        "largest": want.abs().max().item(),
        "difference": (got - want).abs().max().item(),
        "both_empty": nothing.abs().max().item(),
    }


def check(results: dict[str, float]) -> None:
    """What is expected of [`measure`]."""
    assert results["scored_share"] < 0.8
    assert results["largest"] > 0
    assert results["difference"] <= 1e-4 * results["largest"]
    assert results["both_empty"] == 0


def main(folder: Path) -> None:
    ours = made(folder, max_steps=1)
    results = measure(ours)
    assert isinstance(ours.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    if ours.accelerator.is_main_process:
        (folder / "results.json").write_text(json.dumps(results))
    ours.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
