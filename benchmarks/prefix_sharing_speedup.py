"""Time and saved bytes of `compute_loss` + backward: this package compared with stock TRL.

    python benchmarks/prefix_sharing_speedup.py                 # the table of the documentation: two threads, minutes
    python benchmarks/prefix_sharing_speedup.py --device cuda   # bf16, 0.5B shape, longer prompts and completions

Everything runs through the real trainers on the same batch and in one process; runs of the contestants alternate and
medians are compared. On a CPU the seconds are CPU seconds, so that other work on the machine counts little. A point
that does not fit into the GPU's memory gets a row with that note. The file is written after every point. Stock TRL on
CPU projects every position through the LM head, prompts included, but on CUDA it projects completions only. That
flatters this package on CPU, so the vocabulary is small by default (`--vocabulary`). Saved bytes are those of the
distinct storages that autograd keeps for backward (parameters excluded).
"""

import argparse
import gc
import importlib.util
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
import trl
from synthetic import (
    RESULTS,
    SHAPES,
    cpu_name,
    logged,
    make_batch,
    make_model,
    make_trainer,
    saved_bytes,
    step,
    unless_out_of_memory,
)
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOTrainer

CPU_POINTS = [
    # name, P, C, G, kind, target for time, target for bytes
    ("512/64/8", 512, 64, 8, "equal", 4.4, 4.2),
    ("1024/64/8", 1024, 64, 8, "equal", 5.6, 5.3),
    ("128/256/8", 128, 256, 8, "equal", 1.35, 1.3),
    ("512/64/8 ragged", 512, 64, 8, "ragged", 5.7, None),
    ("512/64/1 x8 different", 512, 64, 8, "different", 0.97, None),
]
# For rehearsals on a device that computes as slowly as a CPU.
TINY_POINTS = [("16/16/4", 16, 16, 4, "equal", None, None)]
CUDA_POINTS = [
    ("512/512/8", 512, 512, 8, "equal", None, None),
    ("2048/512/16", 2048, 512, 16, "equal", None, None),
    ("4096/1024/16", 4096, 1024, 16, "equal", None, None),
    ("2048/1024/8 ragged", 2048, 1024, 8, "ragged", None, None),
]


def gradient_difference(trainer, reference) -> float:
    """Largest gradient difference over the largest gradient, over all parameters."""
    if trainer is reference:
        return 0.0
    pairs = [(p.grad, r.grad) for p, r in zip(trainer.model.parameters(), reference.model.parameters(), strict=True)]
    largest = max(r.abs().max() for _, r in pairs)
    return max((p - r).abs().max() / largest for p, r in pairs).item()


def measure(point, args, contestants) -> dict:
    """Medians of alternating runs, summed over the batches of a point (several draws if lengths are random)."""
    name, prompt, completion, group, kind, *targets = point
    seeds = range(1, args.draws + 1) if kind == "ragged" else [1]
    batches = [make_batch(args.vocabulary, prompt, completion, group, kind, args.device, seed) for seed in seeds]
    trainers = contestants(group)
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    totals = {key: {"seconds": 0.0, "bytes": 0, "difference": 0.0} for key in trainers}
    tokens = stock_tokens = 0
    for batch in batches:
        for trainer in trainers.values():  # warm up: self-check, allocator, thread pool
            step(trainer, batch, args.device)
        seconds = {key: [] for key in trainers}
        for _ in range(args.runs):
            for key, trainer in trainers.items():
                seconds[key].append(step(trainer, batch, args.device, clock)[0])
        for key, trainer in trainers.items():
            totals[key]["seconds"] += statistics.median(seconds[key])
            totals[key]["bytes"] += saved_bytes(trainer, batch)
            difference = gradient_difference(trainer, trainers["stock"])
            totals[key]["difference"] = max(totals[key]["difference"], difference)
        size = batch["prompt_ids"].numel() + batch["completion_ids"].numel()
        stock_tokens += size
        tokens += size * logged(trainers[args.backends[0]])["prefix_sharing/policy/tokens_fraction"]
    stock = totals["stock"]
    return {
        "point": name,
        "prompt": prompt,
        "completion": completion,
        "group": group,
        "kind": kind,
        "batches": len(batches),
        "target_time": targets[0],
        "target_bytes": targets[1],
        "token_ratio": stock_tokens / tokens,
        "seconds": {key: total["seconds"] for key, total in totals.items()},
        "speedup": {key: stock["seconds"] / total["seconds"] for key, total in totals.items()},
        "saved_bytes": {key: total["bytes"] for key, total in totals.items()},
        "bytes_ratio": {key: stock["bytes"] / total["bytes"] for key, total in totals.items()},
        "gradient_difference": {key: total["difference"] for key, total in totals.items()},
    }


