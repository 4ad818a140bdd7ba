"""Plans next to the memory that others published of real cards, as their settings, one row each.

    python benchmarks/plan_vs_published.py [--only T4 3070 ...]

Nothing is fitted: a point has the settings that its source states, and what the source leaves open is the same for
all points of the source: the longest prompt (`OPEN`), and for the RTX 3070 which layers LoRA adapts. Their trainers
are TRL's, so plans are of padded rows (`prefix_sharing: off`) without tiles. Published figures are torch's counters
(allocated or reserved), which leave out the CUDA context, so the plan's "process" is left out, too; "GB" there is
2**30 bytes. Needs no GPU and no network.
"""

import argparse
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoConfig

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.planning.plan import plan_recipe

GIB = 2**30
QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151936}
SHAPES = {
    "Qwen2-7B": (
        "qwen2",
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "Qwen3-1.7B": (
        "qwen3",
        {
            **QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-4B": (
        "qwen3",
        {
            **QWEN3,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3-8B": (
        "qwen3",
        {
            **QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
        },
    ),
    "Qwen3-14B": (
        "qwen3",
        {
            **QWEN3,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
        },
    ),
    "Llama-3.1-8B": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "LFM2.5-1.2B": (
        "lfm2",
        {
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 65536,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "tie_word_embeddings": True,
        },
    ),
}
FOUR_BIT = {"load_in_4bit": "true", "use_bnb_nested_quant": "true", "use_peft": "true"}
FOUR_BIT |= {"lora_target_modules": "all-linear"}  # the seven layers of a block that TRL's notebook names
GROUP = {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 256}
TRL_NOTEBOOK = "huggingface/trl, examples/notebooks/grpo_trl_lora_qlora.ipynb"
T4 = {**GROUP, **FOUR_BIT, "dtype": "float16", "fp16": "true", "bf16": "false", "optim": "paged_adamw_8bit"}
T4 |= {"lora_r": 32, "gradient_accumulation_steps": 1}
NAIVE = {**GROUP, "dtype": "float16", "fp16": "false", "bf16": "false", "gradient_checkpointing": "false"}
NAIVE |= {"attn_implementation": "eager", "gradient_accumulation_steps": 1}
RTX_3070 = {**GROUP, **FOUR_BIT, "dtype": "bfloat16", "bf16": "true", "lora_r": 8, "max_completion_length": 96}
RTX_3070 |= {"gradient_accumulation_steps": 4}
# What the sources leave open: the longest prompt, in tokens.
OPEN = {"T4": 512, "A100": 512, "3070": 128}


@dataclass(frozen=True)
class Point:
    """`published` in GiB; a run that was out of memory has the card's GiB, and `fits` is false."""

    card: str
    model: str
    what: str
    published: float
    settings: dict = field(repr=False)
    source: str = TRL_NOTEBOOK
    fits: bool = True


POINTS = [
    Point("T4", "Qwen2-7B", "QLoRA r=32, fp16, 8 of 256; the run", 8.83, T4),
    Point("A100 40 GB", "Qwen2-7B", "the same settings, its table", 9.6, T4),
    Point("T4", "Qwen3-8B", "the same settings", 9.9, T4),
    Point("T4", "Llama-3.1-8B", "the same settings", 9.5, T4),
    Point("T4", "LFM2.5-1.2B", "the same settings", 1.12, T4),
    Point("T4", "Qwen3-14B", "the same settings", 14.7, T4, fits=False),
    Point("A100 80 GB", "Qwen2-7B", "full fp16 training, eager attention, no checkpointing", 62, NAIVE),
    Point("A100 40 GB", "Qwen2-7B", "the same settings", 39.5, NAIVE, fits=False),
    Point("RTX 3070", "Qwen3-1.7B", "QLoRA r=8, 8 of 96", 2.74, RTX_3070, "a run with TRL 1.12"),
    Point("RTX 3070", "Qwen3-4B", "the same settings", 4.10, RTX_3070, "a run with TRL 1.12"),
]


def planned(model: str, prompt: int, settings: dict, folder: Path) -> float:
    """GiB of `trl-fsdp-qlora plan`, less the CUDA context."""
    kind, fields = SHAPES[model]
    config = AutoConfig.for_model(kind, **{"tie_word_embeddings": False, "max_position_embeddings": 32768, **fields})
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.save_pretrained(folder)
    words = {"model_name_or_path": folder, "prefix_sharing": "off", "mlp_tokens_per_tile": "off", **settings}
    line = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    plan = plan_recipe(line, EfficientGRPOConfig, hardware="200GB", prompt_tokens=prompt)
    return (plan.peak - plan.phases[plan.limiting].get("process", 0)) / GIB


def row(point: Point) -> str:
    with tempfile.TemporaryDirectory() as folder:
        prompt = next(tokens for card, tokens in OPEN.items() if card in point.card)
        plan = planned(point.model, prompt, point.settings, Path(folder))
    if point.fits:
        published, verdict = f"{point.published:g}", f"{100 * (plan / point.published - 1):+.0f}%"
    else:
        published = f"out of memory ({point.published:g})"
        verdict = "right" if plan > point.published else "wrong"
    return f"| {point.card} | {point.model} | {point.what} | {published} | {plan:.2f} | {verdict} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="cards or models whose name has one of these")
    args = parser.parse_args()
    print("| card | model | settings | published, GiB | planned | error |", "|---|---|---|---|---|---|", sep="\n")
    for point in POINTS:
        if not args.only or any(word in f"{point.card} {point.model}" for word in args.only):
            print(row(point), flush=True)


if __name__ == "__main__":
    main()
