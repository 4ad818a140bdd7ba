"""Launches and bytes of the LM head's kernels, forward and backward: counted on the emulated device, where no kernel runs.

    python benchmarks/lm_head_launches.py [--tokens 8192] [--hidden 896 3584] [--vocabulary 151936] [--dtype bfloat16]

Needs the emulated device of docs/gpu.md with `EMULATE_NUMBERS=int` (sizes without numbers) and `TRITON_INTERPRET=0`, without
`NO_TRITON`: Triton's kernels are compiled and launched on a driver that does nothing. Prints a table: matrix products, each of which
is a call of cuBLAS; launches of Triton's kernels; all other launches; bytes at the peak, above what was there before; and bytes that
are there between forward and backward. The kernels are those of benchmarks/lm_head.py, each called once before it is counted.
"""

import argparse
import ctypes

import torch
from lm_head import contestants, forward_backward
from synthetic import peak_bytes
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {"trl": "trl", "ours": "frozen", "fused": "fused"}  # as `lm_head_kernel` calls them
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in PRODUCTS
        return func(*args, **(kwargs or {}))


def launches() -> tuple[int, int]:
    """Of the CUDA runtime and, by Triton, of the driver; `AttributeError` or `OSError` where the device is not the emulated one."""
    runtime, driver = ctypes.CDLL(None).fake_counter, ctypes.CDLL("libcuda.so.1").fake_driver_launches
    runtime.restype = driver.restype = ctypes.c_long
    return runtime(0), driver()


def count(score, arguments: tuple) -> dict[str, int]:
    """Calls and bytes of one forward and backward."""
    forward_backward(score, *arguments)  # compiles, and allocates what stays
    before = launches()
    with Products() as products:
        forward_backward(score, *arguments)
    runtime, triton = (after - start for after, start in zip(launches(), before, strict=True))
    hidden_NH, *others = (arguments[0].detach().requires_grad_(), *arguments[1:3])
    there = torch.cuda.memory_allocated()
    log_probs_N = score(hidden_NH, *others)
    kept = torch.cuda.memory_allocated() - there
    del log_probs_N
    peak = peak_bytes(lambda: forward_backward(score, *arguments), "cuda")
    return {"products": products.count, "triton": triton, "other": runtime, "peak": peak, "kept": kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, nargs="+", default=[896, 3584])
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    try:
        launches()
    except (AttributeError, OSError):
        parser.error("launches are counted on the emulated device alone (docs/gpu.md)")
    dtype = getattr(torch, args.dtype)
    print("| kernel | H | calls of cuBLAS | launches of Triton kernels | other launches | peak MB | kept MB |")
    print("|---|---|---|---|---|---|---|")
    for hidden in args.hidden:
        arguments = (
            torch.empty(args.tokens, hidden, device="cuda", dtype=dtype),
            torch.empty(args.vocabulary, hidden, device="cuda", dtype=dtype),
            torch.zeros(args.tokens, device="cuda", dtype=torch.long),
            torch.empty(args.tokens, device="cuda"),
        )
        scores = contestants("cuda", dtype)
        for key, name in NAMES.items():
            if key not in scores:
                continue
            found = count(scores[key], arguments)
            peak, kept = (f"{found[key] / 1e6:.0f}" for key in ("peak", "kept"))
            calls = " | ".join(f"{found[key]:,}" for key in ("products", "triton", "other"))
            print(f"| `{name}` | {hidden} | {calls} | {peak} | {kept} |", flush=True)


if __name__ == "__main__":
    main()
