"""Completions to prompts with images by the compact loop, against transformers' own on a batch that holds each image per row."""

import pytest

from tests.prefix_sharing.test_images import COMPLETION, FAMILIES, IMAGE, ROWS, llava_trainer, with_images
from tests.rollout.test_decoding import greedy
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.rollout.completions import complete
from trl_fsdp_qlora.rollout.decoding import Decoding

# Why decoding attends to prompts in each row, as for text.
PER_ROW = {
    "qwen3_5": "layers with a LinearAttentionLayer",
    "qwen3_5_moe": "layers with a LinearAttentionLayer",
    **dict.fromkeys(["mistral3", "gemma3", "gemma4"], "layers with a DynamicSlidingWindowLayer"),
    "llava_onevision": "its attention takes logits_to_keep",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_token_identical(name):
    model, ids, mask, vision = with_images(name)
    ids, mask = ids[:, :-COMPLETION], mask[:, :-COMPLETION]
    prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    vision = {n: x[:, :-COMPLETION] if n.endswith("token_type_ids") else x for n, x in vision.items()}
    config = greedy(suppress_tokens=[IMAGE])
    expected, _ = complete(model.eval(), prompts, config, compact=False, vision=vision)
    decoding = Decoding()
    found, work = complete(model, prompts, config, decoding=decoding, vision=vision)
    assert found == expected and len({*map(tuple, found)}) > 3
    assert decoding.per_row == PER_ROW.get(name)
    assert work.prefill_tokens == 5 * ids.shape[1] and work.prefill_tokens_stock == len(ROWS) * ids.shape[1]
    assert work.row_steps == sum(len(row) - 1 for row in found)
    assert complete(model, prompts, config, vision=vision)[1] == work  # found exact without being told


@pytest.mark.parametrize("more", [{"num_tiles": [1]}, {"num_images": None}, {"num_images": [1]}])
def test_images_that_cannot_be_dealt_to_prompts_generate_as_in_stock(more):
    model, ids, mask, vision = with_images("llava")
    vision = {name: x for name, x in (vision | more).items() if x is not None}
    prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    if "num_tiles" in vision:  # which this model does not take
        with pytest.raises(ValueError, match="num_tiles"):
            complete(model, prompts, greedy(max_new_tokens=2), vision=vision)
    else:
        assert complete(model, prompts, greedy(max_new_tokens=2), vision=vision)[1] is None


def test_training_generates_with_each_image_once(tmp_path, monkeypatch):
    trainer = llava_trainer(EfficientGRPOTrainer, tmp_path, max_steps=1, compact_generation=True)
    monkeypatch.setattr("trl.GRPOTrainer._generate_single_turn", None)
    trainer.train()
    (step,) = [row for row in trainer.state.log_history if "loss" in row]
    assert step["generation/prefill_tokens"] == step["generation/prefill_tokens_stock"] / 4
