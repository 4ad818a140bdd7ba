"""Peak bytes of CUDA's allocator at real sizes: stock TRL's trainer against this package's, LoRA and QLoRA.

    python benchmarks/gpu_bytes.py [--only 7B qlora ...] [--output benchmarks/results/gpu_bytes.json]

Runs on a GPU, or on an emulated one on which no kernel runs and memory is not touched: then bytes of large models are counted
in the memory of a small host, and the results are headed "emulated allocator, no kernel ran".

A point is one group. Configs are built in code and weights are whatever the memory holds, so nothing may hang on numbers: a batch
is made on the host as the trainer's inputs, `compute_loss` is called with it, and a step is that, the backward, clipping and the
fused AdamW, without generation. The first step's comparison of packed and padded rows is left out. Every completion has C tokens
but the first, which has one less: without any padding stock TRL would build no mask, which is rare in training.

Each point has a process of its own with a time limit; the file is written after each, and what it holds for the same versions is
not measured again.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

import gpu_bytes_pictures
from gpu import REPOSITORY, end_as_asked, end_group

from trl_fsdp_qlora.run.manifest import write_json

RESULTS = Path(__file__).parent / "results"
WORKER = Path(__file__).with_name("gpu_bytes_trainers.py")
GIB = 2**30
HEAD = "emulated allocator, no kernel ran"


@dataclass(frozen=True)
class Point:
    """One group of `group` completions; `prompt` and `completion` in tokens."""

    model: str
    adapter: str
    checkpointing: bool
    prompt: int
    completion: int
    group: int

    @property
    def name(self) -> str:
        kept = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{self.model} {self.adapter} {kept} {self.prompt}/{self.completion}/{self.group}"


CONTESTANTS = ("stock", "ours")
SHAPES = ((4096, 1024, 16), (2048, 512, 16), (512, 512, 8))
GRID = [
    Point(model, adapter, checkpointing, *shape)
    for shape in SHAPES
    for model, adapter, checkpointing in product(("7B", "1.5B", "0.5B"), ("qlora", "lora"), (True, False))
]


def apart(point: Point, contestants: list[str], seconds: float) -> dict:
    """What benchmarks/gpu_bytes_trainers.py finds of a point, by contestant, in a process of its own.

    Where it died or took too long, its last word is what it had written, and `error` says so.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        given = json.dumps([vars(point), contestants, str(out)])
        command = [sys.executable, str(WORKER), given]
        process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
            ended = None if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {seconds:.0f} s"
        finally:
            end_group(process)
        found = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    return found if ended is None else {**found, "error": ended}


class Results:
    """Rows by part and name, written after each change; those of the same versions and device are taken over.

    Args:
        path: of the JSON file.
        setting: what rows have in common; where a file has another one, it is begun anew.
    """

    def __init__(self, path: Path, setting: dict):
        self.path, self.content = path, {"setting": setting}
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before.get("setting") == setting:
                self.content = before

    def once(self, part: str, name: str, run: Callable[[], dict]) -> None:
        """Take the row that is there, or `run()`; a failure that is none of memory is tried again the next time."""
        rows = self.content.setdefault(part, {})
        if name not in rows or "error" in rows[name]:
            rows[name] = run()
            write_json(self.path, self.content)
            print(f"{part} | {name} | {said(rows[name])}", flush=True)


def said(row: dict) -> str:
    cells = {key: gpu_bytes_pictures.cell(value) for key, value in row.items() if isinstance(value, dict)}
    return ", ".join([*(f"{key} {value}" for key, value in cells.items()), *filter(None, [row.get("error")])])


def run_grid(results: Results, chosen, seconds: float) -> None:
    for point in filter(chosen, GRID):
        # A plan takes as long as a measurement.
        plan = ["plan"] if point.model == "7B" and point.checkpointing and point.prompt == SHAPES[0][0] else []
        results.once("grid", point.name, partial(apart, point, [*CONTESTANTS, *plan], seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="points whose name has all of these words")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of one point")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_bytes.json")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, end_as_asked)
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, emulated or not")
    name = torch.cuda.get_device_name()
    setting = {package: version(package) for package in ("torch", "transformers", "trl", "peft", "bitsandbytes")}
    results = Results(args.output, {"device": HEAD if "no kernels run" in name else name, **setting})

    def chosen(point: Point) -> bool:
        return all(word in point.name.split() for word in args.only)

    run_grid(results, chosen, args.seconds)
    print(gpu_bytes_pictures.grid_table(results.content.get("grid", {})))
    gpu_bytes_pictures.draw(results.content).savefig(args.output.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
