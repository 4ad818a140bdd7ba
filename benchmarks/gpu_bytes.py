"""Peak bytes of CUDA's allocator at real sizes: stock TRL's trainer against this package's, LoRA and QLoRA.

    python benchmarks/gpu_bytes.py [--parts grid groups ranks] [--only 7B qlora ...] [--output
    benchmarks/results/gpu_bytes.json]

Runs on a GPU, or on an emulated one on which no kernel runs and memory is not touched: then bytes of large models are
counted in the memory of a small host, and the results are headed "emulated allocator, no kernel ran". Parts:

    grid     a step on one group: models, adapters, checkpointing, lengths
    groups   the largest group that a card of 16, 24, 80 or 141 GiB holds
    ranks    FSDP2 with a 4-bit base on two devices (the emulated device needs FAKE_GPUS=2)

Configs are built in code and weights are whatever the memory holds, so nothing may hang on numbers: a batch is made on
the host as the trainer's inputs, `compute_loss` is called with it, and a step is that, the backward, clipping and the
fused AdamW, without generation. The first step's comparison of packed and padded rows is left out. Every completion
has C tokens but the first, which has one less: without any padding stock TRL would build no mask, which is rare in
training.

The largest groups are guessed from the line through two measured sizes and then run with the allocator held to the
card: one group has to fit, and the next larger one has to run out of memory.

Each point, and each trainer's series of groups, has a process of its own with a time limit; the file is written after
each, and what it holds for the same versions is not measured again.
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

from trl_fsdp_qlora.utils.files import write_json

RESULTS = Path(__file__).parent / "results"
WORKER = Path(__file__).with_name("gpu_bytes_trainers.py")
GIB = 2**30
CARDS = (16, 24, 80, 141)  # GiB
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
        checkpointing = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{self.model} {self.adapter} {checkpointing} {self.prompt}/{self.completion}/{self.group}"


CONTESTANTS = ("stock", "ours")
SHAPES = ((4096, 1024, 16), (2048, 512, 16), (512, 512, 8))
GRID = [
    Point(model, adapter, checkpointing, *shape)
    for shape in SHAPES
    for model, adapter, checkpointing in product(("7B", "1.5B", "0.5B"), ("qlora", "lora"), (True, False))
]


LAUNCH = "-m accelerate.commands.launch --config_file accelerate_configs/fsdp2_qlora.yaml --num_processes 2"
RANKS = [Point(model, "qlora", True, 2048, 512, 16) for model in ("7B", "32B")]
SERIES = [Point("7B", "qlora", True, 2048, 512, 0), Point("1.5B", "lora", True, 2048, 512, 0)]
PARTS = ("grid", "groups", "ranks")


def in_own_process(task: str, point: Point, *arguments, seconds: float, launch: tuple[str, ...] = ()) -> dict:
    """Returns the result of a task of benchmarks/gpu_bytes_trainers.py for a point, run in a process of its own.

    If the process died or took too long, returns what it had written, with the reason as `error`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        message = json.dumps([task, vars(point), str(out), *arguments])
        command = [sys.executable, *launch, str(WORKER), message]
        process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
            ended = None if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {seconds:.0f} s"
        finally:
            end_group(process)
        result = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    return result if ended is None else {**result, "error": ended}


class Results:
    """Rows by part and name, written after each change; those of the same versions and device are taken over.

    Args:
        path: of the JSON file.
        setting: what rows have in common; a file with another setting is begun anew.
    """

    def __init__(self, path: Path, setting: dict):
        self.path = path
        self.content = {"setting": setting}
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
            print(f"{part} | {name} | {summary(rows[name])}", flush=True)


def largest_that_fits(guess: int, fits: Callable[[int], bool]) -> int:
    """The largest group that fits: strides from `guess` that double until they pass it, then halves.

    Returns 0 if two completions, the smallest group, do not fit.
    """
    low = max(guess, 2)
    stride = 1
    if fits(low):
        while fits(low + stride):
            low += stride
            stride *= 2
        high = low + stride
    else:
        high = low
        low = max(high - stride, 1)
        while low > 1 and not fits(low):
            high = low
            stride *= 2
            low = max(high - stride, 1)
    # `high` does not fit, and `low` does or is 1.
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low if low > 1 else 0


def summary(row: dict) -> str:
    cells = {key: gpu_bytes_pictures.cell(value) for key, value in row.items() if isinstance(value, dict)}
    return ", ".join([*(f"{key} {value}" for key, value in cells.items()), *filter(None, [row.get("error")])])


def run_grid(results: Results, chosen, seconds: float) -> None:
    for point in filter(chosen, GRID):
        # A plan takes as long as a measurement.
        plan = ["plan"] if point.model == "7B" and point.checkpointing and point.prompt == SHAPES[0][0] else []
        run = partial(in_own_process, "grid", point, [*CONTESTANTS, *plan], seconds=seconds)
        results.once("grid", point.name, run)


def run_groups(results: Results, chosen, seconds: float) -> None:
    for series, contestant in product(filter(chosen, SERIES), CONTESTANTS):
        name = f"{series.name.rpartition('/')[0]} {contestant}"
        run = partial(in_own_process, "groups", series, contestant, CARDS, seconds=5 * seconds)
        results.once("groups", name, run)


def run_ranks(results: Results, chosen, seconds: float) -> None:
    for point, sharing in product(filter(chosen, RANKS), ("auto", "off")):
        run = partial(in_own_process, "ranks", point, sharing, seconds=3 * seconds, launch=tuple(LAUNCH.split()))
        results.once("ranks", f"{point.name} prefix_sharing={sharing}", run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--only", nargs="+", default=[], help="points whose name has all of these words")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a point of the grid; others have more")
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

    for part, run in {"grid": run_grid, "groups": run_groups, "ranks": run_ranks}.items():
        if part in args.parts:
            run(results, chosen, args.seconds)
    gpu_bytes_pictures.show(results.content, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
