"""Long rows in tiles in a trainer's step: gradients next to a step without tiles, and the values of the option."""

import itertools

import pytest

from tests.long_rows.test_tiles import TILE, TOLERANCE, calls  # noqa: F401
from tests.prefix_sharing.helpers import assert_equal_gradients
from tests.tiny import these_first
from tests.trainers.step import test_step_scores as cut_losses
from trl_fsdp_qlora import EfficientDPOConfig, EfficientGRPOConfig
from trl_fsdp_qlora.long_rows.tiles import install, remove


@pytest.mark.parametrize("kind", these_first(["lora", "nf4", "nf4 experts"], "nf4 experts"))
def test_a_trainers_step_in_packed_rows(tmp_path, monkeypatch, kind, calls):  # noqa: F811
    """LoRA and 4-bit products, by expert too, in one pass and in passes that share a trunk."""
    name = "qwen3_moe" if kind == "nf4 experts" else "qwen3"
    trainer = cut_losses.trainer_of(name, tmp_path, kind, mlp_tokens_per_tile=TILE)
    monkeypatch.setattr(cut_losses.passes, "MIN_SAVED_BY_TRUNK", 1)
    inputs = cut_losses.inputs_of(trainer)
    for count, tokens_per_pass in itertools.product((1, 12), (0, 40)):
        micro_batches = cut_losses.sliced(inputs, count)
        install(trainer.model, TILE)
        calls.clear()
        actual = cut_losses.step_gradients(trainer, micro_batches, tokens_per_pass)
        assert calls and trainer.sharing.status.packs
        remove(trainer.model)
        calls.clear()
        expected = cut_losses.step_gradients(trainer, micro_batches, tokens_per_pass)
        assert not calls
        assert_equal_gradients(actual, expected, TOLERANCE)


def test_a_router_loss(tmp_path, monkeypatch, calls):  # noqa: F811
    """The router runs on the whole row: its logits reach the loss, and get their gradients."""
    trainer = cut_losses.trainer_of("qwen3_moe", tmp_path, router_aux_loss_coef=10.0, mlp_tokens_per_tile=TILE)
    assert trainer.aux_loss_enabled
    inputs = cut_losses.inputs_of(trainer)
    inputs["advantages"] = 0.01 * inputs["advantages"]
    actual = cut_losses.step_gradients(trainer, [inputs], 0)
    assert calls
    remove(trainer.model)
    assert_equal_gradients(actual, cut_losses.step_gradients(trainer, [inputs], 0), TOLERANCE)


def test_a_configs_values(tmp_path):
    for config in (EfficientGRPOConfig, EfficientDPOConfig):
        make = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True}
        assert config(**make).mlp_tokens_per_tile == "auto"
        assert config(**make, mlp_tokens_per_tile=False).mlp_tokens_per_tile == "off"
        assert config(**make, mlp_tokens_per_tile="512").mlp_tokens_per_tile == 512
        for wrong in (0, -1, "many", True):
            with pytest.raises(ValueError, match="mlp_tokens_per_tile"):
                config(**make, mlp_tokens_per_tile=wrong)
