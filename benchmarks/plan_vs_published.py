"""Planned memory next to what others published for real cards: TRL's notebook `grpo_trl_lora_qlora.ipynb` on a T4.

    python benchmarks/plan_vs_published.py     # the table of docs/plan.md; needs no weights, no GPU, under a minute

The notebook's settings: nf4 with double quantization, dtype float32, LoRA r=32 on seven layers, eight rows = one
group, completions of up to 256 tokens, gradient checkpointing, paged 8-bit AdamW, transformers generates. It prints
what torch's allocator has reserved, which knows no CUDA context, so the plan's is left out. Its prompts (a system
prompt and a problem of NuminaMath-TIR) have no limit: the plan is for 256 tokens. With float32, embeddings and head of
Qwen2-7B and its 4-bit weights alone are 7.2 GiB, and the notebook printed 6.77 before training: that run had them in
16 bits, so this is planned as well.
"""

import argparse
import tempfile

from transformers import Lfm2Config, LlamaConfig, Qwen2Config, Qwen3Config

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.planning.hardware import GIB, read_hardware
from trl_fsdp_qlora.tools.planning.plan import PROCESS, make_plan
from trl_fsdp_qlora.tools.planning.settings import from_words, read_launch

_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936, "architectures": ["Qwen3ForCausalLM"]}
MODELS = {
    "Qwen2-7B-Instruct": Qwen2Config(
        architectures=["Qwen2ForCausalLM"], hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False,
    ),
    "Llama-3.1-8B": LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
        max_position_embeddings=131072,
    ),
    "Qwen3-8B": Qwen3Config(
        **_QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "Qwen3-14B": Qwen3Config(
        **_QWEN3, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        tie_word_embeddings=False,
    ),
    "LFM2.5-1.2B": Lfm2Config(
        architectures=["Lfm2ForCausalLM"], hidden_size=2048, intermediate_size=12288, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=65536, full_attn_idxs=[2, 5, 8, 10, 12, 14],
        tie_word_embeddings=True,
    ),
}  # fmt: skip
# GiB at the peak; `None` did not fit.
PUBLISHED = {
    "Qwen2-7B-Instruct": 8.83,
    "Llama-3.1-8B": 9.5,
    "Qwen3-8B": 9.9,
    "Qwen3-14B": None,
    "LFM2.5-1.2B": 1.12,
}
FIELDS = {
    "load_in_4bit": "true",
    "use_bnb_nested_quant": "true",
    "use_peft": "true",
    "lora_r": "32",
    "per_device_train_batch_size": "8",
    "num_generations": "8",
    "max_completion_length": "256",
    "gradient_checkpointing": "true",
    "optim": "paged_adamw_8bit",
    "fp16": "true",
    "bf16": "false",
}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STOCK = {"prefix_sharing": "off", "compact_generation": "false"}


def planned(name: str, dtype: str, prompt_tokens: int):
    """The plan of stock TRL on a T4."""
    folder = tempfile.mkdtemp()
    MODELS[name].save_pretrained(folder)
    fields = {"model_name_or_path": folder, "dtype": dtype, **FIELDS, **STOCK}
    words = [word for field, value in fields.items() for word in (f"--{field}", value)]
    words += ["--lora_target_modules", *LAYERS]
    settings = from_words(words, EfficientGRPOConfig, read_launch(None), prompt_tokens=prompt_tokens)
    return make_plan(settings, read_hardware("t4"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt_tokens", type=int, default=256)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    args = parser.parse_args()
    print("| model | published | planned, embeddings in 16 bits | off by | planned, in float32 |")
    print("|---" * 5 + "|")
    for name in args.models:
        plans = [planned(name, dtype, args.prompt_tokens) for dtype in ("float16", "float32")]
        # The notebook printed what the allocator holds, without the CUDA context.
        peaks = [max(sum(parts.values()) - parts[PROCESS] for parts in plan.phases.values()) / GIB for plan in plans]
        published = PUBLISHED[name]
        off = "" if published is None else f"{100 * (peaks[0] / published - 1):+.0f}%"
        cells = [
            f"{peak:.2f}" + ("" if plan.fits else ", does not fit") for peak, plan in zip(peaks, plans, strict=True)
        ]
        print(f"| {name} | {published or 'out of memory'} | {cells[0]} | {off} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
