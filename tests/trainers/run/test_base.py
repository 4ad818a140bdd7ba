"""A model is recognised by its files: under another name, with other weights under its name, from another folder."""

import json
import shutil

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.trainers.run.base import find_base, fingerprint

WEIGHTS = "model.safetensors"


@pytest.fixture
def base(tmp_path):
    save_tiny_model(tmp_path / "base")
    return tmp_path / "base"


def test_the_same_files_under_another_name_are_the_same_model(base, tmp_path):
    known = fingerprint(base)
    assert len(known) == 16
    shutil.copytree(base, tmp_path / "other name")
    assert fingerprint(tmp_path / "other name") == fingerprint(f"{base}/") == known
    # What lies beside a model, and what saving it again changes, is not the model.
    (base / "training_args.bin").write_bytes(b"x")
    (base / "adapter_model.safetensors").write_bytes(b"x")
    (base / "README.md").write_text("read me")
    assert fingerprint(base) == known
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "saved again")
    assert fingerprint(tmp_path / "saved again") == known


def other_weights(folder):
    save_tiny_model(folder, seed=1)


def one_layer_trained(folder):
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def rounded(folder):
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


def in_two_files(folder):
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")


def another_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


@pytest.mark.parametrize("change", [other_weights, one_layer_trained, rounded, in_two_files, another_config])
def test_other_files_under_the_same_name_are_another_model(base, change):
    known = fingerprint(base)
    change(base)
    assert fingerprint(base) not in (known, None)


def test_a_model_of_the_hub_is_the_folder_that_was_copied_from_it(base, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--owner--name"
    shutil.copytree(base, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    assert fingerprint("owner/name") == fingerprint("owner/name", "abc") == fingerprint(base)
    assert fingerprint("owner/name", "def") is None


@pytest.mark.parametrize("name", ["", "owner/elsewhere", "no/such/folder", "/no/such folder"])
def test_what_is_not_here_has_none(name):
    assert fingerprint(name) is None


def test_what_is_no_model_has_none(base):
    (base / "config.json").write_text("[]")
    assert fingerprint(base) is None
    (base / "config.json").write_text("{")
    assert fingerprint(base) is None
    (base / "config.json").unlink()
    assert fingerprint(base) is None


def test_a_relative_base_counts_from_the_adapters_folder_too(base, tmp_path, monkeypatch):
    """The path was typed in `tmp_path`, next to the base, and later commands run elsewhere."""
    adapter = tmp_path / "runs" / "adapter"
    adapter.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("base", "./base", "base/"):
        monkeypatch.chdir(tmp_path)
        assert find_base(name, "runs/adapter") == name
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert find_base(name, adapter) == find_base(name, "../runs/adapter") == str(base)
    assert find_base("../../base", adapter) == str(base)
    # A name on the Hub, a folder that is nowhere, and an adapter on the Hub stay as they are.
    assert find_base("owner/base", adapter) == "owner/base"
    assert find_base(str(tmp_path / "gone"), adapter) == str(tmp_path / "gone")
    assert find_base("base", "owner/adapter") == "base"
