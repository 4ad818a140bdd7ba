"""DPO and RLOO on two gloo ranks, by DDP and FSDP2, whole and in 4 bits: the adapter is that of one process, stock's where it can be."""

import pytest
import torch

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import difference

WORKER = "tests/dpo/ranks_worker.py"
SCENARIOS = {"dpo": "dpo=dpo", "rloo": "rloo=rloo", "dpo4": "dpo4=dpo:4bit", "rloo4": "rloo4=rloo:4bit"}
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def runs(model, folder, *scenarios, processes=2, environment=None):
    folder.mkdir()
    launch(WORKER, model, folder, *scenarios, processes=processes, environment=environment, timeout=500)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """One process: stock's trainers on the whole base, ours in 4 bits."""
    scenarios = ("dpo=stock_dpo", "rloo=stock_rloo", "dpo4=dpo:4bit", "rloo4=rloo:4bit")
    return runs(model, tmp_path_factory.mktemp("runs") / "one", *scenarios, processes=1)[0]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_train_what_one_process_does(alone, model, tmp_path, wrapper):
    labels = [*SCENARIOS] if wrapper == "fsdp2" else ["dpo", "rloo"]
    environment = fsdp_environment() if wrapper == "fsdp2" else None
    ranks = runs(model, tmp_path / wrapper, *(SCENARIOS[label] for label in labels), environment=environment)
    for label in labels:
        first, second = (rank[label] for rank in ranks)
        assert first["dtensors"] == second["dtensors"] == (wrapper == "fsdp2"), label
        assert first["shared"] and second["shared"] and first["saved"], label
        assert first["loss"] == pytest.approx(alone[label]["loss"], rel=1e-4, abs=1e-5), label
        # Rank 0 has the gathered adapter.
        assert difference(first["adapter"], alone[label]["adapter"]) < 1e-5, label
