"""Bytes and seconds of two ranks with a sharded 4-bit base, next to bf16 FSDP2 and to a replicated base.

    OMP_NUM_THREADS=1 python benchmarks/sharded_base.py [--output benchmarks/results/sharded_base.json]

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
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, PeftModel, get_peft_model
from traffic import count_traffic
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

from trl_fsdp_qlora.fsdp2_qlora.generation import gathered, keep_gathered, reshard
from trl_fsdp_qlora.fsdp2_qlora.loading import load_quantized_base
from trl_fsdp_qlora.fsdp2_qlora.prepare import shard_quantized_base

SHAPE = {"hidden": 512, "layers": 7, "intermediate": 1536}
# The environment that `accelerate launch` makes of accelerate_configs/fsdp2_qlora.yaml.
LAUNCH = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_CPU": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
}
NEW_TOKENS, ROWS, ROUNDS, MICRO_BATCHES = 64, 8, 5, 4


def make_checkpoint(folder: Path, hidden: int = 64, layers: int = 2, intermediate: int = 128) -> str:
    """A Qwen3-architecture model with seeded weights; its folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def quantization(double: bool) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_quant_storage="uint8",
        bnb_4bit_compute_dtype="float32",
    )


def with_lora(model) -> PeftModel:
    lora = LoraConfig(r=8, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def fsdp_over_gloo() -> Accelerator:
    """An accelerator that shards on the CPU as it does on GPUs; by itself it would make plain DDP of it there."""
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    shard_quantized_base(accelerator)
    return accelerator


def prepared(accelerator: Accelerator, path: str, quantized: bool, double: bool = True):
    """A model of the benchmark, sharded over the ranks of this launch; `(model, peak bytes while loading)`."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark
    start = psutil.Process().memory_info().rss
    if quantized:
        model = load_quantized_base(path, quantization(double), dtype="bfloat16")
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = with_lora(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model, optimizer = accelerator.prepare(model, optimizer)
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 - start
    torch.distributed.fsdp.register_fsdp_forward_method(model, "generate")
    accelerator.free_memory()
    return model, peak


def bytes_moved(model, keep: bool = False) -> dict:
    """Bytes this rank receives and sends in one optimizer step of `MICRO_BATCHES` micro-batches."""
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
    accelerator = fsdp_over_gloo()
    prepared(
        accelerator, str(Path(out, "tiny")), quantized=True
    )  # what the runtime takes once, before memory is measured
    result = {}
    for name, double in (("double", True), ("single", False)):
        model, peak = prepared(accelerator, path, quantized=True, double=double)
        base = model.base_bytes
        result[f"base_{name}"] = {**base.to_dict(), "state_share": base.state_full / base.quantized_full}
        if double:  # a second load would use memory that the first gave back
            result["peak_loading"] = peak
        if double:
            result["moved_4bit"] = bytes_moved(model)
            result["moved_4bit_kept"] = bytes_moved(model, keep=True)
            sharded = model
    whole_model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=quantization(double=True)
    )
    for layer in whole_model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # the same kernels on both sides
    whole_model = with_lora(whole_model).train(False)
    result["moved_bf16"] = bytes_moved(prepared(accelerator, path, quantized=False)[0])
    sharded, _ = prepared(accelerator, path, quantized=True)
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
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "sharded_base.json")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "model"), **SHAPE)
        make_checkpoint(Path(folder, "tiny"))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        subprocess.run(
            [*torchrun, __file__, "--worker", model, folder], env={**os.environ, **LAUNCH}, timeout=900, check=True
        )
        rank0, rank1 = (json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in (0, 1))
    report(rank0, rank1)
    packed = rank0["moved_4bit"]
    bf16 = rank0["moved_bf16"]
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
            f"{name} quantization: {base['quantized_local'] / mib:.2f} of {base['quantized_full'] / mib:.2f} MiB "
            f"per rank, ratio {base['ratio']:.3f}, state {base['state_share']:.1%}"
        )
    base = rank1["base_double"]
    shard = base["quantized_local"] + base["other_local"]
    print(
        f"loading: rank 0 peaks at {rank0['peak_loading'] / mib:.1f} MiB, rank 1 at "
        f"{rank1['peak_loading'] / mib:.1f} MiB for a shard of {shard / mib:.1f} MiB"
    )
    bf16 = rank0["moved_bf16"]["gathered_bytes"]
    for name in ("moved_bf16", "moved_4bit", "moved_4bit_kept"):
        row = rank0[name]
        print(
            f"{name:16s} {MICRO_BATCHES} micro-batches: {row['gathers']:4d} gathers, "
            f"{row['gathered_bytes'] / mib:8.2f} MiB received ({row['gathered_bytes'] / bf16:.3f} of bf16), "
            f"{row['reduced_bytes'] / mib:.2f} MiB of gradients sent"
        )
    replicated = rank0["seconds"]["replicated"]
    for name, seconds in rank0["seconds"].items():
        print(f"generate {NEW_TOKENS} x {ROWS}, {name:10s} {seconds:6.2f} s ({seconds / replicated:.2f} x replicated)")


if __name__ == "__main__":
    main()
