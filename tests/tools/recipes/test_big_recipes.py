"""The recipes for models that no test can load: each with a tiny model of its architecture, through
recipes/grpo.py.
"""

import json

import pytest
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")

from tests.prefix_sharing.helpers import build, small
from tests.tiny import these_first
from trl_fsdp_qlora.tools.planning import first
from trl_fsdp_qlora.tools.small_base import character_tokenizer

from .conftest import RECIPES

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
DENSE = ATTENTION | {"gate_proj", "up_proj", "down_proj"}
# The class, what it has of its own, and what LoRA adapts.
ARCHITECTURES = {
    "Llama-3.1-70B-Instruct": (small, "Llama", {}, DENSE),
    "Qwen3-30B-A3B-Instruct": (small, "Qwen3Moe", {}, ATTENTION),
}
PATHS = sorted(path for name in ARCHITECTURES for path in (RECIPES / name).glob("*/*.yaml"))


@pytest.mark.parametrize(
    "path",
    these_first(PATHS, *PATHS[::4]),
    ids=lambda path: f"{path.parents[1].name}/{path.parent.name}",
)
def test_it_trains_a_tiny_model_of_its_architecture(path, tmp_path, monkeypatch, called, capsys):
    kind, name, own, adapted = ARCHITECTURES[path.parents[1].name]
    monkeypatch.setattr(first, "make_plan", lambda run: None)  # tests/tools/planning plans such models
    tokenizer = character_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    build(kind(name, **own, **ids, max_position_embeddings=256)).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    # What the machine decides; everything else is the recipe's.
    called(
        "grpo",
        f"""--config {path} --model_name_or_path base --dataset data.jsonl --held_out 10
        --output_dir out --use_cpu true --bf16 false --dtype float32 --max_steps 1 --max_completion_length 3
        --use_vllm false --skip_accuracy true --save_strategy no --report_to none --disable_tqdm true""",
    )
    (step,) = [row for row in json.loads((tmp_path / "out" / "metrics.json").read_text())["history"] if "loss" in row]
    assert step["step"] == 1
    assert "prefix sharing: auto" in capsys.readouterr().out
    weights = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].split(".")[-1] for name in weights} == adapted
    assert not any(part in name for name in weights for part in ("visual", "vision"))
