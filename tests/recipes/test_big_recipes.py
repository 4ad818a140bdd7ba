"""The recipes for models that no test can load: each with a tiny model of its architecture, through recipes/grpo.py."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("bitsandbytes")

from trl_fsdp_qlora.recipe.small_base import character_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
ARCHITECTURES = {
    "Qwen2.5-32B-Instruct": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "Llama-3.1-70B-Instruct": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}


@pytest.mark.parametrize(
    "path",
    sorted(path for name in ARCHITECTURES for path in (RECIPES / name).glob("*/*.yaml")),
    ids=lambda path: f"{path.parents[1].name}/{path.parent.name}",
)
def test_it_trains_a_tiny_model_of_its_architecture(path, tmp_path, monkeypatch):
    config_class, model_class = ARCHITECTURES[path.parents[1].name]
    tokenizer = character_tokenizer()
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model_class(
        config_class(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=256, **shape, **ids)
    ).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # What the machine decides; everything else is the recipe's.
    changes = f"""--config {path} --model_name_or_path {tmp_path}/base --dataset {tmp_path}/data.jsonl --held_out 10
        --output_dir {tmp_path}/out --use_cpu true --bf16 false --dtype float32 --max_steps 1 --max_completion_length 3
        --use_vllm false --skip_accuracy true --save_strategy no --report_to none --disable_tqdm true"""
    monkeypatch.setattr(sys, "argv", ["grpo.py", *changes.split()])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(RECIPES / "grpo.py"), run_name="__main__")
    (step,) = [row for row in json.loads((tmp_path / "out" / "metrics.json").read_text())["history"] if "loss" in row]
    assert step["step"] == 1
    adapter = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert {name.split(".")[-1] for name in adapter["target_modules"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
