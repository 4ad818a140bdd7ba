"""LM head, forward and backward, on the same scored positions: the frozen-head kernel compared with TRL's.

    python benchmarks/lm_head.py [--threads 2] [--device cpu] [--dtype float32] [--tokens 1024] [--hidden 896]
                                 [--vocabularies 49152 151936] [--rounds 3] [--output benchmarks/results/lm_head.json]

Both get the same hidden states and targets, so nothing is won here by projecting fewer positions (on a CPU stock TRL
projects every position of the padded batch, prompts included). Rounds alternate and the figure is the ratio of the
medians. Peak bytes are those allocated above what was there before the forward, as the allocator reports them. The
row of a kernel for which the GPU's memory is not enough has that reason, and the other kernel is still measured. The
file is written after every point.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import trl
from synthetic import peak_bytes, unless_out_of_memory

from trl_fsdp_qlora.compat.trl import ChunkedLogProbFunction
from trl_fsdp_qlora.scoring.frozen_head import FrozenHeadLogProbFunction

TRL_VOCABULARY_TILE = 8192


def ours(hidden_NH, weight_VH, targets_N):
    return FrozenHeadLogProbFunction.apply(hidden_NH, weight_VH, None, targets_N)[0]


def stock(hidden_NH, weight_VH, targets_N):
    outputs = ("log_probs", "entropy")
    return ChunkedLogProbFunction.apply(
        hidden_NH, weight_VH, None, targets_N, 1.0, TRL_VOCABULARY_TILE, None, 1.0, outputs
    )[0]


KERNELS = {"ours": ours, "trl": stock}


def forward_backward(score, hidden_NH, weight_VH, targets_N, upstream_N):
    hidden_NH = hidden_NH.detach().requires_grad_()
    log_probs_N = score(hidden_NH, weight_VH, targets_N)
    (log_probs_N * upstream_N).sum().backward()
    if hidden_NH.is_cuda:
        torch.cuda.synchronize()
    return log_probs_N.detach(), hidden_NH.grad


def compare(tokens: int, hidden: int, vocabulary: int, rounds: int, device: str, dtype: torch.dtype) -> dict:
    torch.manual_seed(0)
    hidden_NH = torch.randn(tokens, hidden, device=device, dtype=dtype)
    weight_VH = (torch.randn(vocabulary, hidden, device=device) * 0.05).to(dtype)
    targets_N = torch.randint(0, vocabulary, (tokens,), device=device)
    upstream_N = torch.randn(tokens, device=device)
    arguments = (hidden_NH, weight_VH, targets_N, upstream_N)
    scores = dict(KERNELS)
    seconds = {name: [] for name in scores}
    row = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary, "dtype": str(dtype).removeprefix("torch.")}
    results = first_calls(scores, arguments, row)
    for _ in range(rounds):
        for name, score in scores.items():
            start = time.perf_counter()
            forward_backward(score, *arguments)
            seconds[name].append(time.perf_counter() - start)
    for name, score in scores.items():
        row[f"seconds_{name}"] = statistics.median(seconds[name])
        row[f"peak_bytes_{name}"] = peak_bytes(lambda score=score: forward_backward(score, *arguments), device)
    if scores.keys() == KERNELS.keys():
        row["speedup"] = row["seconds_trl"] / row["seconds_ours"]
        (logps, stock_logps), (grad, stock_grad) = zip(results["ours"], results["trl"], strict=True)
        row["max_delta_log_prob"] = (logps.float() - stock_logps.float()).abs().max().item()
        apart = (grad.float() - stock_grad.float()).abs().max()
        row["max_delta_grad_relative"] = (apart / stock_grad.float().abs().max()).item()
    return row


def first_calls(scores: dict, arguments: tuple, row: dict) -> dict:
    """Call each kernel once, which compiles it, and return the values to compare.

    A kernel that runs out of memory is removed from `scores` and noted in `row`.
    """
    results = {}
    for name, score in list(scores.items()):
        result = unless_out_of_memory(name, lambda score=score: forward_backward(score, *arguments))
        if result is None:
            row["out_of_memory"] = [*row.get("out_of_memory", []), name]
            del scores[name]
        else:
            results[name] = result
    return results


def compare_if_it_fits(tokens: int, vocabulary: int, args) -> dict:
    """[`compare`], or a row with the reason if not even the kernels' inputs fit into the GPU's memory."""
    dtype = getattr(torch, args.dtype)
    row = unless_out_of_memory(
        f"N {tokens}, V {vocabulary}",
        lambda: compare(tokens, args.hidden, vocabulary, args.rounds, args.device, dtype),
    )
    point = {"tokens": tokens, "hidden": args.hidden, "vocabulary": vocabulary, "dtype": args.dtype}
    return point | {"out_of_memory": list(KERNELS)} if row is None else row


def line(row: dict) -> str:
    """Returns the row of the printed table. A kernel without a figure has a dash; the row ends in the reason."""

    def cell(key: str, form: str, width: int, scale: float = 1.0) -> str:
        return format(f"{row[key] * scale:{form}}" if key in row else "-", f">{width}")

    timed = [cell("seconds_ours", ".4f", 9), cell("seconds_trl", ".4f", 9), cell("speedup", ".2f", 8)]
    peaks = [cell(f"peak_bytes_{name}", ".1f", 8, 1e-6) for name in KERNELS]
    apart = [cell("max_delta_log_prob", ".1e", 9), cell("max_delta_grad_relative", ".1e", 9)]
    missing = [f"out of memory: {', '.join(row['out_of_memory'])}"] if "out_of_memory" in row else []
    cells = [f"{row['tokens']:6d} {row['vocabulary']:6d}", " ".join(timed), " ".join(peaks), " ".join(apart)]
    return " | ".join(cells) + "".join(f"  {reason}" for reason in missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "lm_head.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU"
    report = {"torch": torch.__version__, "trl": trl.__version__, "hardware": hardware, "threads": args.threads}
    report["rows"] = []
    print("     N      V |    ours s     TRL s  speedup |  ours MB   TRL MB |    Δlogp Δgrad/max")
    for tokens in args.tokens:
        for vocabulary in args.vocabularies:
            row = compare_if_it_fits(tokens, vocabulary, args)
            report["rows"].append(row)
            print(line(row), flush=True)
            # After every point: there may be no time for the next.
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
