"""Memory of a trainer and its vLLM engine with one copy of the base and with two, and whether both compute the same.

    .venv-vllm/bin/python benchmarks/one_base.py --model DIR_OR_HUB_ID

Each line is a process of its own: the engine alone, trainer and engine with a base each, and with one base; with the
base in `--dtype`, and in 4 bits with double quantization. A random adapter is trained on all linear layers. Bytes are
those of weights, and what the process holds beyond what it held after its imports (VmRSS after start, VmHWM at most).
Then the engine draws `--tokens` tokens at temperature 1, and their log-probabilities are compared with the trainer's.

On a CPU the peak has two things that are no matter of engines: what safetensors maps of a file stays until its last
tensor is freed, and glibc keeps freed layers in its heap. With `--unmapped` the trainer's weights are copied out of
the file first, glibc gives large tensors back, and the peak is that of the engine's start.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

# Before vLLM is imported.
for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

WAYS = ("alone", "off", "on")
LENGTH = 256


def resident() -> dict[str, float]:
    """GB that this process holds now, and has held at most."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) * 1024 / 1e9 for name in ("VmRSS", "VmHWM")}


def weight_bytes(*models) -> int:
    """Bytes of what models hold, storages of several once; without adapters. Quantization states are counted."""
    storages = {}
    for model in models:
        for name, tensor in model.state_dict(keep_vars=True).items():
            if "lora_" not in name:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def measure(model: str, dtype: str, in_4_bits: bool, way: str, tokens: int, unmapped: bool) -> dict:
    import torch
    import vllm
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl import GRPOTrainer  # noqa: F401

    from trl_fsdp_qlora.engines.vllm.engine import start_engine
    from trl_fsdp_qlora.experimental.one_base import shared_base
    from trl_fsdp_qlora.fsdp2_qlora.loading import keep_plain_kernel

    if not torch.cuda.is_available():
        # vLLM's products on CPUs are of another layout; those of one base and of two shall be the same.
        vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = shared_base._plain_product
    tokenizer = AutoTokenizer.from_pretrained(model)
    kwargs = {"dtype": dtype, "num_gpu_blocks_override": 160}
    before = resident()
    if way == "alone":
        options = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 1, "max_num_seqs": 20, "block_size": 32}
        llm = vllm.LLM(model, enforce_eager=True, max_model_len=LENGTH, **options, **kwargs)
        after = resident()
        return {"weights": weight_bytes(engine_model(llm)) / 1e9, **difference(after, before)}
    config = None
    if in_4_bits:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, quantization_config=config)
    if unmapped:
        for parameter in base.parameters():
            parameter.data = parameter.data.clone()
        resident()
        Path("/proc/self/clear_refs").write_text("5")  # what it holds now is the most that it has held
    torch.manual_seed(0)
    policy = get_peft_model(base, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear")).eval()
    keep_plain_kernel(policy)
    with tempfile.TemporaryDirectory() as folder:
        args = SimpleNamespace(
            vllm_share_base=way,
            vllm_engine_kwargs=kwargs,
            vllm_adapter_dir=None,
            output_dir=folder,
            vllm_enable_sleep_mode=False,
        )
        engine = start_engine(
            args,
            None if way == "on" else "off",
            model=policy,
            accelerator=Accelerator(cpu=not torch.cuda.is_available()),
            processing_class=tokenizer,
            mode="colocate",
            temperature=1.0,
            max_model_length=LENGTH,
            max_num_seqs=20,
            max_completion_length=LENGTH // 2,
            gpu_memory_utilization=0.3,
        )
        after = resident()
        figures = {
            "weights": weight_bytes(engine_model(engine.llm), policy.get_base_model()) / 1e9,
            **difference(after, before),
        }
        if way == "on":
            figures["line"] = engine.shared_base.describe()
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.01)
        figures["nats"] = nats(policy, engine, tokenizer, tokens)
    return figures


def difference(after: dict, before: dict) -> dict[str, float]:
    return {name: after[name] - before["VmRSS"] for name in after}


def engine_model(llm):
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model


def nats(policy, engine, tokenizer, tokens: int) -> dict[str, float]:
    """How far the engine's log-probabilities of its own tokens are from the policy's."""
    import torch

    engine.sync_weights()
    differences = []
    first = 0
    while len(differences) < tokens:
        texts = [f"A shop sells {i} apples a day. How many in {i + 2} days?" for i in range(first, first + 20)]
        prompts = [tokenizer(text)["input_ids"] for text in texts]
        _, completions, logps, _ = engine.generate(prompts, None, 1)
        for prompt, completion, sampled in zip(prompts, completions, logps, strict=True):
            with torch.no_grad():
                ids = torch.tensor([[*prompt, *completion]], device=policy.device)
                scores = policy(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            chosen = scores.gather(1, torch.tensor(completion, device=policy.device)[:, None])[:, 0]
            differences += (torch.tensor([row[0] for row in sampled]) - chosen.cpu()).abs().tolist()
        first += 20
    differences = differences[:tokens]
    return {"tokens": len(differences), "mean": sum(differences) / len(differences), "max": max(differences)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--unmapped", action="store_true", help="peaks without the checkpoint's mapped file")
    parser.add_argument("--output", help="a JSON file")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        in_4_bits, way = args.child
        print("\n" + json.dumps(measure(args.model, args.dtype, in_4_bits == "True", way, args.tokens, args.unmapped)))
        return
    rows = []
    print(f"| base | engine | weights GB | held GB | peak GB | nats of {args.tokens} tokens, mean | max |")
    print("|---|---|---|---|---|---|---|")
    for in_4_bits, way in [(False, "alone"), (False, "off"), (False, "on"), (True, "off"), (True, "on")]:
        command = [sys.executable, __file__, "--model", args.model, "--dtype", args.dtype]
        command += ["--unmapped"] if args.unmapped else []
        command += ["--tokens", str(args.tokens), "--child", str(in_4_bits), way]
        environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "1000000"} if args.unmapped else {})}
        run = subprocess.run(command, capture_output=True, text=True, env=environment)
        if run.returncode:
            sys.exit(run.stderr[-4000:])
        figures = json.loads(run.stdout.splitlines()[-1])
        rows.append({"in_4_bits": in_4_bits, "way": way, **figures})
        what = {"alone": "alone, no trainer", "off": "a base each", "on": "one base"}[way]
        found = figures.get("nats", {"mean": float("nan"), "max": float("nan")})
        print(
            f"| {'4 bits' if in_4_bits else args.dtype} | {what} | {figures['weights']:.3f} | "
            f"{figures['VmRSS']:.3f} | {figures['VmHWM']:.3f} | {found['mean']:.1e} | {found['max']:.1e} |",
            flush=True,
        )
    if args.output:
        Path(args.output).write_text(json.dumps({"dtype": args.dtype, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
