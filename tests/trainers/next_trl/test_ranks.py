"""The first step's comparison on two gloo ranks, by DDP and by FSDP2 with a 4-bit base, in micro-batches."""

import pytest

pytest.importorskip("bitsandbytes")

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import difference
from tests.tiny import these_first
from tests.trainers.dpo.test_ranks import runs

WORKER = "tests/trainers/next_trl/ranks_worker.py"
pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """One process: stock's RLOO, and ours in 4 bits, which stock cannot shard; neither compares its first step."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    return runs(model, folder, "ddp=stock_rloo", "fsdp2=rloo:4bit", processes=1)[0]


@pytest.mark.parametrize("wrapper, bits", these_first([("ddp", ""), ("fsdp2", ":4bit")], ("fsdp2", ":4bit")))
def test_ranks_compare_their_first_step_together(alone, model, tmp_path, wrapper, bits):
    """If one rank finds a difference, both continue as stock; whatever they find, they train what one process does."""
    environment = fsdp_environment() if wrapper == "fsdp2" else None
    scenarios = (f"right=-1{bits}", f"wrong=1{bits}")
    ranks = runs(model, tmp_path / wrapper, *scenarios, environment=environment, worker=WORKER)
    for rank in ranks:
        assert rank["right"]["reasons"] == [None] and rank["right"]["shared"] and not rank["right"]["said"]
        assert len(rank["wrong"]["reasons"]) == 1 and not rank["wrong"]["shared"]
        assert rank["right"]["dtensors"] == rank["wrong"]["dtensors"] == (wrapper == "fsdp2")
    (line,) = ranks[0]["wrong"]["said"] + ranks[1]["wrong"]["said"]
    assert "pip install" in line
    assert ranks[1]["wrong"]["reasons"] != [None]
    for label in ("right", "wrong"):
        assert ranks[0][label]["loss"] == pytest.approx(alone[wrapper]["loss"], rel=1e-4, abs=1e-5), label
        assert difference(ranks[0][label]["adapter"], alone[wrapper]["adapter"]) < 1e-5, label
