"""The recipes for models that no test can load: each with a tiny model of its architecture, through recipes/grpo.py."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")

from trl_fsdp_qlora.planning import plan_vs_actual
from trl_fsdp_qlora.recipe.small_base import character_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
SHAPE = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
PATCHES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DELTA = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "num_local_experts": 0}


MOE = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}


def qwen3_5(shape):
    return tf.Qwen3_5ForConditionalGeneration(tf.Qwen3_5Config(text_config=shape | DELTA, vision_config=VISION))


def gemma3(shape):
    text = shape | {"head_dim": 32}
    return tf.Gemma3ForConditionalGeneration(tf.Gemma3Config(text_config=text, vision_config=PATCHES))


def granite(shape):
    states = STATES | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 64}
    return tf.GraniteMoeHybridForCausalLM(tf.GraniteMoeHybridConfig(**shape, **states))


def lfm2(shape):
    return tf.Lfm2ForCausalLM(tf.Lfm2Config(**shape, layer_types=["conv", "full_attention"]))


ATTENTION = {"q_proj", "k_proj", "v_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
DELTA_RULE = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
# A tiny model of each, and what LoRA adapts.
ARCHITECTURES = {
    "Qwen2.5-32B-Instruct": (lambda shape: tf.Qwen2ForCausalLM(tf.Qwen2Config(**shape)), ATTENTION | {"o_proj"} | MLP),
    "Llama-3.1-70B-Instruct": (lambda s: tf.LlamaForCausalLM(tf.LlamaConfig(**s)), ATTENTION | {"o_proj"} | MLP),
    "Qwen3-30B-A3B-Instruct": (
        lambda shape: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**shape, **MOE)),
        ATTENTION | {"o_proj"},
    ),
    "Qwen3.5-4B": (qwen3_5, ATTENTION | {"o_proj"} | MLP | DELTA_RULE),
    "Qwen3.5-9B": (qwen3_5, ATTENTION | {"o_proj"} | MLP | DELTA_RULE),
    "gemma-3-4b-it": (gemma3, ATTENTION | {"o_proj"} | MLP),
    "LFM2-1.2B": (lfm2, ATTENTION | {"in_proj", "out_proj", "w1", "w2", "w3"}),
    "granite-4.0-h-micro": (granite, ATTENTION | {"o_proj", "in_proj", "input_linear", "output_linear"}),
}


@pytest.mark.parametrize(
    "path",
    sorted(path for name in ARCHITECTURES for path in (RECIPES / name).glob("*/*.yaml")),
    ids=lambda path: f"{path.parents[1].name}/{path.parent.name}",
)
def test_it_trains_a_tiny_model_of_its_architecture(path, tmp_path, monkeypatch, capsys):
    build, adapted = ARCHITECTURES[path.parents[1].name]
    monkeypatch.setattr(plan_vs_actual, "make_plan", lambda run: None)  # tests/planning plans such models
    tokenizer = character_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    build(SHAPE | ids | {"vocab_size": len(tokenizer)}).save_pretrained(tmp_path / "base")
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
    assert "prefix sharing: auto" in capsys.readouterr().out
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].split(".")[-1] for name in weights} == adapted
    assert not any(part in name for name in weights for part in ("visual", "vision"))
