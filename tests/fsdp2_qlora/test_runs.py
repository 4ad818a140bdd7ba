"""One scenario runs alone and fails alone: runs.py, with launches that only write what a rank would."""

import pytest
import torch

from tests.fsdp2_qlora import runs
from tests.fsdp2_qlora.runs import Run


@pytest.fixture
def launched(monkeypatch):
    """The labels of each launch; a scenario called `breaks` ends it on the second rank, as an exception does."""
    seen = []

    def launch(_worker, _model, folder, *specifications, processes=2, **_more):
        seen.append([text.partition("=")[0] for text in specifications])
        for rank in range(processes):
            results = {}
            for label, _, scenario in (text.partition("=") for text in specifications):
                if scenario == "breaks" and rank == 1:
                    break
                results[label] = {"rank": rank, "scenario": scenario}
                torch.save(results, folder / f"rank{rank}.pt")
                if scenario == "breaks":
                    break
        return [(0, ""), (1, "KeyError: 'no'")]

    monkeypatch.setattr(runs, "launch", launch)
    return seen


def test_all_share_a_launch(launched, tmp_path):
    run = Run("model", tmp_path / "two", {"a": "sft", "b": "grpo:beta=0.1"})
    assert run.rank(1)["b"] == {"rank": 1, "scenario": "grpo:beta=0.1"}
    assert [found["rank"] for found in run.rank(0).values()] == [0, 0]
    assert launched == [["a", "b"]]
    with pytest.raises(KeyError):
        run.rank(0)["c"]


def test_one_that_fails_fails_alone(launched, tmp_path):
    run = Run("model", tmp_path / "two", {"a": "sft", "b": "breaks", "c": "sft", "d": "sft"})
    assert run.rank(1)["d"]["rank"] == 1 and run.rank(0)["a"]["rank"] == 0
    with pytest.raises(pytest.fail.Exception, match=r"b=breaks: failed\n(.*\n)*KeyError: 'no'"):
        run.rank(0)["b"]
    assert launched == [["a", "b", "c", "d"], ["c", "d"]]


def test_one_that_is_asked_for_runs_alone_after_what_it_reads(launched, tmp_path):
    one = Run("model", tmp_path / "one", {"sft": "sft", "more": "sft"}, alone=True)
    two = Run("model", tmp_path / "two", {"resumed": "sft", "sft": "sft"}, alone=True)
    two.needs = {"resumed": [(one, "sft"), (two, "sft")]}
    assert two.rank(0)["resumed"]["rank"] == 0
    assert launched == [["sft"], ["sft"], ["resumed"]]
