"""Each feature on a CUDA device against stock TRL, or against itself run padded, on the same batch.

What "on the emulated device" means for these tests stands in docs/gpu.md.
"""

import copy

import pytest
import torch
from transformers.utils import is_flash_attn_2_available
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import lora, tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.compat.older_gpus import lacks_bf16

from .on_gpu import MARKS, a_star_po
from .test_cuda import loss_and_gradient

pytestmark = MARKS
ROWS = (0, 0, 0, 0, 1, 1, 1, 1)


def made(cls, config_cls, folder, **changes):
    """A trainer on the device, float32 and with LoRA unless told otherwise."""
    changes = {"peft_config": lora(), "use_cpu": False, "bf16": False} | changes
    result = trainer(cls, config_cls, folder, **changes)
    result.model.train()
    result.current_gradient_accumulation_steps = 1
    return result


def drawn(ours):
    """A batch of two groups with advantages from a fixed seed."""
    batch = ours._prepare_inputs([ours.train_dataset[i] for i in ROWS])
    shape = batch["advantages"].shape
    batch["advantages"] = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(batch["advantages"].device)
    return batch


def assert_equal(got, want, tolerance=1e-4):
    """Losses, and gradients within `tolerance` of the largest: float32 and another order of its sums."""
    assert got[0] == pytest.approx(want[0], rel=1e-5, abs=1e-6)
    assert want[1].abs().max() > 0
    assert (got[1] - want[1]).abs().max() <= tolerance * want[1].abs().max()


def assert_equals_stock(tmp_path, **changes):
    stock = made(GRPOTrainer, GRPOConfig, tmp_path / "stock", **changes)
    ours = made(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "ours", **changes)
    ours.model.load_state_dict(stock.model.state_dict())
    batch = drawn(ours)
    assert_equal(loss_and_gradient(ours, batch), loss_and_gradient(stock, batch))
    assert ours.prefix_sharing.active(), ours.prefix_sharing.describe()
    return ours


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tmp_path, reentrant):
    kinds = {"use_reentrant": reentrant}
    assert_equals_stock(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kinds)


def test_token_selection_packed_equals_padded(tmp_path):
    """The same tokens are drawn for a step, whichever way they are computed."""
    results, state, batch = [], None, None
    for sharing in ("auto", "off"):
        ours = made(
            EfficientGRPOTrainer,
            EfficientGRPOConfig,
            tmp_path / sharing,
            token_selection="s_grpo",
            token_selection_rate=0.5,
            prefix_sharing=sharing,
        )
        state, batch = (state, batch) if results else (copy.deepcopy(ours.model.state_dict()), drawn(ours))
        ours.model.load_state_dict(state)
        results.append(loss_and_gradient(ours, batch))
    assert_equal(*results)


def test_t_spmo_packed_equals_padded(tmp_path):
    """On completions that share beginnings, so that rows nest where it pays."""
    results, state, batch = [], None, None
    for sharing in ("auto", "off"):
        ours = made(TSPMOTrainer, TSPMOConfig, tmp_path / sharing, prefix_sharing=sharing)
        if not results:
            state, batch = copy.deepcopy(ours.model.state_dict()), drawn(ours)
            batch["completion_ids"][:, 0] = batch["completion_ids"][0, 0]
        ours.model.load_state_dict(state)
        results.append(loss_and_gradient(ours, batch))
        assert ours.prefix_sharing.active() == (sharing == "auto")
    assert_equal(*results)


def test_a_star_po_trains(tmp_path):
    ours = a_star_po(tmp_path, prompts=8, per_device_train_batch_size=4)
    ours.train()
    losses = [row["loss"] for row in ours.state.log_history if "loss" in row]
    assert len(losses) == 2 and torch.tensor(losses).isfinite().all()


def test_fp16_trains(tmp_path):
    ours = made(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, fp16=True)
    ours.train()
    losses = [row["loss"] for row in ours.state.log_history if "loss" in row]
    assert len(losses) == 3 and torch.tensor(losses).isfinite().all()
    assert ours.prefix_sharing.active(), ours.prefix_sharing.describe()


@pytest.mark.skipif(not is_flash_attn_2_available(), reason="needs the package flash-attn")
def test_flash_attention_2_shares_prompts(tmp_path):
    if lacks_bf16(torch.device("cuda")):
        pytest.skip("flash-attn wants compute capability 8.0")
    model = tiny_model().to("cuda", torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    ours = made(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, model=model, bf16=True)
    ours.train()
    assert ours.prefix_sharing.active(), ours.prefix_sharing.describe()
    shares = [row["prefix_sharing/policy/layers_cascade"] for row in ours.state.log_history if "loss" in row]
    assert shares == [1.0] * 3


def test_a_compiled_model_equals_stock(tmp_path):
    """Traced, not code-generated: what is tested is what enters the graphs."""
    ours = assert_equals_stock(tmp_path, torch_compile=True, torch_compile_backend="eager")
    ours.train()
    assert torch.tensor([row["loss"] for row in ours.state.log_history if "loss" in row]).isfinite().all()
