"""The table of published memory on docs/plan.md is what its benchmark prints."""

from pathlib import Path

import pytest

from tests.benchmark_modules import benchmark

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_page_has_every_point_and_a_plan_of_today():
    published = benchmark("plan_vs_published")
    table = {tuple(cells(line)[:4]): cells(line) for line in PAGE.read_text().splitlines() if line.startswith("| ")}
    for point in published.POINTS:
        figure = f"{point.published:g}" if point.fits else f"out of memory ({point.published:g})"
        assert (point.card, point.model, point.what, figure) in table
    smallest = next(point for point in published.POINTS if point.model == "Qwen3-1.7B")
    today = cells(published.row(smallest))
    assert float(table[tuple(today[:4])][4]) == pytest.approx(float(today[4]), rel=0.03)
