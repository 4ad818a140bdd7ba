"""TRL's vLLM code where it differs, further arguments of its engine, and an engine that outlives its process
groups.
"""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from trl_fsdp_qlora.compat.trl import MissingName
from trl_fsdp_qlora.compat.vllm import skip_destroyed_groups, trl_starts


class Client:
    """As vLLM's `InprocClient`: what shuts its engine down is called when it is collected."""

    def __init__(self, shut_down):
        self._finalizer = weakref.finalize(self, shut_down)


@pytest.mark.parametrize("groups", [True, False])
def test_shuts_down_while_there_are_groups(monkeypatch, groups):
    calls = []
    clients = [Client(lambda: calls.append("shut down")), Client(lambda: calls.append("again")), None]
    for client in clients:  # the last engine has none
        skip_destroyed_groups(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client)))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: groups)
    clients[1]._finalizer.detach()  # shut down by hand
    del client, clients
    gc.collect()
    assert calls == ["shut down"] * groups


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_trainer_is_imported_without_trls_vllm_code():
    script = """
import sys
import trl.trainer.grpo_trainer
sys.modules["trl.experimental.async_grpo"] = None
for name in ("trl.generation.vllm_client", "trl.generation.vllm_generation"):
    sys.modules[name] = None
from trl_fsdp_qlora import AStarPOTrainer, EfficientGRPOTrainer, TSPMOTrainer
"""
    subprocess.run([sys.executable, "-c", script], check=True)


STARTED = []


def LLM(**options):
    STARTED.append(options)


class Own:
    """TRL's engine, which starts vLLM with its own arguments."""

    def __init__(self, model, accelerator, mode):
        self.model = model
        self._init_vllm()

    def _init_vllm(self):
        LLM(model=self.model, quantization=None)


def test_further_arguments_reach_trls_own_engine(monkeypatch):
    from trl.generation import vllm_generation
    from trl.trainer import grpo_trainer

    STARTED.clear()
    monkeypatch.setattr(vllm_generation, "LLM", LLM, raising=False)
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Own)
    with trl_starts(None, lambda model, accelerator: {"quantization": f"{model} on {accelerator}"}):
        assert isinstance(grpo_trainer.VLLMGeneration(model="base", accelerator="gpu", mode="colocate"), Own)
    with trl_starts(dict, None):
        assert grpo_trainer.VLLMGeneration(mode="colocate") == {"mode": "colocate"}
    assert grpo_trainer.VLLMGeneration is Own
    Own("base", "gpu", "colocate")
    expected = [{"model": "base", "quantization": "base on gpu"}, {"model": "base", "quantization": None}]
    assert expected == STARTED


def test_an_engine_that_makes_no_llm_itself_starts_without_further_arguments(monkeypatch):
    """A later TRL may start vLLM elsewhere: an error only if an argument would not reach it."""
    from trl.trainer import grpo_trainer

    class Elsewhere(Own):
        def _init_vllm(self):
            STARTED.append(self.model)

    PartialState()  # there is one before a trainer starts an engine
    STARTED.clear()
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", Elsewhere)
    with trl_starts(None, lambda model, accelerator: {"dtype": "float32"}):  # always there
        grpo_trainer.VLLMGeneration(model="base", accelerator="gpu", mode="colocate")
    with trl_starts(None, lambda model, accelerator: {"dtype": "float32", "max_num_seqs": 8}):
        grpo_trainer.VLLMGeneration(model="base", accelerator="gpu", mode="server")
        with pytest.raises(MissingName):
            grpo_trainer.VLLMGeneration(model="base", accelerator="gpu", mode="colocate")
    assert STARTED == ["base", "base"]
