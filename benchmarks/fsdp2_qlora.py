"""What two ranks hold, move and spend with a sharded 4-bit base, against bf16 FSDP2 and against a replicated base.

    OMP_NUM_THREADS=1 python benchmarks/fsdp2_qlora.py [--output benchmarks/results/fsdp2_qlora.json]

Two gloo processes on the CPU, a Qwen3-like model of 21M parameters. Prints a table and writes JSON:

- bytes of the base per rank, with and without double quantization, and the share of the quantization state;
- peak host memory of each rank while loading;
- bytes that one forward and backward moves between the ranks, packed 4-bit base against bf16 base, and what gathering
  once an optimizer step (`fsdp_keep_gathered`) saves under gradient accumulation;
- seconds to generate 64 tokens x 8: replicated, gathered once, gathered layer by layer (median of alternating rounds).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.fsdp_on_gloo import force_fsdp, fsdp_environment
from tests.distributed.launch import launch
from tests.fsdp2_qlora import tiny

SHAPE = {"hidden": 512, "layers": 7, "intermediate": 1536}
NEW_TOKENS, ROWS, ROUNDS, MICRO_BATCHES = 64, 8, 5, 4


def prepared(path: str, out: str, quantized: bool, double: bool = True, mixed_precision: str = "no"):
    """A model of the benchmark, sharded over the ranks of this launch; `(model, peak bytes while loading)`."""
    import psutil
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from trl_fsdp_qlora.fsdp2_qlora.loading import load_quantized_base
    from trl_fsdp_qlora.fsdp2_qlora.prepare import shard_quantized_base

    AcceleratorState._reset_state(reset_partial_state=False)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
    shard_quantized_base(accelerator)
    Path("/proc/self/clear_refs").write_text("5")
    start = psutil.Process().memory_info().rss
    if quantized:
        model = load_quantized_base(path, tiny.quantization(double), dtype="bfloat16")
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = get_peft_model(model, tiny.lora(r=8))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 - start
    torch.distributed.fsdp.register_fsdp_forward_method(model, "generate")
    return model, peak


def moved(model, keep: bool = False) -> dict:
    """Bytes this rank receives and sends in one optimizer step of `MICRO_BATCHES` micro-batches."""
    from trl_fsdp_qlora.fsdp2_qlora.communication import count_traffic
    from trl_fsdp_qlora.fsdp2_qlora.generation import keep_gathered

    ids = torch.randint(3, 60, (2, 32))
    traffic = count_traffic(model)
    for micro_batch in range(MICRO_BATCHES):
        last = micro_batch == MICRO_BATCHES - 1
        model.set_requires_gradient_sync(last)
        if keep:
            keep_gathered(model, last)
        model(input_ids=ids, labels=ids).loss.backward()
    taken = traffic.take()
    return {"gathers": taken.gathers, "gathered_bytes": taken.gathered_bytes, "reduced_bytes": taken.reduced_bytes}


def generate_seconds(model, context) -> float:
    ids = torch.arange(3, 3 + 16).repeat(ROWS, 1)
    torch.distributed.barrier()
    start = time.perf_counter()
    with context, torch.no_grad():
        model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)
    torch.distributed.barrier()
    return time.perf_counter() - start


def worker(path: str, out: str) -> None:
    from contextlib import nullcontext

    from trl_fsdp_qlora.fsdp2_qlora.generation import gathered, reshard

    force_fsdp()
    prepared(str(Path(out, "tiny")), out, quantized=True)  # what the runtime takes once, before memory is measured
    result = {}
    for name, double in (("double", True), ("single", False)):
        model, peak = prepared(path, out, quantized=True, double=double)
        base = model.base_bytes
        result[f"base_{name}"] = {**base.to_dict(), "state_share": base.state_full / base.quantized_full}
        if double:  # a second load would use memory that the first gave back
            result["peak_loading"] = peak
        if double:
            result["moved_4bit"] = moved(model)
            result["moved_4bit_kept"] = moved(model, keep=True)
            sharded = model
    whole_model = tiny.load(path, dtype=torch.bfloat16)
    for layer in whole_model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # the same kernels on both sides
    from peft import get_peft_model

    whole_model = get_peft_model(whole_model, tiny.lora(r=8)).train(False)
    result["moved_bf16"] = moved(prepared(path, out, quantized=False)[0])
    sharded, _ = prepared(path, out, quantized=True)
    sharded.train(False)
    seconds = {"replicated": [], "once": [], "per_layer": []}
    for round_ in range(ROUNDS + 1):
        for name, times in seconds.items():
            if name == "per_layer" and round_ > 2:
                continue
            model = whole_model if name == "replicated" else sharded
            elapsed = generate_seconds(model, gathered(model) if name == "once" else nullcontext())
            if round_:  # the first round warms up
                times.append(elapsed)
            if model is sharded:
                reshard(model)
    result["seconds"] = {name: statistics.median(times) for name, times in seconds.items()}
    result["parameters"] = sum(parameter.numel() for parameter in whole_model.get_base_model().parameters())
    Path(out, f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fsdp2_qlora.json")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.make_checkpoint(Path(folder, "model"), **SHAPE)
        tiny.make_checkpoint(Path(folder, "tiny"))
        launch(__file__, "--worker", model, folder, environment=fsdp_environment(), timeout=580)
        rank0, rank1 = (json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in (0, 1))
    report(rank0, rank1)
    packed, bf16 = rank0["moved_4bit"], rank0["moved_bf16"]
    summary = {
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, two gloo processes",
        "torch": torch.__version__,
        "shape": SHAPE,
        "moved_ratio": packed["gathered_bytes"] / bf16["gathered_bytes"],
        "rank0": rank0,
        "rank1": rank1,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(summary, indent=2) + "\n")


def report(rank0: dict, rank1: dict) -> None:
    mib = 2**20
    for name in ("double", "single"):
        base = rank1[f"base_{name}"]
        print(
            f"{name} quantization: {base['quantized_local'] / mib:.2f} of {base['quantized_full'] / mib:.2f} MiB a rank, "
            f"ratio {base['ratio']:.3f}, state {base['state_share']:.1%}"
        )
    base = rank1["base_double"]
    shard = base["quantized_local"] + base["other_local"]
    print(
        f"loading: rank 0 peaks at {rank0['peak_loading'] / mib:.1f} MiB, rank 1 at {rank1['peak_loading'] / mib:.1f} MiB "
        f"for a shard of {shard / mib:.1f} MiB"
    )
    bf16 = rank0["moved_bf16"]["gathered_bytes"]
    for name in ("moved_bf16", "moved_4bit", "moved_4bit_kept"):
        row = rank0[name]
        print(
            f"{name:16s} {MICRO_BATCHES} micro-batches: {row['gathers']:4d} gathers, {row['gathered_bytes'] / mib:8.2f} MiB "
            f"received ({row['gathered_bytes'] / bf16:.3f} of bf16), {row['reduced_bytes'] / mib:.2f} MiB of gradients sent"
        )
    replicated = rank0["seconds"]["replicated"]
    for name, seconds in rank0["seconds"].items():
        print(f"generate {NEW_TOKENS} x {ROWS}, {name:10s} {seconds:6.2f} s ({seconds / replicated:.2f} x replicated)")


if __name__ == "__main__":
    main()
