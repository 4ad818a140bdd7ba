"""DPO, RLOO and TRL's own KTO and SFT after `share_prompts`, on two gloo ranks, by DDP and FSDP2, whole and in 4 bits.

The adapter is that of one process, and stock's if it can be.
"""

import pytest
import torch

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import difference
from tests.tiny import these_first

WORKER = "tests/trainers/dpo/ranks_worker.py"
SCENARIOS = {"dpo": "dpo=dpo", "rloo": "rloo=rloo", "dpo4": "dpo4=dpo:4bit", "rloo4": "rloo4=rloo:4bit"}
pytestmark = [pytest.mark.processes, pytest.mark.slow]


def runs(model, folder, *scenarios, processes=2, environment=None, worker=WORKER) -> list[dict]:
    """What each rank of a worker found in its scenarios."""
    folder.mkdir()
    launch(worker, model, folder, *scenarios, processes=processes, environment=environment, timeout=500)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(processes)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """One process: stock's trainers on the whole base, ours in 4 bits."""
    scenarios = ("dpo=stock_dpo", "rloo=stock_rloo", "dpo4=dpo:4bit", "rloo4=rloo:4bit")
    return runs(model, tmp_path_factory.mktemp("runs") / "one", *scenarios, processes=1)[0]


@pytest.fixture(scope="module")
def stock(model, tmp_path_factory):
    """One process of stock's KTO and SFT."""
    scenarios = ("kto=stock_kto", "sft=stock_sft", "kto4=stock_kto:4bit", "sft4=stock_sft:4bit")
    return runs(model, tmp_path_factory.mktemp("runs") / "stock", *scenarios, processes=1)[0]


@pytest.mark.parametrize("wrapper", these_first(["ddp", "fsdp2"], "fsdp2"))
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_trls_own_kto_and_sft_share_prompts_on_two_ranks(stock, model, tmp_path, wrapper):
    scenarios = ("kto=kto", "sft=sft", "kto4=kto:4bit", "sft4=sft:4bit")
    environment = fsdp_environment() if wrapper == "fsdp2" else None
    ranks = runs(model, tmp_path / wrapper, *scenarios, environment=environment)
    for label, reference in stock.items():
        for rank in ranks:
            assert rank[label]["dtensors"] == (wrapper == "fsdp2"), label
            assert rank[label]["shared"], label
            largest = max(gradient.abs().max() for gradient in reference["gradients"].values())
            assert difference(rank[label]["gradients"], reference["gradients"]) <= 2e-5 * largest, label
        assert ranks[0][label]["loss"] == pytest.approx(reference["loss"], rel=1e-4, abs=1e-5), label
        assert difference(ranks[0][label]["adapter"], reference["adapter"]) < 1e-5, label
