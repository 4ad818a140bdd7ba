"""Sleeping between rollouts, through TRL's own `generate`, with an engine that records what it is asked: no device
here.
"""

import pytest
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from tests import tiny
from trl_fsdp_qlora.vllm.adapter_sync import AdapterVersions
from trl_fsdp_qlora.vllm.engine import AdapterEngine

pytestmark = pytest.mark.vllm


class Recorded:
    """Stands for `vllm.LLM` 0.31 and its engine."""

    def __init__(self, **options):
        self.options = options
        self.calls = []
        self.llm_engine = self

    def __getattr__(self, name):
        def asked(*positional, **named):
            positional = [getattr(value, "lora_int_id", value) for value in (*positional, *named.values())]
            self.calls.append(" ".join(map(str, [name, *positional])))
            return True

        return asked

    def generate(self, prompts, lora_request, **_options):
        self.calls.append(f"generate with {lora_request.lora_int_id}")
        return []


def test_the_cache_goes_and_the_weights_stay(tmp_path, monkeypatch):
    """Steps as the trainer makes them: a sync, a rollout; then a rollout without a sync."""
    import vllm

    monkeypatch.setattr(vllm, "LLM", Recorded)
    policy = get_peft_model(tiny.tiny_model(), LoraConfig(r=4, target_modules="all-linear"))
    adapter = {
        "max_lora_rank": 8,
        "base": "base",
        "model": policy,
        "versions": AdapterVersions("sleeps", tmp_path),
        "engine_kwargs": {"max_num_batched_tokens": 8192},
    }
    ours = {"accelerator": Accelerator(cpu=True), "processing_class": None, "mode": "colocate"}
    engine = AdapterEngine(max_model_length=64, enable_sleep_mode=True, **adapter, **ours)
    llm = engine.llm._llm
    # Level 0, since level 2 would throw the base away.
    asleep = ["sleep 0", "release_kv_cache_memory"]
    assert llm.options["enable_sleep_mode"] is True and llm.options["max_num_batched_tokens"] == 8192
    assert llm.calls == asleep
    for version in (1, 2):
        llm.calls.clear()
        engine.sync_weights()
        assert engine.generate([[1, 2]], None, 1)[1] == []
        loads = ["add_lora 1"] if version == 1 else ["add_lora 2", "remove_lora 1"]
        assert llm.calls == [*loads, "wake_up ['kv_cache']", f"generate with {version}", *asleep]
    llm.calls.clear()
    engine.generate([[1, 2]], None, 1)  # nothing is sent again: the weights never went
    assert llm.calls == ["wake_up ['kv_cache']", "generate with 2", *asleep]
