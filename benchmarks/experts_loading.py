"""Peak host memory of loading a mixture of experts in 4 bits, on each of N ranks, from a checkpoint of random weights.

    python benchmarks/experts_loading.py --gigabytes 4 --ranks 2

Prints, for each rank, the peak of its anonymous memory above what it had before (pages of the mapped checkpoint are the disk
cache's), beside the bytes of the packed model and of one layer's experts in 16 bits. On one rank the whole model is loaded; on
several each rank calls `load_quantized_base` as under FSDP2, where the first reads and the others build the empty model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3MoeConfig

HIDDEN, INTERMEDIATE, EXPERTS = 1024, 512, 64
LAUNCH = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
LAYER_BYTES = 2 * EXPERTS * 3 * HIDDEN * INTERMEDIATE


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    """As Qwen3-MoE's checkpoints lie on a disk: a tensor for each projection of each expert."""
    layers = max(1, round(gigabytes * 1e9 / LAYER_BYTES))
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=1024,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    weight_map = {}
    for part in [*(f"model.layers.{i}." for i in range(layers)), ""]:
        tensors = {}
        for name, shape in shapes.items():
            if (part and not name.startswith(part)) or (not part and ".layers." in name):
                continue
            if name.endswith("experts.gate_up_proj"):
                for i in range(EXPERTS):
                    for which in ("gate_proj", "up_proj"):
                        tensors[name.replace("gate_up_proj", f"{i}.{which}.weight")] = (INTERMEDIATE, HIDDEN)
            elif name.endswith("experts.down_proj"):
                tensors |= {
                    name.replace("down_proj", f"{i}.down_proj.weight"): (HIDDEN, INTERMEDIATE) for i in range(EXPERTS)
                }
            else:
                tensors[name] = shape
        file = f"model-{part or 'rest'}.safetensors".replace("model.layers.", "")
        save_file(
            {n: (torch.randn(s) * 0.02).bfloat16() for n, s in tensors.items()},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def anonymous() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def load(folder: str) -> None:
    """What one rank does; prints a line of JSON."""
    from trl_fsdp_qlora.fsdp2_qlora.experts import packed_experts
    from trl_fsdp_qlora.fsdp2_qlora.loading import load_quantized_base

    PartialState(cpu=True)
    start, done, peak = anonymous(), threading.Event(), [0]

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = load_quantized_base(folder, quantization, dtype=torch.bfloat16)
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    held = sum(p.numel() * p.element_size() for p in model.parameters() if not p.is_meta)
    experts = sum(getattr(m, name).numel() for m in packed_experts(model).values() for name in m.layouts)
    row = {"rank": int(os.environ.get("RANK", 0)), "peak": peak[0] - start, "held": held, "packed_experts": experts}
    print("ROW", json.dumps({**row, "seconds": seconds}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        return load(args.load)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), args.gigabytes)
        base = {**os.environ, "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--load", folder],
                env={**base, "RANK": str(r), "LOCAL_RANK": str(r), **LAUNCH},
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(args.ranks)
        ]
        rows = []
        for process in ranks:
            out, _ = process.communicate()
            rows += [json.loads(line[4:]) for line in out.splitlines() if line.startswith("ROW ")]
    for row in rows:
        limit = row["held"] + 2 * LAYER_BYTES + 0.5e9
        print(
            f"rank {row['rank']}: peak {row['peak'] / 1e9:.2f} GB, held {row['held'] / 1e9:.2f} GB; packed + two layers in 16 bits "
            f"({2 * LAYER_BYTES / 1e9:.2f} GB) + 0.5 GB is {limit / 1e9:.2f} GB; {row['seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
