"""The client of a vLLM server, and what `rollout_sync: auto` takes for it, against recorded answers."""

import pytest
import torch
from peft import LoraConfig
from trl.generation import vllm_client

from tests import tiny
from tests.vllm.serve import WRONG_STARTS, RecordedServer
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.grpo.arguments import checked_arguments
from trl_fsdp_qlora.rollout.adapter_sync import RolloutError
from trl_fsdp_qlora.rollout.engine import AdapterServer


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    """TRL's client needs vLLM for what an adapter does not use."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)


def client(url: str) -> AdapterServer:
    return AdapterServer(url, patience=0.2, max_lora_rank=8)


def test_a_server_that_is_right():
    with RecordedServer() as running:
        found = client(running.url)
        assert (found.base, found.folder) == ("base", "/base")
        assert found.generate([[5, 6]], logprobs=None)["completion_ids"] == [[7]]


@pytest.mark.parametrize("wrong, named", WRONG_STARTS)
def test_a_server_that_was_started_wrong(wrong, named):
    with RecordedServer(**wrong) as running, pytest.raises(RolloutError, match=named):
        client(running.url)


def test_a_server_that_takes_no_adapters_at_run_time():
    with RecordedServer() as running:
        found = client(running.url)
        with pytest.raises(RolloutError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
            found.load_adapter("policy-v1", "/folder")
        assert found.model == "base"  # what was not loaded is not asked for


def test_a_folder_that_the_server_does_not_see(tmp_path):
    refused = pytest.raises(RolloutError, match="vllm_adapter_dir")
    with RecordedServer(other={"/v1/load_lora_adapter": 500}) as running, refused:
        client(running.url).load_adapter("policy-v1", str(tmp_path))


def chosen(folder, url: str, **changes):
    server = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_server_timeout": 0.2}
    config = tiny.config(EfficientGRPOConfig, folder, use_vllm=True, **server, **changes)
    call = {"model": tiny.tiny_model(), "args": config, "peft_config": LoraConfig(r=4)}
    return checked_arguments(call)[1]


@pytest.mark.parametrize(
    "started, mode, reason",
    [
        ({}, "adapter", "server"),
        ({"max_lora_rank": None}, "merge", "without --enable-lora"),
        ({"weight_transfer": True}, "merge", "--weight-transfer-config"),
    ],
)
def test_a_server_that_trl_accepts_is_taken_as_it_was_started(tmp_path, monkeypatch, started, mode, reason):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with RecordedServer(**started) as running:
        found = chosen(tmp_path, running.url)
        assert found.mode == mode and reason in found.reason
        asked = len(running.asked)
        assert chosen(tmp_path, running.url, rollout_sync="adapter").mode == "adapter"
        assert len(running.asked) == asked  # nothing to ask: the trainer's own client does
