"""Products of linear layers on a CPU: torch's own (MKL on x86) against oneDNN's, forward and backward.

    python benchmarks/onednn_products.py [--threads 2] [--hidden 576] [--intermediate 1536] [--vocabulary 49152]
                                      [--rows 1 16 64 256 1600] [--rounds 9] [--out benchmarks/results]

The shapes are SmolLM2-135M's by default: 16 rows are a decoding step, 1,600 a packed micro-batch. Each of 30 layers has a weight
of its own, as in a model, so that caches do not flatter; the head is one. Rounds alternate; the figure is the ratio of the
medians, in wall seconds: run it with nothing beside it. It is what trl_fsdp_qlora/scoring/cpu_linear.py stands on; on an Intel processor it says whether it should be used there too.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import linear

from trl_fsdp_qlora.checkpoints.disk import write_json
from trl_fsdp_qlora.scoring.cpu_linear import product

LAYERS = 30


def measure(outputs: int, inputs: int, rows: int, layers: int, rounds: int) -> dict:
    """Milliseconds per product, medians, of both libraries on the same weights: a layer's outputs, and its input's gradient."""
    weights = [torch.randn(outputs, inputs) for _ in range(layers)]
    x, grad = torch.randn(rows, inputs), torch.randn(rows, outputs)
    ways = {
        "outputs_torch_ms": lambda: [linear(x, weight) for weight in weights],
        "outputs_onednn_ms": lambda: [product(x, weight) for weight in weights],
        "gradient_torch_ms": lambda: [grad @ weight for weight in weights],
        "gradient_onednn_ms": lambda: [product(grad, weight.t()) for weight in weights],
    }
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    point = {name: 1000 * statistics.median(values[1:]) / layers for name, values in seconds.items()}
    ratios = {
        f"{kind}_ratio": point[f"{kind}_torch_ms"] / point[f"{kind}_onednn_ms"] for kind in ("outputs", "gradient")
    }
    return {"outputs": outputs, "inputs": inputs, "rows": rows, **point, **ratios}


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--intermediate", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1600])
    parser.add_argument("--rounds", type=int, default=9, help="the first is thrown away")
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
            line = (
                "{outputs:>6} x {inputs:<5} {rows:>4} rows  outputs {outputs_torch_ms:7.3f} {outputs_onednn_ms:7.3f} ms "
                "{outputs_ratio:.2f}x  gradient {gradient_torch_ms:7.3f} {gradient_onednn_ms:7.3f} ms {gradient_ratio:.2f}x"
            )
            print(line.format(**points[-1]), flush=True)
    result = {"threads": args.threads, "torch": torch.__version__, "machine": platform.machine(), "points": points}
    write_json(args.out / "onednn_products.json", result)


if __name__ == "__main__":
    main()
