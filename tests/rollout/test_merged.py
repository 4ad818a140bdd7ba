"""TRL's own engine, which is sent whole weights, is given up where it hangs, as the one that is sent the adapter."""

import threading
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from trl.generation import vllm_client

from tests.vllm.serve import RecordedServer
from trl_fsdp_qlora.compat.vllm import VLLMClient, VLLMGeneration
from trl_fsdp_qlora.rollout.adapter_sync import RolloutError
from trl_fsdp_qlora.rollout.start import limit_stalls

SECONDS = 0.4


def wait_for_ever(*_):
    threading.Event().wait()


def pass_quickly(*_):
    return None


def pass_slowly(*_):
    threading.Event().wait(SECONDS / 4)


class Stock(VLLMGeneration):
    """TRL's, with what each of its two halves waits for in the place of vLLM."""

    def __init__(self, mode="colocate", step=pass_quickly, pass_on=pass_quickly, client=None):
        self.mode, self.accelerator, self.vllm_client, self.pass_on = mode, Accelerator(cpu=True), client, pass_on
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(step=step, engine_core=None))

    def _iter_named_params(self):
        yield from ((str(i), i) for i in range(8))

    def sync_weights(self):
        for _, weight in self._iter_named_params():
            self.pass_on(weight)

    def generate(self, prompts):
        if self.mode == "server":
            return self.vllm_client.generate(prompts, logprobs=None)
        for _ in range(8):
            self.llm.llm_engine.step()
        return prompts


def limited(*args, seconds=SECONDS, **kwargs):
    engine = Stock(*args, **kwargs)
    limit_stalls(engine, seconds)
    return engine


def test_a_step_that_never_ends():
    with pytest.raises(RolloutError, match=r"did not generate: no step .* for 0\.4 s .*resume_from_checkpoint"):
        limited(step=wait_for_ever).generate([[5]])


def test_a_weight_that_is_never_taken():
    taken = []

    def second_hangs(weight):
        taken.append(weight)
        if weight == 1:
            wait_for_ever()

    with pytest.raises(RolloutError, match=r"did not take the weights: .* for 0\.4 s .*resume_from_checkpoint"):
        limited(pass_on=second_hangs).sync_weights()
    assert taken == [0, 1]


def test_what_goes_on_may_take_longer():
    engine = limited(step=pass_slowly, pass_on=pass_slowly)
    engine.sync_weights()
    assert engine.generate([[5]]) == [[5]]


def test_an_engine_that_dies_is_told_with_what_to_do():
    def dies():
        raise RuntimeError("EngineDeadError")

    with pytest.raises(RolloutError, match=r"could not generate: RuntimeError: EngineDeadError.*resume_from"):
        limited(step=dies).generate([[5]])


def test_no_limit():
    engine = limited(seconds=0, step=pass_quickly)
    assert "generate" not in vars(engine) and "sync_weights" not in vars(engine)


def test_what_is_not_trls_is_left_alone():
    engine = SimpleNamespace()
    limit_stalls(engine, SECONDS)
    assert not vars(engine)


def test_a_server_whose_engine_hangs(monkeypatch, caplog):
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    with RecordedServer(other={"/v1/completions": 0}) as running:
        engine = limited("server", client=VLLMClient(base_url=running.url))
        with pytest.raises(RolloutError, match=r"counted no token for 0\.4 s.*resume_from_checkpoint"):
            engine.generate([[5, 6]])
        assert running.asked.count("/v1/completions") == 1
    assert not caplog.records
    with RecordedServer(other={"/metrics": 404}) as running:
        limited("server", client=VLLMClient(base_url=running.url))
    assert "does not tell how far its engine is" in caplog.text
