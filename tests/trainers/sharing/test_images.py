"""GRPO on pictures, compared with stock; and a generation batch with images, cut into micro-batches."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from trl import GRPOTrainer

from tests.prefix_sharing.helpers import build, llava_processor, tokenizer
from tests.prefix_sharing.test_images import MORE
from tests.trainers.helpers import make_trainer
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.compat.trl import rows_of_images
from trl_fsdp_qlora.prefix_sharing import image_keys
from trl_fsdp_qlora.trainers.step.groups import micro_batches

# Of the language model: nothing of the tower is trained.
ADAPTER = LoraConfig(r=4, target_modules=r".*language_model.*\.(q|v|down)_proj", init_lora_weights=False)


def test_padded_pixels_with_as_many_images_as_rows():
    """Idefics' layout, of a row with two images and a row with none; TRL 1.16 takes it for one row per image."""
    pixels = torch.rand(2, 2, 3, 4, 4)
    vision = {"pixel_values": pixels, "pixel_attention_mask": torch.ones(2, 2, 4, 4), "num_images": [2, 0]}
    chosen = rows_of_images(vision, [0])
    assert torch.equal(chosen["pixel_values"], pixels[:1]) and len(chosen["pixel_attention_mask"]) == 1
    changed = image_keys.fingerprints({**vision, "pixel_values": torch.cat([pixels[:1], pixels[1:] + 1])})
    assert (image_keys.fingerprints(vision) == changed).flatten().tolist() == [True, False]
    for part in micro_batches({**vision, "prompt_ids": torch.tensor([[0], [1]])}, 1, 0, 2):
        assert torch.equal(part["pixel_values"], pixels[part["prompt_ids"][0]])


def small_llava():
    """A small LLaVA, its processor, and eight prompts of TRL's conversational kind with a picture for each."""
    tokens = tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<image>"]})
    model = build(MORE["llava"])
    model.config.image_token_id = tokens.convert_tokens_to_ids("<image>")
    model.resize_token_embeddings(len(tokens))
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)) for _ in range(8)]
    prompts = [[{"role": "user", "content": "A+B=" if i % 2 else "CD"}] for i in range(8)]
    return model, llava_processor(tokens), prompts, pictures


def llava_trainer(cls, folder, **config):
    """GRPO of a small LLaVA on pictures, without a file anywhere."""
    model, processor, prompts, pictures = small_llava()
    dataset = Dataset.from_dict({"prompt": prompts, "image": pictures})
    return make_trainer(cls, model, folder, ADAPTER, processor, dataset, **config)


def test_training_on_pictures_equals_stock(tmp_path):
    runs = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainer = llava_trainer(cls, tmp_path, max_steps=4, beta=0.1, num_iterations=2, shuffle_dataset=False)
        trainer.train()
        wanted = ("loss", "grad_norm", "kl")
        runs.append([{key: row[key] for key in wanted if key in row} for row in trainer.state.log_history])
    figures = [row.get("prefix_sharing/policy/tokens_fraction", 0.0) for row in trainer.state.log_history]
    assert all(0 < figure < 0.8 for figure in figures[:4])
    for mine, theirs in zip(*runs, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    # A generation batch holds each of its two pictures once.
    parts = [x.untyped_storage() for part in trainer._buffered_inputs for x in part["pixel_values"]]
    held = {storage.data_ptr(): storage.nbytes() for storage in parts}
    assert len(held) == 2 and sum(held.values()) == 2 * 3 * 16 * 16 * 4
