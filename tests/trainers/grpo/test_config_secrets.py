"""Covers `trainers/grpo/config.py`."""

import copy
import io
import json
import pickle

import pytest
import torch
from transformers import PreTrainedModel
from trl import GRPOConfig

from tests.tiny import config, lora, save_tiny_model, trainer
from trl_fsdp_qlora import AStarPOConfig, EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig

TOKEN = "hf_" + "aB3" * 11
PASSWORD = "passw0rd"


@pytest.mark.parametrize("cls", [EfficientGRPOConfig, TSPMOConfig, AStarPOConfig])
def test_a_secret_stays_in_memory(cls, tmp_path):
    url = f"http://bob:{PASSWORD}@judge:8000"
    file = io.BytesIO()
    inside = {
        "model_init_kwargs": {"token": TOKEN},
        "vllm_engine_kwargs": json.dumps({"hf_token": TOKEN, "quantization": "fp8"}),
    }
    settings = {"vllm_server_base_url": url, "num_generations": 4, "max_steps": 5, **inside}
    args = config(cls, tmp_path, hub_token=TOKEN, **settings)
    torch.save(args, file)
    written = [str(args.to_dict()), args.to_json_string(), str(args.to_sanitized_dict()), repr(args), str(args)]
    for text in (*written, str(file.getvalue())):
        assert TOKEN not in text and PASSWORD not in text and "judge" in text
    assert args.hub_token == args.model_init_kwargs["token"] == args.vllm_engine_kwargs["hf_token"] == TOKEN
    loaded = pickle.loads(pickle.dumps(args))
    assert type(loaded) is cls and loaded.hub_token is None
    assert loaded.max_steps == 5 and loaded.learning_rate == args.learning_rate
    # A copy within the process is one: it can still push.
    for twin in (copy.copy(args), copy.deepcopy(args)):
        assert vars(twin).keys() == vars(args).keys()
        assert (twin.hub_token, twin.vllm_server_base_url) == (TOKEN, url)


def test_a_plain_config_of_trl_leaves_no_token_either(tmp_path):
    arguments = config(GRPOConfig, tmp_path, hub_token=TOKEN, save_strategy="steps", save_steps=1, max_steps=1)
    grpo = trainer(EfficientGRPOTrainer, lambda **_: arguments, tmp_path, peft_config=lora())
    assert grpo.args.hub_token == arguments.hub_token == TOKEN and type(arguments) is GRPOConfig
    grpo.train()
    assert TOKEN.encode() not in (tmp_path / "checkpoint-1" / "training_args.bin").read_bytes()


def test_a_run_writes_no_token_of_a_dictionary(tmp_path, monkeypatch):
    base = save_tiny_model(tmp_path / "base")
    used = []
    load = PreTrainedModel.from_pretrained.__func__

    def recorded(cls, *arguments, **named):
        used.append(named.get("token"))
        return load(cls, *arguments, **named)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(recorded))
    inside = {"model_init_kwargs": {"token": TOKEN}, "vllm_engine_kwargs": {"hf_token": TOKEN}}
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", base, lora(), **saving, **inside)
    grpo.card_info.command = ["python", "grpo.py", "--model_init_kwargs", json.dumps(inside["model_init_kwargs"])]
    grpo.train()
    grpo.create_model_card()
    assert used == [TOKEN]
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"README.md", "training_args.bin"} <= {path.name for path in files if path.parent.name == "checkpoint-1"}
    assert [path.name for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert "model_init_kwargs" in (tmp_path / "out" / "README.md").read_text()
