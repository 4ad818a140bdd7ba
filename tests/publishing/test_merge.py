"""An adapter merged into its base gives what PEFT gives unmerged."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import lora, save_tiny_model
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.publishing.merge import merge_adapter

SCRIPT = Path(__file__).parents[2] / "recipes" / "merge.py"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    root = tmp_path_factory.mktemp("merge")
    base = save_tiny_model(root / "base")
    torch.manual_seed(1)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora()).save_pretrained(root / "adapter")
    return root / "adapter"


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 15).repeat(2, 1)).logits.float()


def test_merged_logits_are_those_of_peft(adapter, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base", dtype=torch.float32)
    plain = logits(base)
    unmerged = logits(PeftModel.from_pretrained(base, adapter))
    folder = merge_adapter(adapter, tmp_path / "merged", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert merged.dtype == torch.float32 and not hasattr(merged, "peft_config")
    assert (logits(merged) - unmerged).abs().max() <= 1e-6
    assert (plain - unmerged).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(folder)("1+2=")["input_ids"]
    assert ModelCard.load(folder / "README.md").data.base_model == "base"


def test_bfloat16_rounds_the_sum_and_nothing_else(adapter, tmp_path):
    folder = merge_adapter(adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    base = AutoModelForCausalLM.from_pretrained(adapter.parent / "base", dtype=torch.bfloat16).state_dict()
    factors = load_file(adapter / "adapter_model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    delta, weight = b @ a * 2, base[f"{name}.weight"].float()  # lora_alpha / r = 2
    assert merged[f"{name}.weight"].dtype == torch.bfloat16
    # The adapter's share and the sum are rounded, each to 2^-8 of it.
    error = (merged[f"{name}.weight"].float() - weight - delta).abs()
    assert (error <= 2**-7 * (weight.abs() + delta.abs())).all() and error.max() > 0
    assert delta.abs().max() > 0.1 * weight.abs().max()


def test_what_cannot_be_merged_is_told(adapter, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there exists"):
        merge_adapter(adapter, tmp_path / "there")
    quantized = tmp_path / "quantized"
    quantized.mkdir()
    config = json.loads((adapter.parent / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is quantized"):
        merge_adapter(adapter, tmp_path / "merged", base=str(quantized))


def test_an_interrupted_merge_leaves_no_folder(adapter, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_adapter(adapter, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


def test_the_script(adapter, tmp_path, monkeypatch, capsys):
    out = tmp_path / "merged"
    monkeypatch.setattr(
        sys, "argv", ["merge.py", "--adapter", str(adapter), "--output", str(out), "--dtype", "float32"]
    )
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert (out / "model.safetensors").is_file() and str(out) in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert f"error: {out} exists" in capsys.readouterr().err
