"""Everything that only a GPU can show, in one call, as long as `--minutes` lasts.

    python benchmarks/gpu.py --output DIR [--model FOLDER --data SVAMP.json] [--only tests lm_head ...] [--minutes 9]

Runs one part after the other and goes on when one fails; leaves each part's log, the results of the benchmarks and a
summary in `--output` (no folders in it, so that it can be copied whole). Parts, in this order:

    tests            the tests marked `gpu`
    lm_head          bf16 log-probabilities under a frozen head against TRL's kernel: wanted >= 1.25x
    prefix_sharing   packed against padded rows, flash attention, bf16
    token_selection  what subsets and skipping save
    grpo             SmolLM2-135M-Instruct on SVAMP, LoRA, bf16           (needs --model and --data)
    qlora            the same from a 4-bit base                           (needs --model and --data)

No GPU was at hand when it was written: it has only been rehearsed (`--rehearse`, which shows the commands).
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"


BENCHMARKS = {
    "lm_head": "benchmarks/lm_head.py --device cuda --dtype bfloat16 --rounds 20 --tokens 1024 8192 "
    "--output benchmarks/results/lm_head_cuda.json",
    "prefix_sharing": "benchmarks/prefix_sharing_speedup.py --device cuda --runs 5 --vocabulary 49152 --backends auto flex "
    "--output prefix_sharing_cuda",
    "token_selection": "benchmarks/token_selection_savings.py --device cuda --output token_selection_cuda",
}
RECIPE = (
    "-m accelerate.commands.launch --config_file accelerate_configs/single_gpu.yaml recipes/grpo.py "
    "--config recipes/SmolLM2-135M-Instruct/grpo/config_svamp.yaml --use_cpu false --bf16 true --max_steps 30 "
    "--max_completion_length 160 --eval_problems 300 --accuracy_batch_size 150"
)
RUNS = {"grpo": "", "qlora": "--load_in_4bit true --dtype bfloat16"}


def parts(model: str | None, data: str | None) -> dict[str, tuple[list[str], Path | None]]:
    """Command of each part, and the file of results it leaves in the repository."""
    found = {"tests": (["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider"], None)}
    for name, command in BENCHMARKS.items():
        found[name] = command.split(), RESULTS / f"{name}_cuda.json"
    if model and data:
        for name, more in RUNS.items():
            folder = REPOSITORY / "runs" / f"gpu-{name}"
            given = ["--model_name_or_path", model, "--dataset", data, "--output_dir", str(folder)]
            found[name] = [*RECIPE.split(), *more.split(), *given], folder / "metrics.json"
    return {name: ([sys.executable, *command], leaves) for name, (command, leaves) in found.items()}


def run_part(name: str, command: list[str], leaves: Path | None, output: Path, seconds: float) -> str:
    """Run one part with its log in `output`; what became of it, in a line."""
    started = time.monotonic()
    log = output / f"{name}.log"
    with log.open("w") as stream:
        try:
            code = subprocess.run(
                command, cwd=REPOSITORY, stdout=stream, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = "out of time"
    if leaves is not None and leaves.is_file():
        shutil.copy(leaves, output / f"{name}_{leaves.name}")
    last = next((line for line in reversed(log.read_text(errors="replace").splitlines()) if line.strip()), "")
    return f"{name}: {ended} after {time.monotonic() - started:.0f} s | {last[:160]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="SVAMP.json")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rehearse", action="store_true", help="print the commands and run none")
    args = parser.parse_args()
    chosen = parts(args.model, args.data)
    unknown = set(args.only or ()) - chosen.keys()
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(chosen)}")
    if args.only:
        chosen = {name: part for name, part in chosen.items() if name in args.only}
    if args.rehearse:
        for name, (command, _) in chosen.items():
            print(f"{name}: {shlex.join(command)}")
        return
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --rehearse prints the commands")
    args.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * args.minutes
    summary = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}"]
    for name, (command, leaves) in chosen.items():
        left = deadline - time.monotonic()
        summary.append(run_part(name, command, leaves, args.output, left) if left > 5 else f"{name}: no time left")
        print(summary[-1], flush=True)
        (args.output / "summary.txt").write_text("\n".join(summary) + "\n")


if __name__ == "__main__":
    main()
