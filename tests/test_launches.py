"""`benchmarks/launches.py`: its estimates and tables, and what docs/launches.md says of its results."""

import json
from pathlib import Path

import pytest

from tests.benchmark_modules import BENCHMARKS, benchmark

launches = benchmark("launches")
RESULTS = json.loads((BENCHMARKS / "results" / "launches.json").read_text(encoding="utf-8"))
PAGE = (Path(__file__).resolve().parents[1] / "docs" / "launches.md").read_text(encoding="utf-8")


def counts(number: int, device: float, **changes) -> dict:
    device_seconds = dict.fromkeys(launches.CARDS, device)
    return {
        "launches": number,
        "waits": 2,
        "bytes": 3e9,
        "operations": 4e12,
        "device_seconds": device_seconds,
        **changes,
    }


def test_a_step_takes_as_long_as_the_slower_of_host_and_device():
    assert launches.seconds(counts(10_000, 0.02), "H100 SXM") == pytest.approx(0.05)  # 10,000 times 5 microseconds
    assert launches.seconds(counts(1_000, 0.02), "H100 SXM") == 0.02


def test_the_table_has_what_both_were_counted_for():
    phases = dict.fromkeys(launches.PHASES, counts(1_000, 0.02))
    rows = {"whole": {"stock": {"phases": phases}, "ours": {"phases": phases}}}
    rows["half"] = {"stock": {"phases": phases}, "ours": {"error": "out of time"}}
    lines = launches.table(rows).splitlines()
    assert len(lines) == 2 + len(launches.PHASES) and all(line.count("|") == lines[0].count("|") for line in lines)
    assert "| whole, loss | 1,000 → 1,000 | 2 → 2 | 3 → 3 | 4.0 → 4.0 | 0.02 → 0.02 | 0.02 → 0.02 |" in lines


def test_a_cards_figures_stand_next_to_what_was_counted():
    counted = {"model": {"stock": {"phases": dict.fromkeys(launches.PHASES, counts(1_000, 0.02))}}, "other": {}}
    measured = {"phases": dict.fromkeys(launches.PHASES, counts(1_100, 0.0, seconds=0.5))}
    rows = launches.predicted_and_measured("model, 8.9", "stock", measured, counted, "H100 SXM").splitlines()
    assert len(rows) == len(launches.PHASES)
    expected = "1,000 launches, 2 waits, at least 0.020 s | 1,100 launches, 2 waits, 0.500 s |"
    assert rows[0] == f"| model, 8.9, stock, loss | {expected}"
    # The count for the card's own capability goes before the one for 9.0.
    predicted = {"model, 8.9": {"stock": {"phases": dict.fromkeys(launches.PHASES, counts(7, 0.02))}}}
    assert "| 7 launches" in launches.predicted_and_measured(
        "model, 8.9", "stock", measured, counted | predicted, "H100 SXM"
    )
    failed = launches.predicted_and_measured("model", "ours", {"error": "exit code 1"}, counted, "H100 SXM")
    assert failed == "| model, ours | | exit code 1 |"


def test_the_card_whose_figures_are_nearest():
    names = ("NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3", "NVIDIA L4")
    assert [launches.like_this_card(name) for name in names] == ["RTX 4090", "H100 SXM", "H100 SXM"]


def test_the_page_has_the_table_of_the_results():
    assert launches.table(RESULTS["models"]) in PAGE


# Stock's experts could not be counted on every compute capability.
BOTH = [name for name, row in RESULTS["models"].items() if row.keys() >= set(launches.CONTESTANTS)]


@pytest.mark.parametrize("name", BOTH)
def test_a_step_launches_hardly_more_than_stocks(name):
    """Forward and backward of both, and waits; a hybrid's recurrent layers are called twice."""
    stock, ours = (RESULTS["models"][name][contestant]["phases"] for contestant in launches.CONTESTANTS)
    number = [sum(phases[phase]["launches"] for phase in ("loss", "backward")) for phases in (stock, ours)]
    waits = [sum(phases[phase]["waits"] for phase in ("loss", "backward")) for phases in (stock, ours)]
    assert number[1] <= 1.3 * number[0] and waits[1] <= waits[0] + 1
