"""The products of a decoding step on a CPU: one product per weight (`nn.Linear`) against blocks of its outputs.

    python benchmarks/decoding_products.py [--threads 2] [--hidden 576] [--intermediate 1536] [--vocabulary 49152]
                                           [--rows 2 8 16 64 128 256] [--rounds 15] [--out benchmarks/results]

The shapes are SmolLM2-135M's by default. Each of 30 layers has a weight of its own, as in a model, so that caches do not flatter;
the head is one. Rounds alternate; the figure is the ratio of the medians, in wall seconds: run it with nothing beside it. It
is what `BLOCK`, `FEW_ROWS` and `MANY_WEIGHTS` of trl_fsdp_qlora/rollout/decoding_weights.py were chosen by.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import linear

from trl_fsdp_qlora.rollout.decoding_weights import blocks_of, product_in_blocks
from trl_fsdp_qlora.run.manifest import write_json

LAYERS = 30


def measure(outputs: int, inputs: int, rows: int, layers: int, rounds: int) -> dict:
    """Milliseconds per product, medians, of both ways on the same weights."""
    weights = [torch.randn(outputs, inputs) for _ in range(layers)]
    blocks = [blocks_of(weight) for weight in weights]
    x = torch.randn(rows, inputs)
    ways = {
        "one_product_ms": lambda: [linear(x, weight) for weight in weights],
        "blocks_ms": lambda: [product_in_blocks(x, *pair, None) for pair in zip(weights, blocks, strict=True)],
    }
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    point = {name: 1000 * statistics.median(values[1:]) / layers for name, values in seconds.items()}
    return {
        "outputs": outputs,
        "inputs": inputs,
        "rows": rows,
        **point,
        "ratio": point["one_product_ms"] / point["blocks_ms"],
    }


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8, 16, 64, 128, 256])
    parser.add_argument("--rounds", type=int, default=15, help="the first is thrown away")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shapes = [
        (args.vocabulary, args.hidden, 1),
        (args.intermediate, args.hidden, LAYERS),
        (args.hidden, args.intermediate, LAYERS),
        (args.hidden, args.hidden, LAYERS),
    ]
    points = []
    for outputs, inputs, layers in shapes:
        for rows in args.rows:
            points.append(measure(outputs, inputs, rows, layers, args.rounds))
            line = "{outputs:>6} x {inputs:<5} {rows:>4} rows  {one_product_ms:7.3f} {blocks_ms:7.3f} ms  {ratio:.2f}x"
            print(line.format(**points[-1]), flush=True)
    result = {"threads": args.threads, "torch": torch.__version__, "machine": platform.machine(), "points": points}
    write_json(args.out / "decoding_products.json", result)


if __name__ == "__main__":
    main()
