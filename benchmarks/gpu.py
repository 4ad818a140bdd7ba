"""Everything that only a GPU can show, in one call, as long as `--minutes` lasts.

    python benchmarks/gpu.py --output DIR [--model FOLDER --data SVAMP.json] [--unsloth VENV/bin/python]
                             [--only tests lm_head ...] [--minutes 9]

Runs one part after the other, by worth, and goes on when one fails; leaves each part's log, the results of the
benchmarks and a summary in `--output` (no folders in it, so that it can be copied whole). Parts, in this order:

    launches         launches, waits and seconds of a step of Qwen3-4B with LoRA, stock TRL's and this package's, next
                     to what was counted without a GPU (docs/launches.md)
    tests            the tests marked `gpu` that are quick
    prefix_sharing   packed against padded rows, flash attention, bf16, the shape of Qwen3-0.6B
    prefix_sharing_2 the same in the shape of Qwen3-1.7B
    lm_head          bf16 log-probabilities under a frozen head against TRL's kernel: wanted >= 1.25x
    token_selection  what subsets and skipping save
    grpo             SmolLM2-135M-Instruct on SVAMP, LoRA, bf16           (needs --model and --data)
    qlora            the same from a 4-bit base                           (needs --model and --data)
    unsloth          a step next to Unsloth's, which has an environment of its own (needs --model and --unsloth)
    slow_tests       the tests marked `gpu` that are slow: launches of a recipe and of every accelerate config

The last thing printed, and `summary.txt`, is one table to paste: what was predicted, what was measured, and how each
part ended.

A part has a process group of its own, which is ended with everything in it when its time is over: nothing keeps the
GPU. A result is copied only if the part itself wrote it, also the rows that it wrote before it ran out of time; out of
memory is a result, not an end. No GPU was at hand when it was written: `--rehearse` shows the commands, `--tiny` runs
all of them in sizes for an emulated device.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
# Seconds between asking a part to end and making it.
GRACE = 10.0


class Part(NamedTuple):
    """A command that is run with a limit of time."""

    command: list[str]
    leaves: Path | None  # its file of results in the repository
    share: float  # of the time left, which it may take
    environment: dict[str, str] | None = None  # in addition to this process's


SPEEDUP = "benchmarks/prefix_sharing_speedup.py --device cuda"
BENCHMARKS = {
    "launches": (
        "benchmarks/launches.py --next_to benchmarks/results/launches.json",
        "--only Qwen3-4B --seconds 100",
        0.4,
    ),
    "prefix_sharing": (SPEEDUP, "--runs 5 --vocabulary 49152 --backends auto", 0.4),
    "prefix_sharing_2": (SPEEDUP, "--runs 5 --vocabulary 49152 --backends auto --shape 1.7B", 0.4),
    "lm_head": (
        "benchmarks/lm_head.py --device cuda --dtype bfloat16",
        "--rounds 20 --tokens 1024 8192",
        0.4,
    ),
    "token_selection": ("benchmarks/token_selection_savings.py --device cuda", "", 0.4),
}
TESTS = "-m pytest -v -p no:cacheprovider"
QUICK, SLOW = "gpu and not slow", "gpu and slow"
# A rehearsal shows that the calls work; on an emulated device all tests take longer than it has, and each of them
# longer than it may: the part's own limit ends it.
TINY_TESTS = {
    QUICK: "tests/trainers/grpo/test_cuda.py tests/core/prefix_sharing/test_attention.py --timeout 0",
    SLOW: "tests/tools/recipes/test_on_gpu.py -k checkpointing --timeout 0",
}
# The real shapes of two layers have no numbers: the emulated device neither touches nor computes them.
TINY_ENVIRONMENT = {"launches": {"EMULATE_NUMBERS": "int", "FAKE_TOUCH": "65536", "FAKE_GPU_GIB": "2000"}}
TINY = {
    "launches": "--only Qwen3-4B --layers 2",
    "prefix_sharing": "--runs 1 --draws 1 --vocabulary 64 --shape tiny --backends auto",
    "prefix_sharing_2": "--runs 1 --draws 1 --vocabulary 64 --shape tiny --backends two_part",
    "lm_head": "--rounds 1 --tokens 32 --hidden 64 --vocabularies 128",
    "token_selection": "--runs 1 --vocabulary 64 --shape tiny --completion 16",
}
RECIPE = (
    "-m accelerate.commands.launch --config_file accelerate_configs/single_gpu.yaml recipes/grpo.py "
    "--config recipes/SmolLM2-135M-Instruct/grpo/config_svamp.yaml --use_cpu false --bf16 true "
)
FULL_RUN = "--max_steps 30 --max_completion_length 160 --eval_problems 300 --accuracy_batch_size 150"
TINY_RUN = (
    "--max_steps 1 --max_completion_length 4 --eval_problems 2 --accuracy_batch_size 2 --accuracy_samples 1 "
    "--per_device_train_batch_size 2 --num_generations 2"
)
UNSLOTH = "benchmarks/beside_unsloth.py"
TINY_UNSLOTH = "--group 2 --prompt 8 --completion 4 --steps 3"
RUNS = {"grpo": "", "qlora": "--load_in_4bit true --dtype bfloat16"}


def parts(
    model: str | None, data: str | None, output: Path, tiny: bool = False, unsloth: str | None = None
) -> dict[str, Part]:
    """Command of each part, and the file of results it leaves. In a rehearsal each part may take all the time left."""

    def tests(kind: str) -> Part:
        return Part([*TESTS.split(), "-m", kind, *(TINY_TESTS[kind].split() if tiny else ())], None, 0.5)

    def benchmark(name: str) -> Part:
        command, size, share = BENCHMARKS[name]
        leaves = RESULTS / f"{name}_cuda.json"
        target = str(leaves) if name in ("launches", "lm_head") else leaves.stem
        return Part([*command.split(), *(TINY[name] if tiny else size).split(), "--output", target], leaves, share)

    by_name = {"launches": benchmark("launches"), "tests": tests(QUICK)}
    for name in BENCHMARKS:
        if name not in by_name:
            by_name[name] = benchmark(name)
    if model and data:
        for name, options in RUNS.items():
            folder = output / f"run-{name}"
            arguments = ["--model_name_or_path", model, "--dataset", data, "--output_dir", str(folder)]
            size = (TINY_RUN if tiny else FULL_RUN).split()
            by_name[name] = Part([*RECIPE.split(), *size, *options.split(), *arguments], folder / "metrics.json", 0.5)
    if model and unsloth:
        leaves = RESULTS / "beside_unsloth_cuda.json"
        arguments = ["--model", model, "--unsloth", unsloth, "--output", str(leaves)]
        by_name["unsloth"] = Part([UNSLOTH, *arguments, *(TINY_UNSLOTH if tiny else "").split()], leaves, 0.5)
    by_name["slow_tests"] = tests(SLOW)
    return {
        name: Part(
            [sys.executable, *part.command],
            part.leaves,
            1.0 if tiny else part.share,
            TINY_ENVIRONMENT.get(name) if tiny else None,
        )
        for name, part in by_name.items()
    }


def end_group(process: subprocess.Popen) -> None:
    """End a process and everything that it started, so that none of it keeps the GPU.

    It tries an interrupt first, because pytest then prints what has failed so far.
    """
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, ending)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + GRACE
        while ending is not signal.SIGKILL and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
    process.wait()


def end_as_asked(signal_number: int, frame) -> None:
    """Leave through every `finally`.

    Otherwise a scheduler or a lost connection would end this process alone, and its part would stay on the GPU.
    """
    raise SystemExit(128 + signal_number)


def run_part(name: str, part: Part, output: Path, seconds: float) -> str:
    """Run one part with its log in `output`; returns its rows of the table."""
    started = time.monotonic()
    try:
        ended = _ended(name, part, output, output / f"{name}.log", seconds)
    except OSError as error:  # no such program, a full disk: the parts that follow may do without
        ended = f"{type(error).__name__}: {error}"
    return rows_of(name, output, f"{ended} after {time.monotonic() - started:.0f} s")


def rows_of(name: str, output: Path, ended: str) -> str:
    """The rows of a part: of `launches` those that its log has, and a last one with how it ended."""
    log = output / f"{name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    rows = [line for line in lines if line.startswith("|")] if name == "launches" else []
    last = next((line for line in reversed(lines) if line.strip()), "")
    if rows and last == rows[-1]:
        last = ""
    if last:
        ended += ": " + last.strip()[:160].replace("|", "/")
    return "\n".join([*rows, f"| {name} | | {ended} |"])


def _ended(name: str, part: Part, output: Path, log: Path, seconds: float) -> str:
    stamp = time.time()
    with log.open("w") as stream:
        process = subprocess.Popen(
            part.command,
            cwd=REPOSITORY,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(part.environment or {})},
        )
        try:
            code = process.wait(timeout=seconds)
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = "out of time"
        finally:
            end_group(process)  # also if it ended by itself, because of what it left behind
    leaves = part.leaves
    # Files are stamped by a coarser clock than the one that is read here.
    if leaves is not None and leaves.is_file() and leaves.stat().st_mtime >= stamp - 0.1:
        shutil.copy(leaves, output / f"{name}_{leaves.name}")
        ended += ", results"
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="SVAMP.json")
    parser.add_argument("--unsloth", help="Python of an environment with Unsloth")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rehearse", action="store_true", help="print the commands and run none")
    parser.add_argument("--tiny", action="store_true", help="run everything in sizes for an emulated device")
    args = parser.parse_args()
    args.output = args.output.resolve()
    chosen = parts(args.model, args.data, args.output, args.tiny, args.unsloth)
    unknown = set(args.only or ()) - chosen.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    if args.only:
        chosen = {name: part for name, part in chosen.items() if name in args.only}
    if args.rehearse:
        for name, part in chosen.items():
            print(f"{name}: {shlex.join(part.command)}")
        return
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --rehearse prints the commands")
    args.output.mkdir(parents=True, exist_ok=True)
    if args.tiny:
        os.environ["TEST_PATIENCE"] = "10"  # for what tests launch
    signal.signal(signal.SIGTERM, end_as_asked)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup a lost connection ends nothing
        signal.signal(signal.SIGHUP, end_as_asked)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # parts inherit it; a shell's `&` would have them ignore it
    deadline = time.monotonic() + 60 * args.minutes
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "bitsandbytes"))
    title = [f"{torch.cuda.get_device_name()}, {versions}", ""]
    table = []
    stopped = None
    for number, (name, part) in enumerate(chosen.items()):
        left = deadline - time.monotonic()
        seconds = left if number == len(chosen) - 1 else left * part.share
        if stopped is not None:
            table.append(f"| {name} | | not run |")
        elif left > 5:
            try:
                table.append(run_part(name, part, args.output, seconds))
            except (KeyboardInterrupt, SystemExit) as error:
                # The table is what was paid for, so it is written with what there is.
                stopped = error
                table.append(rows_of(name, args.output, f"stopped by {type(error).__name__}"))
        else:
            table.append(f"| {name} | | no time left |")
        # The part `launches` has a header of its own, with the card that it predicts for.
        header = [] if "| predicted" in table[0] else ["| part | predicted | measured |", "|---|---|---|"]
        summary = "\n".join([*title, *header, *table]) + "\n"
        (args.output / "summary.txt").write_text(summary)
        print(table[-1], flush=True)
    print(f"\nTo paste, from {args.output / 'summary.txt'}:\n\n{summary}", flush=True)
    if stopped is not None:
        raise stopped


if __name__ == "__main__":
    main()
