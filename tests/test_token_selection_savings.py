"""`benchmarks/token_selection_savings.py` in small: every figure is there, the LM head's time among them."""

import json
import sys

import pytest
import torch

from tests.benchmark_modules import benchmark
from trl_fsdp_qlora.scoring import logprobs


@pytest.fixture
def savings(tmp_path, monkeypatch):
    module = benchmark("token_selection_savings")
    for name, value in {"PROMPT": 4, "COMPLETION": 12, "GROUP": 2, "RESULTS": tmp_path}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(logprobs, "score_positions", logprobs.score_positions)  # put back afterwards
    given = "--runs 2 --threads 1 --shape tiny --vocabulary 64 --output small"
    monkeypatch.setattr(sys, "argv", ["token_selection_savings.py", *given.split()])
    return module


def rows_of(folder) -> dict[str, dict]:
    return {row["variant"]: row for row in json.loads((folder / "small.json").read_text())["rows"]}


def test_every_variant_has_its_figures(savings, tmp_path):
    savings.main()
    rows = rows_of(tmp_path)
    assert list(rows) == list(savings.VARIANTS)
    for row in rows.values():
        assert 0 < row["head_seconds"] < row["seconds"] and row["bytes"] > 0
        assert row["ratios"].keys() == {"seconds", "head_seconds", "bytes"}
    assert rows["s_grpo 30%"]["scored_share"] < rows["all tokens"]["scored_share"] == 1


def test_out_of_memory_is_a_row_and_runs_are_written_one_by_one(savings, tmp_path, monkeypatch, capsys):
    """The second run of "two groups" does not fit any more: its row says so, and the one compared with it has no ratios."""
    steps, on_disk, real = [], [], savings.step

    def step(trainer, batch, device):
        steps.append(len(batch["prompt_ids"]))
        on_disk.append((tmp_path / "small.json").is_file())
        if steps.count(4) == 5:  # two such variants in the warm-up and in the first run
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200.00 GiB.\nmore lines")
        return real(trainer, batch, device)

    monkeypatch.setattr(savings, "step", step)
    savings.main()
    variants = len(savings.VARIANTS)
    assert on_disk == [False] * 2 * variants + [True] * variants, "what a killed call would have left"
    rows = rows_of(tmp_path)
    assert rows["two groups"] == {"variant": "two groups", "out_of_memory": True}
    skipped = rows["two groups, one with zero advantage skipped"]
    assert skipped["seconds"] > 0 and skipped["ratios"] == {}
    assert rows["s_grpo 30%"]["ratios"]["bytes"] > 0
    said = capsys.readouterr().out
    assert "two groups: out of memory: CUDA out of memory" in said and "| two groups | out of memory |" in said
