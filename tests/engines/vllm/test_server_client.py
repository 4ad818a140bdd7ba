"""The client of a vLLM server, and what `rollout_sync: auto` takes for it, against recorded answers."""

import pytest
import torch
from peft import LoraConfig
from trl.generation import vllm_client

from tests import tiny
from tests.engines.vllm.serve import RecordedServer
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.engines.vllm.adapter_sync import RolloutError
from trl_fsdp_qlora.engines.vllm.engine import AdapterServer
from trl_fsdp_qlora.engines.vllm.sync_choice import choose_sync


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    """TRL's client needs vLLM for what an adapter does not use."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)


def client(url: str) -> AdapterServer:
    return AdapterServer(url, timeout=0.2, max_lora_rank=8)


def test_a_server_that_is_right_and_two_that_were_started_wrong():
    with RecordedServer() as running:
        connected = client(running.url)
        assert (connected.base, connected.folder) == ("base", "/base")
        assert connected.generate([[5, 6]], logprobs=None)["completion_ids"] == [[7]]
    for rank, named in ((None, "--enable-lora"), (4, "--max-lora-rank 8")):
        with RecordedServer(max_lora_rank=rank) as running, pytest.raises(RolloutError, match=named):
            client(running.url)


@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_does_not_take_an_adapter(status):
    """It takes none at run time, or does not see the folder: the server's own reason, at once, and what to change."""
    named = rf"\({status}\): .*Not Found.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True.*/folder \(vllm_adapter_dir\)"
    with RecordedServer(other={"/v1/load_lora_adapter": status}) as running, pytest.raises(RolloutError, match=named):
        client(running.url).ask("load_lora_adapter", {"lora_name": "policy-v1", "lora_path": "/folder"})


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
        server = {"vllm_mode": "server", "vllm_server_base_url": running.url, "vllm_server_timeout": 0.2}

        def chosen(**changes):
            config = tiny.config(EfficientGRPOConfig, tmp_path, use_vllm=True, **server, **changes)
            return choose_sync(config, LoraConfig(r=4), quantized=False, ask=True, model=tiny.tiny_model())

        engine = chosen()
        assert engine.mode == mode and reason in engine.reason
        asked = len(running.asked)
        assert chosen(rollout_sync="adapter").mode == "adapter"
        assert len(running.asked) == asked  # nothing to ask: the trainer's own client does
