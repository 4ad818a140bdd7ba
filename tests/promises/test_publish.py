"""`merge` and `publish`: a merged model answers like its adapter, and a user reads what will be sent."""

import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.promises.commands import TINY, run
from tests.tiny import save_recipe_files

IDS = torch.arange(2, 14)[None]


@pytest.fixture(autouse=True)
def recipe_files(tmp_path, monkeypatch):
    """A model `base`, and `data.jsonl`."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)


def save_adapter(folder: str, padded_to: int | None = None, **settings) -> torch.Tensor:
    """An adapter with random weights; returns the logits of the model that it was saved from."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    if padded_to:
        model.resize_token_embeddings(padded_to)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(model, config).eval()
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("padded_to", [64, 128])
def test_an_adapter_with_padded_embedding_and_head_is_merged(padded_to):
    """They have more rows than the tokenizer has tokens."""
    expected = save_adapter("adapter", padded_to, modules_to_save=["embed_tokens", "lm_head"])
    status, text = run("merge", "--adapter", "adapter", "--output", "merged")
    assert status == 0, text
    merged = AutoModelForCausalLM.from_pretrained("merged", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = merged(input_ids=IDS).logits
    # A merged weight is rounded once more, to half a step of float32, in each of some twenty products.
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_another_base_than_the_adapters_is_named_before_the_work():
    save_adapter("adapter")
    shutil.copytree("base", "other")
    status, text = run("merge", "--adapter", "adapter", "--base", "other", "--output", "merged")
    lines = [line for line in text.splitlines() if "adapter" in line]
    assert status == 0 and lines[0] == "warning: adapter was trained on base, and is merged into other"
    assert "warning" not in run("merge", "--adapter", "adapter", "--base", "./base", "--output", "again")[1]


def test_publish_prints_what_a_reader_will_see():
    lora = ["--use_peft", "true", "--lora_target_modules", "q_proj", "--license", "mit", "--data_license", "cc0-1.0"]
    status, text = run("grpo", *TINY, *lora)
    assert status == 0, text
    status, text = run("publish", "run", "--repo", "me/sums", "--base", "me/base", "--check")
    assert status == 0, text
    for line in ("base: me/base", "licence: mit", "data: `data.jsonl`, licence cc0-1.0", "results: greedy pass@1"):
        assert line in text
    assert "checked: it loads, and nothing was sent" in text
