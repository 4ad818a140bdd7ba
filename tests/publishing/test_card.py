import re
import subprocess
import sys

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from tests.tiny import character_tokenizer, config, lora, prompts, save_tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.publishing.card import changed_arguments


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_tiny_model("base")
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, "adapter", model="base", peft_config=lora(), seed=7)
    made.card_info.dataset = "someone/sums"
    made.card_info.quickstart_prompt = prompts(1)[0]["prompt"]
    made.card_info.results = {"held-out accuracy": "50.0% (n=10, ...)"}
    made.train()
    made.save_model()
    made.create_model_card("sums-adapter")
    return made


def test_metadata_and_recipe(trained):
    card = ModelCard.load("adapter/README.md")
    assert card.data.library_name == "peft"
    assert card.data.base_model == "base"
    assert card.data.datasets == ["someone/sums"]
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.license == "other"
    assert {"trl", "grpo", "lora", "trl-fsdp-qlora", "base_model:adapter:base"} <= set(card.data.tags)
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card.text, re.DOTALL)[1])
    assert recipe["learning_rate"] == 1e-2
    assert recipe["lora"]["r"] == 4
    assert "n=10" in card.text
    assert "seed: 7" in card.text
    assert str(trained.args.output_dir) not in ("", None)


def test_the_quick_start_runs_as_printed(trained):
    code = re.search(r"```python\n(.*?)```", ModelCard.load("adapter/README.md").text, re.DOTALL)[1]
    # In a fresh process that knows nothing of this package, so that what is compared is plain PEFT's reading.
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    ids = character_tokenizer().apply_chat_template(
        prompts(1)[0]["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = trained.model.eval()
    expected = model.generate(**ids, max_new_tokens=64, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert out.strip("\n") == character_tokenizer().decode(expected, skip_special_tokens=True)


def test_plain_peft_gives_the_trainers_logits_in_a_fresh_process(trained, tmp_path):
    ids = torch.randint(5, 15, (2, 9))
    with torch.no_grad():
        torch.save({"ids": ids, "logits": trained.model.eval()(input_ids=ids).logits}, tmp_path / "expected.pt")
    code = (
        "import sys, torch\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM\n"
        "expected = torch.load('expected.pt')\n"
        "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('base'), 'adapter').eval()\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(model(input_ids=expected['ids']).logits, expected['logits'])\n"
        "assert 'trl_fsdp_qlora' not in sys.modules\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert run.returncode == 0, run.stderr


def test_no_machine_paths_in_a_card(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", model=base, peft_config=lora())
    made.card_info.dataset = str(tmp_path / "data.json")
    made.create_model_card()
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text()


def test_token_settings_are_recipe_and_tokens_are_secret(tmp_path):
    args = config(EfficientGRPOConfig, tmp_path, token_selection="s_grpo", loss_type="grpo", hub_token="hf_secret")
    changed = changed_arguments(args)
    assert changed["token_selection"] == "s_grpo"
    assert "hf_secret" not in map(str, changed.values())
