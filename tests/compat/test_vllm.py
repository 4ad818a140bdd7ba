"""An engine in this process that is collected after its process groups are gone."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from trl_fsdp_qlora.compat.vllm import leave_groups_that_are_gone


class Client:
    """As vLLM's `InprocClient`: what shuts its engine down is called when it is collected."""

    def __init__(self, shut_down):
        self._finalizer = weakref.finalize(self, shut_down)

    def shutdown(self):
        if self._finalizer.detach() is not None:
            self.shut_down_by_hand = True


@pytest.mark.parametrize("groups", [True, False])
def test_shuts_down_while_there_are_groups(monkeypatch, groups):
    calls = []
    client = Client(lambda: calls.append("shut down"))
    leave_groups_that_are_gone(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client)))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: groups)
    del client
    gc.collect()
    assert calls == ["shut down"] * groups


def test_by_hand_and_without_a_finalizer():
    client = Client(lambda: None)
    leave_groups_that_are_gone(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client)))
    client.shutdown()
    assert client.shut_down_by_hand
    leave_groups_that_are_gone(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=None)))