def measure_if_it_fits(point, args, contestants) -> dict:
    """[`measure`], or a row with the reason if the GPU's memory is not enough for all contestants at once."""
    row = unless_out_of_memory(point[0], lambda: measure(point, args, contestants))
    return {"point": point[0], "out_of_memory": True} if row is None else row


def table(rows: list[dict]) -> str:
    """Returns a Markdown table: speed-up and saved-bytes ratio next to stock TRL, and the token ratio."""
    measured = [row for row in rows if "seconds" in row]
    if not measured:
        return "\n".join(f"{row['point']}: out of memory" for row in rows)
    names = [key for key in measured[0]["seconds"] if key != "stock"]
    lines = ["| P/C/G | token ratio | stock | " + " | ".join(f"{n} | bytes" for n in names) + " | target |"]
    lines.append("|---" * (len(names) * 2 + 4) + "|")
    for row in rows:
        if row not in measured:
            lines.append(f"| {row['point']} | out of memory |" + " |" * (len(names) * 2 + 2))
            continue
        cells = [row["point"], f"{row['token_ratio']:.2f}", f"{row['seconds']['stock'] * 1e3:.0f} ms"]
        for key in names:
            cells += [f"{row['speedup'][key]:.2f}×", f"{row['bytes_ratio'][key]:.2f}×"]
        wanted = [f"≥ {x}× {what}" for x, what in ((row["target_time"], "time"), (row["target_bytes"], "bytes")) if x]
        lines.append("| " + " | ".join([*cells, ", ".join(wanted)]) + " |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Draw the speed-up of each contestant and the token ratio."""
    import matplotlib.pyplot as plt

    rows = [row for row in rows if "seconds" in row]
    if not rows:
        return
    names = [key for key in rows[0]["seconds"] if key != "stock"]
    width = 0.8 / (len(names) + 1)
    figure, axes = plt.subplots(figsize=(9, 4))
    for i, name in enumerate(["token ratio", *names]):
        heights = [row["token_ratio"] if name == "token ratio" else row["speedup"][name] for row in rows]
        color = "lightgray" if name == "token ratio" else None
        axes.bar([x + i * width for x in range(len(rows))], heights, width, label=name, color=color)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(rows))], [row["point"] for row in rows], fontsize=8)
    axes.set_ylabel("times faster than stock TRL\n(compute_loss + backward)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def write(rows: list[dict], args) -> None:
    """The rows so far, as JSON and as a table."""
    RESULTS.mkdir(exist_ok=True)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    content = {"setting": {"machine": machine, **versions, **vars(args)}, "rows": rows}
    (RESULTS / f"{args.output}.json").write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--shape", choices=SHAPES, help="of Qwen3, 'hybrid' of Qwen3.5; else a small one, on CUDA 0.6B"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each contestant a batch")
    parser.add_argument("--draws", type=int, default=4, help="batches of a point with random lengths")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--points", nargs="*", help="only points whose name contains one of these")
    parser.add_argument("--backends", nargs="*", default=["auto", "two_part"])
    parser.add_argument("--output", help="file stem under benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = make_model(args).to(args.device)

    def contestants(group):
        trainers = {"stock": make_trainer(GRPOTrainer, model, "off", args, group)}
        for backend in args.backends:
            trainers[backend] = make_trainer(EfficientGRPOTrainer, model, backend, args, group)
        return trainers

    points = CPU_POINTS if args.device == "cpu" else CUDA_POINTS
    if args.shape == "tiny":
        points = TINY_POINTS
    rows = []
    for point in points:
        if args.points and not any(wanted in point[0] for wanted in args.points):
            continue
        rows.append(measure_if_it_fits(point, args, contestants))
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        if args.output:
            write(rows, args)
    print(table(rows))
    if args.output and importlib.util.find_spec("matplotlib"):  # the rows are on the disk, whether it is there or not
        plot(rows, RESULTS / f"{args.output}.png")


if __name__ == "__main__":
    main()
