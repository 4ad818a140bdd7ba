"""Transformers' continuous batching: the model that is trained stays as it was."""

import torch
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

# By default the engine's cache takes half of the machine's memory, here 12 GB of 24.
SMALL_CACHE = {"num_blocks": 64, "max_batch_tokens": 256}


def after_one_turn(cls, config, folder):
    settings = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": SMALL_CACHE}
    made = trainer(cls, config, folder, peft_config=lora(), bf16=True, **settings)
    before = {name: tensor.clone() for name, tensor in made.model.state_dict(keep_vars=False).items()}
    frequencies = {name: b.clone() for name, b in made.model.named_buffers()}
    made.model.train()
    rows = [made.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)]
    batch = made._generate_and_score_completions(rows)
    return made, before, frequencies, batch


def test_weights_frequencies_and_mode_stay(tmp_path):
    made, before, frequencies, batch = after_one_turn(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path)
    assert batch["completion_mask"].sum() > 8
    assert made.model.training
    for name, tensor in made.model.state_dict().items():
        assert tensor.dtype == before[name].dtype, name
        assert torch.equal(tensor, before[name]), name
    for name, buffer in made.model.named_buffers():
        assert buffer.dtype == frequencies[name].dtype, name
        assert torch.equal(buffer, frequencies[name]), name
    assert any("continuous batching" in line for _, line in made.features())


def test_stock_leaves_them_in_bf16(tmp_path):
    """Why the repair is there; once TRL mends it, this fails and the repair can go."""
    made, before, _, _ = after_one_turn(GRPOTrainer, GRPOConfig, tmp_path)
    trained = [name for name, p in made.model.named_parameters() if p.requires_grad]
    assert {before[name].dtype for name in trained} == {torch.float32}
    assert {made.model.get_parameter(name).dtype for name in trained} == {torch.bfloat16}
