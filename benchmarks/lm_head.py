"""LM head, forward and backward: the frozen-head kernel against TRL's chunked kernel on the same scored positions.

    python benchmarks/lm_head.py [--threads 2] [--device cpu] [--dtype float32] [--tokens 1024] [--hidden 896]
                                 [--vocabularies 49152 151936] [--rounds 3] [--output benchmarks/results/lm_head.json]

Both kernels get the same hidden states and targets, so nothing is won here by projecting fewer positions (on a CPU
stock TRL projects every position of the padded batch, prompts included). Rounds alternate and the figure is the ratio
of the medians. Peak bytes are those allocated above what was there before the forward, as the allocator reports them.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import trl
from synthetic import peak_bytes

from trl_fsdp_qlora.scoring.frozen_head import FrozenHeadLogProbFunction
from trl_fsdp_qlora.upstream.trl import ChunkedLogProbFunction

TRL_VOCABULARY_TILE = 8192


def ours(hidden_NH, weight_VH, targets_N):
    return FrozenHeadLogProbFunction.apply(hidden_NH, weight_VH, None, targets_N)[0]


def stock(hidden_NH, weight_VH, targets_N):
    outputs = ("log_probs", "entropy")
    return ChunkedLogProbFunction.apply(
        hidden_NH, weight_VH, None, targets_N, 1.0, TRL_VOCABULARY_TILE, None, 1.0, outputs
    )[0]


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
    seconds = {"ours": [], "trl": []}
    results, peaks = {}, {}
    for name, score in (("ours", ours), ("trl", stock)):
        results[name] = forward_backward(score, *arguments)
    for _ in range(rounds):
        for name, score in (("ours", ours), ("trl", stock)):
            start = time.perf_counter()
            forward_backward(score, *arguments)
            seconds[name].append(time.perf_counter() - start)
    for name, score in (("ours", ours), ("trl", stock)):
        peaks[name] = peak_bytes(lambda score=score: forward_backward(score, *arguments), device)
    row = {"tokens": tokens, "hidden": hidden, "vocabulary": vocabulary, "dtype": str(dtype).removeprefix("torch.")}
    for name in seconds:
        row[f"seconds_{name}"] = statistics.median(seconds[name])
        row[f"peak_bytes_{name}"] = peaks[name]
    row["speedup"] = row["seconds_trl"] / row["seconds_ours"]
    difference = [(a.float() - b.float()).abs().max().item() for a, b in zip(*results.values(), strict=True)]
    row["max_delta_log_prob"] = difference[0]
    row["max_delta_grad_relative"] = difference[1] / results["trl"][1].float().abs().max().item()
    return row


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
    print("     N      V |    ours s     TRL s  speedup | ours MB  TRL MB | max Δlogp  max Δgrad/max")
    for tokens in args.tokens:
        for vocabulary in args.vocabularies:
            row = compare(tokens, args.hidden, vocabulary, args.rounds, args.device, getattr(torch, args.dtype))
            report["rows"].append(row)
            print(
                f"{tokens:6d} {vocabulary:6d} | {row['seconds_ours']:9.4f} {row['seconds_trl']:9.4f} "
                f"{row['speedup']:7.2f}x | {row['peak_bytes_ours'] / 1e6:7.1f} {row['peak_bytes_trl'] / 1e6:7.1f} | "
                f"{row['max_delta_log_prob']:.1e}  {row['max_delta_grad_relative']:.1e}",
                flush=True,
            )
            # After every point: there may be no time for the next.
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
