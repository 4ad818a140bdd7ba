"""The choice of when weights are gathered, in one process; test_trainer.py gathers on several ranks."""

import pytest
import torch
from torch import nn

from trl_fsdp_qlora.fsdp2_qlora import generation


@pytest.mark.parametrize("mode", ["auto", "once"])
def test_another_release_of_torch_gathers_by_layer(mode, monkeypatch):
    monkeypatch.setattr(generation, "misfit", lambda: "torch 9.9 has no FSDPState._lazy_init")
    assert generation.choose(nn.Linear(2, 2), torch.device("cpu"), mode) == "per_layer"


def test_an_unsharded_model_is_not_asked_for_its_free_memory(monkeypatch):
    monkeypatch.setattr(generation, "choose", lambda *_: pytest.fail("every rank would have to answer"))
    with generation.gathered_as("auto", nn.Linear(2, 2), torch.device("cpu")):
        pass
