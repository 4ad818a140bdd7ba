"""Everything that only a GPU can show, one part after the other, as long as `--minutes` lasts.

    python benchmarks/gpu.py --output DIR [--model FOLDER --data SVAMP.json] [--only equality ...] [--minutes 9]

Parts, those worth most first:

    equality         log-probabilities in nats and gradients on packed rows and on padded rows, in bf16, each next to
                     float32, in the shape of Qwen3-0.6B
    steps_0.6B       seconds and bytes of whole optimizer steps and of their passes, stock TRL and this package, with
                     LoRA; steps_1.7B the same for Qwen3-1.7B, and qlora from a 4-bit base
    lm_head          bf16 log-probabilities under a frozen head compared with TRL's kernel: wanted >= 1.25x
    launches         launches, waits and seconds of a step of Qwen3-4B with LoRA, next to what was counted without a
                     GPU (docs/launches.md)
    tests            the tests marked `gpu` that are quick
    grpo             SmolLM2-135M-Instruct on SVAMP, LoRA, bf16           (needs --model and --data)
    slow_tests       the tests marked `gpu` that are slow: launches of a recipe and of every accelerate config

A part has a process group and a share of the time of its own: one that fails, hangs or runs out of memory costs its
own share alone. `--output` gets each part's log and results, and `summary.txt`, a table to paste: the commit, card,
driver and versions, what was predicted, what was measured, and how each part ended. `--rehearse` prints the commands
and runs none; `--tiny` runs all in small sizes, for a rehearsal on the emulated device (tests/emulated_gpu).
"""

import argparse
import hashlib
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


def parts(model: str | None, data: str | None, output: Path, tiny: bool = False) -> dict[str, tuple[float, str]]:
    """Returns the seconds that each part may take, and its arguments of Python; those worth most first."""
    # The shares are a card's; a rehearsal runs on a processor, and next to other work.
    patience = 10 if tiny else 1
    tests = "-m pytest -v -p no:cacheprovider -m"
    steps = "benchmarks/gpu_steps.py steps --tiny" if tiny else "benchmarks/gpu_steps.py steps"
    head = "--tokens 64 --hidden 64 --vocabularies 512 --rounds 1" if tiny else "--rounds 20 --tokens 1024 8192"
    commands = {
        "equality": (60, f"benchmarks/gpu_steps.py equality{' --tiny' * tiny}"),
        "steps_0.6B": (90, f"{steps} --shape 0.6B"),
        "steps_1.7B": (120, f"{steps} --shape 1.7B"),
        "lm_head": (60, f"benchmarks/lm_head.py --device cuda --dtype bfloat16 {head} --output {output}/lm_head.json"),
        "qlora": (120, f"{steps} --shape 1.7B --four_bit"),
        "launches": (
            120,
            "benchmarks/launches.py --next_to benchmarks/results/launches.json --only Qwen3-4B "
            f"--seconds {60 * patience} {'--layers 1 ' * tiny}--output {output}/launches.json",
        ),
        "tests": (
            120,
            f"{tests} 'gpu and not slow'" + " tests/fsdp2_qlora/test_packed_linear.py" * tiny,
        ),
    }
    if model and data:
        run = f"{RECIPE} --model_name_or_path {model} --dataset {data} --output_dir {output}/run-grpo"
        commands["grpo"] = (120, run)
    if not tiny:
        commands["slow_tests"] = (600, f"{tests} 'gpu and slow'")
    return {name: (patience * share, command) for name, (share, command) in commands.items()}


def setting() -> list[str]:
    """Lines that say what was measured with: commit, card, driver, versions, and a hash of them all."""
    import torch

    def output_of(*command: str) -> str:
        try:
            return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    card = torch.cuda.get_device_properties(0)
    memory = f"{card.total_memory / 2**30:.0f} GiB, compute capability {card.major}.{card.minor}"
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
    packages = ("torch", "triton", "transformers", "trl", "peft", "bitsandbytes")
    lines = [
        f"commit {output_of('git', 'rev-parse', 'HEAD') or 'unknown'}"
        + ", changed" * bool(output_of("git", "status", "--short")),
        f"{torch.cuda.device_count()} × {card.name}, {memory}, driver {driver or 'unknown'}",
        ", ".join(f"{name} {version(name)}" for name in packages)
        + f", CUDA {torch.version.cuda}, Python {sys.version.split()[0]}",
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
    return [*lines, f"hash of these lines: {digest}", ""]


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
    rows = [line for line in lines if line.startswith("| ")]
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")[:160].replace("|", "/")
    return [*rows, f"| {name} | | {ended} after {time.monotonic() - started:.0f} s: {last} |"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="SVAMP.json")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of every part in small sizes")
    parser.add_argument("--rehearse", action="store_true", help="print the commands and run none")
    args = parser.parse_args()
    output = args.output.resolve()
    chosen = parts(args.model, args.data, output, args.tiny)
    if unknown := set(args.only or ()) - chosen.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    chosen = {name: part for name, part in chosen.items() if not args.only or name in args.only}
    if args.rehearse:
        for name, (_, command) in chosen.items():
            print(f"{name}: python {command}")
        return
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --rehearse prints the commands")
    output.mkdir(parents=True, exist_ok=True)
    # Without this a scheduler that ends this process would leave its part on the GPU.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    deadline = time.monotonic() + 60 * args.minutes
    table = [*setting(), "| part | predicted | measured |", "|---|---|---|"]
    for name, (share, command) in chosen.items():
        seconds = min(share, deadline - time.monotonic())
        rows = (
            run_part(name, command, output / f"{name}.log", seconds)
            if seconds > 5
            else [f"| {name} | | no time left |"]
        )
        table += rows
        # After each part: a call that is stopped leaves what it has.
        (output / "summary.txt").write_text("\n".join(table) + "\n")
        print(*rows, sep="\n", flush=True)
    print(f"\nTo paste, from {output / 'summary.txt'}:\n", *table, sep="\n")


if __name__ == "__main__":
    main()
