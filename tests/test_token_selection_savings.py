"""`benchmarks/token_selection_savings.py` in small: every figure is there, the LM head's time among them."""

import json
import sys

import pytest

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
