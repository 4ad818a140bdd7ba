"""Sleeping between rollouts, through TRL's own `generate`, with an engine that records what it is asked: no device here."""

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from tests import tiny
from trl_fsdp_qlora.rollout.adapter_sync import AdapterVersions
from trl_fsdp_qlora.rollout.engine import AdapterEngine


class Recorded:
    """Stands for `vllm.LLM` 0.31: frees its cache and its weights when it is told to."""

    def __init__(self, **options):
        self.options, self.calls = options, []
        self.has_cache = self.has_weights = True
        self.llm_engine = self

    def add_lora(self, request):
        self.calls.append(f"add {request.lora_int_id}")
        return True

    def remove_lora(self, version):
        self.calls.append(f"remove {version}")

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.has_weights = self.has_weights and level < 2

    def release_kv_cache_memory(self):
        self.calls.append("release cache")
        self.has_cache = False

    def wake_up(self, tags):
        self.calls.append(f"wake {tags}")
        self.has_cache = self.has_cache or "kv_cache" in tags

    def generate(self, prompts, lora_request, **_options):
        assert self.has_cache and self.has_weights
        self.calls.append(f"generate with {lora_request.lora_int_id}")
        return []


@pytest.fixture
def engine(tmp_path, monkeypatch):
    import vllm

    def make():
        monkeypatch.setattr(vllm, "LLM", Recorded)
        torch.manual_seed(0)
        policy = get_peft_model(tiny.tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
        adapter = {"peft_config": policy.peft_config["default"], "max_lora_rank": 8, "base": "base", "model": policy}
        adapter |= {"versions": AdapterVersions("sleeps", tmp_path), "engine_kwargs": {"max_num_batched_tokens": 8192}}
        ours = {"accelerator": Accelerator(cpu=True), "processing_class": None, "mode": "colocate"}
        return AdapterEngine(max_model_length=64, enable_sleep_mode=True, **adapter, **ours)

    return make


def test_the_cache_goes_and_the_weights_stay(engine):
    """Steps as the trainer makes them: a sync, a rollout; then a rollout without a sync."""
    made = engine()
    llm = made.llm._llm
    assert llm.options["enable_sleep_mode"] is True and llm.options["max_num_batched_tokens"] == 8192
    assert llm.calls == ["sleep 0", "release cache"] and not llm.has_cache
    for version in (1, 2):
        llm.calls.clear()
        made.sync_weights()
        assert made.generate([[1, 2]], None, 1)[1] == []
        loads = ["add 1"] if version == 1 else ["add 2", "remove 1"]
        asleep = ["sleep 0", "release cache"]
        assert llm.calls == [*loads, "wake ['kv_cache']", f"generate with {version}", *asleep]
        assert not llm.has_cache and llm.has_weights
    llm.calls.clear()
    made.generate([[1, 2]], None, 1)  # nothing is sent again: the weights never went
    assert llm.calls == ["wake ['kv_cache']", "generate with 2", "sleep 0", "release cache"]
