"""The tables and the picture of `gpu_bytes.py`'s results.

    python benchmarks/gpu_bytes_pictures.py [benchmarks/results/gpu_bytes.json]

draws them from the file on a machine with matplotlib, which needs no device.
"""

import importlib.util
import json
import sys
from math import prod
from pathlib import Path

GIB = 2**30


def axes_of(width: float, height: float, columns: int = 1):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, columns, figsize=(width, height), layout="constrained")


def cell(row: dict | None) -> str:
    """GiB of a whole step, or the largest group, or a word why there is neither."""
    if row is None:
        return "not run"
    if "largest" in row:
        return str(row["largest"] or "none")
    if "step" in row:
        return f"{row['step'] / GIB:.1f}"
    return "out of memory" if "out_of_memory" in row else "failed"


def ratio(rows: dict) -> str:
    sizes = [rows.get(name, {}).get("step") for name in ("stock", "ours")]
    return f" ({sizes[0] / sizes[1]:.2f}×)" if all(sizes) else ""


def grid_table(grid: dict[str, dict]) -> str:
    """Models and adapters by P/C/G: GiB of a step, stock TRL's and ours."""
    names = list(dict.fromkeys(name.rpartition(" ")[0] for name in grid))
    shapes = list(dict.fromkeys(name.rpartition(" ")[2] for name in grid))
    lines = ["| GiB: stock → ours | " + " | ".join(shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    for name in names:
        rows = [grid.get(f"{name} {shape}", {}) for shape in shapes]
        cells = [f"{cell(row.get('stock'))} → {cell(row.get('ours'))}{ratio(row)}" for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def groups_table(groups: dict[str, dict]) -> str:
    """Series by card: the largest group of stock TRL and ours."""
    cards = {card for rows in groups.values() for card, row in rows.items() if "largest" in row}
    cards = sorted(cards, key=lambda card: int(card.split()[0]))
    lines = ["| completions in the largest group: stock → ours | " + " | ".join(cards) + " |"]
    lines.append("|---" * (len(cards) + 1) + "|")
    for series in dict.fromkeys(name.rpartition(" ")[0] for name in groups):
        stock, ours = (groups.get(f"{series} {contestant}", {}) for contestant in ("stock", "ours"))
        cells = [f"{cell(stock.get(card))} → {cell(ours.get(card))}" for card in cards]
        lines.append(f"| {series} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ranks_table(ranks: dict[str, dict]) -> str:
    """Launches of two ranks: GiB of rank 0."""
    columns = ("4-bit base", "other frozen weights", "held", "held while all is gathered", "step")
    lines = ["| GiB of one of two ranks | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, rows in ranks.items():
        row = rows.get("rank 0")
        cells = ["not run"] * 4
        if row is not None:
            sizes = (row["base"]["quantized_local"], row["base"]["other_local"], row["held"], row["gathered"])
            cells = [f"{size / GIB:.2f}" for size in sizes]
        lines.append(f"| {name} | " + " | ".join([*cells, cell(row)]) + " |")
    return "\n".join(lines)


def tables(content: dict) -> str:
    tables = {"grid": grid_table, "groups": groups_table, "ranks": ranks_table}
    return "\n\n".join(make(content[part]) for part, make in tables.items() if part in content)


def draw_grid(axes, grid: dict[str, dict]) -> None:
    """GiB of a step at the largest shape of the grid: stock TRL's and ours, model by model."""
    shape = max((name.rpartition(" ")[2] for name in grid), key=lambda shape: prod(map(int, shape.split("/"))))
    grid = {name.rpartition(" ")[0]: rows for name, rows in grid.items() if name.endswith(f" {shape}")}
    for i, contestant in enumerate(("stock", "ours")):
        sizes = [rows.get(contestant, {}).get("step", 0) / GIB for rows in grid.values()]
        heights = [y + 0.4 * i for y in range(len(grid))]
        bars = axes.barh(heights, sizes, 0.4, label={"stock": "stock TRL", "ours": "this package"}[contestant])
        axes.bar_label(bars, [f"{size:.1f}" if size else "" for size in sizes], fontsize=7, padding=2)
    axes.set_yticks([y + 0.2 for y in range(len(grid))], list(grid), fontsize=8)
    axes.invert_yaxis()
    if any("step" in row for rows in grid.values() for row in rows.values() if isinstance(row, dict)):
        axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel(f"GiB at the peak of an optimizer step on one group, P/C/G = {shape}")
    axes.legend(fontsize="small")


def draw_groups(axes, groups: dict[str, dict]) -> None:
    """The largest group by the card's GiB: stock TRL's and ours, a line style for each series."""
    series = list(dict.fromkeys(name.rpartition(" ")[0] for name in groups))
    drawn = 0
    for name, rows in groups.items():
        largest = {int(card.split()[0]): row["largest"] for card, row in rows.items() if card != "error"}
        largest = sorted((card, group) for card, group in largest.items() if group)
        drawn += len(largest)
        which, _, contestant = name.rpartition(" ")
        style = ("-o", "--s", ":^")[series.index(which) % 3]
        cards, sizes = zip(*largest, strict=True) if largest else ((), ())
        color = f"C{int(contestant == 'ours')}"
        axes.plot(cards, sizes, style, color=color, label=name)
    if drawn:  # a logarithm of nothing is refused
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
    axes.set_xlabel("GiB of the card")
    axes.set_ylabel("completions in the largest group")
    axes.legend(fontsize=7)


def draw(content: dict):
    """Draw the parts in the results, side by side; returns `None` if none of them can be drawn."""
    panels = {name: draw for name, draw in (("grid", draw_grid), ("groups", draw_groups)) if content.get(name)}
    if not panels:
        return None
    figure, all_axes = axes_of(6.5 * len(panels), 5.2, columns=len(panels))
    for axes, (name, panel) in zip(all_axes if len(panels) > 1 else [all_axes], panels.items(), strict=True):
        panel(axes, content[name])
    figure.suptitle(content["setting"]["device"], fontsize=9)
    return figure


def show(content: dict, path: Path) -> None:
    """Print the tables and save the picture; the day there is a GPU must not fail because nothing there can draw."""
    print(tables(content))
    figure = draw(content) if importlib.util.find_spec("matplotlib") else None
    if figure is not None:
        figure.savefig(path, dpi=110)


if __name__ == "__main__":
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "gpu_bytes.json"
    show(json.loads(results.read_text(encoding="utf-8")), results.with_suffix(".png"))
