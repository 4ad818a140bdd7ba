"""Everything that only a GPU can show, one part after the other, as long as `--minutes` lasts.

    python benchmarks/gpu.py --output DIR [--model FOLDER --data SVAMP.json] [--only tests lm_head ...] [--minutes 9]

Parts, in this order:

    launches         launches, waits and seconds of a step of Qwen3-4B with LoRA, stock TRL's and this package's, next
                     to what was counted without a GPU (docs/launches.md)
    tests            the tests marked `gpu` that are quick
    prefix_sharing   packed rows compared with padded rows, flash attention, bf16, the shape of Qwen3-0.6B
    lm_head          bf16 log-probabilities under a frozen head compared with TRL's kernel: wanted >= 1.25x
    grpo             SmolLM2-135M-Instruct on SVAMP, LoRA, bf16           (needs --model and --data)
    qlora            the same from a 4-bit base                           (needs --model and --data)
    slow_tests       the tests marked `gpu` that are slow: launches of a recipe and of every accelerate config

A part that fails does not end the others. `--output` gets each part's log and results, and `summary.txt`, a table to
paste: what was predicted, what was measured, and how each part ended. A part has a process group of its own, which is
ended when its time is over, so that nothing keeps the GPU. `--rehearse` prints the commands and runs none.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RECIPE = (
    "-m accelerate.commands.launch --config_file accelerate_configs/single_gpu.yaml recipes/grpo.py "
    "--config recipes/SmolLM2-135M-Instruct/grpo/config_svamp.yaml --use_cpu false --bf16 true "
    "--max_steps 30 --max_completion_length 160 --eval_problems 300 --accuracy_batch_size 150"
)


def parts(model: str | None, data: str | None, output: Path) -> dict[str, str]:
    """Returns the arguments of Python for each part."""
    tests = "-m pytest -v -p no:cacheprovider -m"
    commands = {
        "launches": "benchmarks/launches.py --next_to benchmarks/results/launches.json --only Qwen3-4B --seconds 100 "
        f"--output {output}/launches.json",
        "tests": f"{tests} 'gpu and not slow'",
        "prefix_sharing": "benchmarks/prefix_sharing_speedup.py --device cuda --runs 5 --vocabulary 49152 "
        f"--backends auto --output {output}/prefix_sharing",
        "lm_head": "benchmarks/lm_head.py --device cuda --dtype bfloat16 --rounds 20 --tokens 1024 8192 "
        f"--output {output}/lm_head.json",
    }
    if model and data:
        run = f"{RECIPE} --model_name_or_path {model} --dataset {data} --output_dir {output}/run"
        commands["grpo"] = f"{run}-grpo"
        commands["qlora"] = f"{run}-qlora --load_in_4bit true --dtype bfloat16"
    return {**commands, "slow_tests": f"{tests} 'gpu and slow'"}


def end_group(process: subprocess.Popen) -> None:
    """End a process and everything that it started. An interrupt comes first: pytest then prints what has failed."""
    for ending in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, ending)
            process.wait(timeout=10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def run_part(name: str, command: str, log: Path, seconds: float) -> list[str]:
    """Run a part with its output in `log`; returns its rows of the table."""
    started = time.monotonic()
    with log.open("w") as stream:
        arguments = [sys.executable, *shlex.split(command)]
        process = subprocess.Popen(
            arguments, cwd=REPOSITORY, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = "out of time"
        finally:
            end_group(process)
    lines = log.read_text(errors="replace").splitlines()
    rows = [line for line in lines if line.startswith("|")] if name == "launches" else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")[:160].replace("|", "/")
    return [*rows, f"| {name} | | {ended} after {time.monotonic() - started:.0f} s: {last} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="SVAMP.json")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rehearse", action="store_true", help="print the commands and run none")
    args = parser.parse_args()
    output = args.output.resolve()
    chosen = parts(args.model, args.data, output)
    if unknown := set(args.only or ()) - chosen.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    chosen = {name: command for name, command in chosen.items() if not args.only or name in args.only}
    if args.rehearse:
        for name, command in chosen.items():
            print(f"{name}: python {command}")
        return
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --rehearse prints the commands")
    output.mkdir(parents=True, exist_ok=True)
    # Without this a scheduler that ends this process would leave its part on the GPU.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    deadline = time.monotonic() + 60 * args.minutes
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "bitsandbytes"))
    table = [f"{torch.cuda.get_device_name()}, {versions}", ""]
    # `launches` prints a header of its own, with the card that it predicts for.
    if "launches" not in chosen:
        table += ["| part | predicted | measured |", "|---|---|---|"]
    for number, (name, command) in enumerate(chosen.items(), start=1):
        left = deadline - time.monotonic()
        seconds = left if number == len(chosen) else left / 2
        rows = (
            run_part(name, command, output / f"{name}.log", seconds) if left > 5 else [f"| {name} | | no time left |"]
        )
        table += rows
        # After each part: a call that is stopped leaves what it has.
        (output / "summary.txt").write_text("\n".join(table) + "\n")
        print(rows[-1], flush=True)
    print(f"\nTo paste, from {output / 'summary.txt'}:\n", *table, sep="\n")


if __name__ == "__main__":
    main()
