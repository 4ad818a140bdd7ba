"""The table and the picture of `gpu_bytes.py`'s results."""

from rollouts_vllm_pictures import axes_of

GIB = 2**30


def cell(row: dict | None) -> str:
    """GiB of a whole step, or what became of it."""
    if row is None:
        return "not run"
    if "step" in row:
        return f"{row['step'] / GIB:.1f}"
    return "out of memory" if "out_of_memory" in row else "failed"


def ratio(rows: dict) -> str:
    sizes = [rows.get(name, {}).get("step") for name in ("stock", "ours")]
    return f" ({sizes[0] / sizes[1]:.2f}×)" if all(sizes) else ""


def grid_table(grid: dict[str, dict]) -> str:
    """Models and adapters by P/C/G: GiB of a step, stock TRL's and ours."""
    names = sorted({name.rpartition(" ")[0] for name in grid}, key=[n.rpartition(" ")[0] for n in grid].index)
    shapes = list(dict.fromkeys(name.rpartition(" ")[2] for name in grid))
    lines = ["| GiB: stock → ours | " + " | ".join(shapes) + " |", "|---" * (len(shapes) + 1) + "|"]
    for name in names:
        rows = [grid.get(f"{name} {shape}", {}) for shape in shapes]
        cells = [f"{cell(row.get('stock'))} → {cell(row.get('ours'))}{ratio(row)}" for row in rows]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(content: dict):
    """GiB of a step: stock TRL's and ours, point by point."""
    grid = {name: rows for name, rows in content.get("grid", {}).items() if "error" not in rows}
    figure, axes = axes_of(9, 1.5 + 0.5 * len(grid))
    for i, contestant in enumerate(("stock", "ours")):
        sizes = [rows.get(contestant, {}).get("step", 0) / GIB for rows in grid.values()]
        places = [y + 0.4 * i for y in range(len(grid))]
        bars = axes.barh(places, sizes, 0.4, label={"stock": "stock TRL", "ours": "this package"}[contestant])
        axes.bar_label(bars, [f"{size:.1f}" if size else "" for size in sizes], fontsize=8, padding=2)
    axes.set_yticks([y + 0.2 for y in range(len(grid))], list(grid), fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.set_xlabel("GiB at the peak of an optimizer step on one group (P/C/G)")
    axes.legend(fontsize="small")
    axes.set_title(content["setting"]["device"], fontsize=9)
    return figure
