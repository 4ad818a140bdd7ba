"""The drop-in trainer on a CUDA device against stock TRL on the same batch. Written without one at hand."""

import copy

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat.older_gpus import lacks_bf16

from .on_gpu import MARKS

pytestmark = MARKS


def loss_and_gradient(ours, batch):
    """Of one micro-batch, in mixed precision where the trainer says so."""
    ours.model.zero_grad()
    with ours.accelerator.autocast():
        loss = ours._compute_loss(ours.model, copy.copy(batch))
    loss.backward()
    gradients = [p.grad.flatten().float().cpu() for p in ours.model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


def made(cls, config_cls, folder, **changes):
    result = trainer(cls, config_cls, folder, peft_config=lora(), use_cpu=False, **changes)
    result.model.train()
    result.current_gradient_accumulation_steps = 1
    return result


def compared(tmp_path, bf16):
    stock = made(GRPOTrainer, GRPOConfig, tmp_path / "stock", bf16=bf16)
    ours = made(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "ours", bf16=bf16)
    ours.model.load_state_dict(stock.model.state_dict())
    batch = ours._prepare_inputs([ours.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    batch["advantages"] = torch.randn(8, generator=torch.Generator().manual_seed(0)).to(ours.accelerator.device)
    return loss_and_gradient(stock, batch), loss_and_gradient(ours, batch), ours


def test_float32_equals_stock(tmp_path):
    (want, want_gradient), (got, got_gradient), ours = compared(tmp_path, bf16=False)
    assert ours.prefix_sharing.active()
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    assert (got_gradient - want_gradient).abs().max() <= 1e-4 * want_gradient.abs().max()


def test_bfloat16_is_as_near_to_float32_as_stock_is(tmp_path):
    (_, exact), _, _ = compared(tmp_path / "fp32", bf16=False)
    (_, stock), (_, got), ours = compared(tmp_path / "bf16", bf16=True)
    backend = "two_part" if lacks_bf16(ours.accelerator.device) else "cascade"
    assert ours._metrics["train"][f"prefix_sharing/policy/layers_{backend}"][-1] == 1
    # Both round every product; twice stock's own distance leaves room for another order of the sums.
    assert (got - exact).norm() <= 2 * (stock - exact).norm() + 1e-6


def test_a_run_trains(tmp_path):
    ours = made(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, bf16=True, phase_metrics="peaks")
    ours.train()
    rows = [row for row in ours.state.log_history if "loss" in row]
    assert len(rows) == 3 and all(torch.isfinite(torch.tensor(row["loss"])) for row in rows)
    assert all(row["memory/forward_backward_peak_mib"] > 0 for row in rows)
