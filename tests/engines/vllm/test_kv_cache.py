"""Sleeping between rollouts, through TRL's own `generate`, with an engine that records what it is asked: no device
here.
"""

from functools import partial

import pytest
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

from tests import tiny
from tests.engines.vllm.runs import figures, grpo
from tests.experimental.one_base.test_shared_base import DIFFERENCE, args, drawn_logps
from trl_fsdp_qlora.engines.vllm.adapter_sync import AdapterVersions
from trl_fsdp_qlora.engines.vllm.engine import AdapterEngine, why_not_shared
from trl_fsdp_qlora.trainers.experimental_fields import experiment

ONE_BASE = partial(experiment, "vllm_share_base")
pytestmark = pytest.mark.vllm


class Recorded:
    """In place of `vllm.LLM` 0.31 and its engine."""

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
    from trl.generation import vllm_generation
    from vllm.platforms import current_platform

    monkeypatch.setattr(vllm_generation, "LLM", Recorded)
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: True)
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
    asleep = ["step", "sleep 0", "release_kv_cache_memory"]
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


def test_shared_weights_stay_at_every_level_of_sleep(base, tmp_path, monkeypatch, caplog):
    """Asked of a real vLLM, whose CPU engine cannot sleep: what it would free is the cache alone.

    A run with `vllm_enable_sleep_mode` continues there, with a line.
    """
    trainer = grpo(base, tmp_path, vllm_share_base="on", vllm_enable_sleep_mode=True, max_steps=2)
    assert "vllm_enable_sleep_mode" in caplog.text
    trainer.train()
    assert max(figures(trainer, DIFFERENCE)) < 1e-5
    llm = trainer.vllm_generation.llm
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    asked = []
    for name in ("sleep", "discard", "wake_up"):
        monkeypatch.setattr(worker, name, lambda tags, name=name: asked.append((name, list(tags))))
    shared = trainer.vllm_generation.shared_base
    addresses = {name: parameter.data_ptr() for name, parameter in shared.parameters.items()}
    tokens, logps = drawn_logps(llm, list(range(5, 15)))
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up(tags=["kv_cache"])
        assert asked == [("discard", ["kv_cache"]), ("wake_up", ["kv_cache"])]
        asked.clear()
        shared.check()
        assert {name: parameter.data_ptr() for name, parameter in shared.parameters.items()} == addresses
        trainer.vllm_generation.sync_weights()
    assert addresses and llm.adapter is not None and len(tokens) == len(logps) == 20


def test_a_vllm_that_moves_its_weights_shares_nothing(monkeypatch):
    """As before 0.31; with `auto` that is a line."""
    import vllm

    model = tiny.tiny_model()
    accelerator = Accelerator(cpu=True)
    settings = {"vllm_engine_kwargs": {"dtype": "float32"}}
    assert why_not_shared(args(vllm_enable_sleep_mode=True, **settings), model, accelerator, ONE_BASE) is None
    monkeypatch.delattr(vllm.LLM, "release_kv_cache_memory")
    assert why_not_shared(args(vllm_enable_sleep_mode=False, **settings), model, accelerator, ONE_BASE) is None
    reason = why_not_shared(args(vllm_enable_sleep_mode=True, **settings), model, accelerator, ONE_BASE)
    assert "set vllm_enable_sleep_mode: false" in reason
