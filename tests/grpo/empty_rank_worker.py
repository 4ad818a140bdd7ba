"""Run by test_token_budget.py in two processes: one step with work on rank 0 only, one with work on none."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.grpo.test_token_budget import batch_of, made
from trl_fsdp_qlora.grpo import token_budget


def gradients(ours, batch):
    ours.model_wrapped.zero_grad()
    ours.accelerator.backward(ours._compute_loss(ours.model_wrapped, dict(batch)))
    return torch.cat([p.grad.flatten() for p in ours.model.parameters() if p.grad is not None])


def main(folder: Path) -> None:
    ours = made(folder, max_steps=1)
    ours.train()
    assert isinstance(ours.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    ours.model.train()
    ours.current_gradient_accumulation_steps = 1
    batch = batch_of(ours)
    if ours.accelerator.process_index == 1:
        batch["advantages"].zero_()
    got = gradients(ours, batch)
    share = ours._metrics["train"]["tokens/scored_share"][-1]
    ours.token_budget.kept_by = "the reference computes everything"
    want = gradients(ours, batch)
    ours.token_budget = token_budget.TokenBudget(ours)
    batch["advantages"].zero_()
    nothing = gradients(ours, batch)
    if ours.accelerator.is_main_process:
        results = {
            "scored_share": share,
            "largest": want.abs().max().item(),
            "difference": (got - want).abs().max().item(),
            "both_empty": nothing.abs().max().item(),
        }
        (folder / "results.json").write_text(json.dumps(results))
    ours.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
