"""Text through classes that could take images runs packed: the batch decides, not the class and not TRL's `_is_vlm`."""

import pytest
import torch
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import PrefixSharing
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

from .helpers import (
    COMPLETION,
    MULTIMODAL,
    assert_equal_gradients,
    awkward_batch,
    build,
    loss_inputs,
    losses_of,
    make_trainer,
    processor,
    stock_log_probs,
    with_stock_head,
)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_loss_equals_stock_trainer(name, tmp_path):
    inputs = loss_inputs(*awkward_batch())
    trainers = [
        make_trainer(cls, build(MULTIMODAL[name]), tmp_path, processing_class=processor())
        for cls in (GRPOTrainer, EfficientGRPOTrainer)
    ]
    assert all(trainer._is_vlm for trainer in trainers)
    stock, ours = losses_of(trainers, inputs)
    trainer = trainers[-1]
    assert trainer.prefix_sharing.active(), trainer.prefix_sharing.describe()
    assert trainer._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] < 0.7
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1], tolerance=2e-5)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_training_equals_stock(name, tmp_path, capsys):
    build(MULTIMODAL[name]).save_pretrained(tmp_path / "base")
    runs = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainer = make_trainer(
            cls,
            str(tmp_path / "base"),
            tmp_path,
            processing_class=processor(),
            max_steps=2,
            beta=0.1,
            num_iterations=2,
        )
        trainer.train()
        runs.append(
            [{k: row[k] for k in ("loss", "grad_norm", "kl") if k in row} for row in trainer.state.log_history]
        )
    assert trainer.prefix_sharing.active()
    assert "the first training prompt, 4 tokens:\n    A + B =" in capsys.readouterr().out
    for mine, theirs in zip(runs[1], runs[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_a_batch_with_images_runs_as_stock():
    model = with_stock_head(build(MULTIMODAL["gemma3"]))
    sharing = PrefixSharing(temperature=0.9)
    sharing.prepare("policy", model)
    ids, mask = awkward_batch()

    def padded(request):
        return *stock_log_probs(model, request.input_ids, request.attention_mask), None

    for fields, packed in (
        ({"pixel_values": torch.zeros(len(ids), 3, 4, 4), "num_images": [1] * len(ids)}, False),
        ({"mm_token_type_ids": ids * 0}, True),
    ):
        request = PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION, **fields)
        _, figures = sharing.log_probs(request, padded)
        assert bool(figures) == packed
