"""Writes docs/planned_memory.md: the largest group that each of twenty models trains with, by `plan`.

    python docs/planned_memory.py [--only Qwen3-8B ...]

Run it when `plan` has changed. It needs no weight and no GPU, and half a minute of a core for each model. The page is
written after each model; `--only` keeps the other rows.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

from transformers import AutoConfig

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.planning.hardware import read_hardware
from trl_fsdp_qlora.planning.plan import Plan, plan_recipe

PAGE = Path(__file__).with_suffix(".md")
ROWS = Path(__file__).with_suffix(".json")
PROMPT, COMPLETION = 1024, 1024  # tokens
FEW, MANY = 8, 32  # completions that are planned; the others lie on a line
MOST = 256  # completions; nobody asks for larger groups
CARDS = ("16GB", "24GB", "48GB", "80GB", "24GB x2")
ADAPTERS = ("LoRA", "QLoRA")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


def _shape(kind: str, *sizes: int, tied: bool, **further) -> dict:
    return {"model_type": kind, **dict(zip(SIZES, sizes, strict=True)), "tie_word_embeddings": tied, **further}


# The sizes in each model's config.json, and the weights that its card states, in billions.
MODELS = {
    "SmolLM2-135M": (_shape("llama", 576, 1536, 30, 9, 3, 49152, tied=True), 0.135),
    "Qwen2.5-0.5B": (_shape("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True), 0.49),
    "Qwen3-0.6B": (_shape("qwen3", 1024, 3072, 28, 16, 8, 151936, tied=True, head_dim=128), 0.596),
    "gemma-3-1b": (
        _shape("gemma3_text", 1152, 6912, 26, 4, 1, 262144, tied=True, head_dim=256, sliding_window=512),
        1.0,
    ),
    "Llama-3.2-1B": (_shape("llama", 2048, 8192, 16, 32, 8, 128256, tied=True, head_dim=64), 1.236),
    "Qwen2.5-1.5B": (_shape("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True), 1.54),
    "SmolLM2-1.7B": (_shape("llama", 2048, 8192, 24, 32, 32, 49152, tied=True), 1.71),
    "Qwen3-1.7B": (_shape("qwen3", 2048, 6144, 28, 16, 8, 151936, tied=True, head_dim=128), 1.72),
    "Qwen2.5-3B": (_shape("qwen2", 2048, 11008, 36, 16, 2, 151936, tied=True), 3.09),
    "Llama-3.2-3B": (_shape("llama", 3072, 8192, 28, 24, 8, 128256, tied=True, head_dim=128), 3.21),
    "Qwen3-4B": (_shape("qwen3", 2560, 9728, 36, 32, 8, 151936, tied=True, head_dim=128), 4.02),
    "Mistral-7B-v0.3": (_shape("mistral", 4096, 14336, 32, 32, 8, 32768, tied=False, sliding_window=None), 7.25),
    "Qwen2.5-7B": (_shape("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False), 7.62),
    "Llama-3.1-8B": (_shape("llama", 4096, 14336, 32, 32, 8, 128256, tied=False), 8.03),
    "Qwen3-8B": (_shape("qwen3", 4096, 12288, 36, 32, 8, 151936, tied=False, head_dim=128), 8.19),
    "phi-4": (_shape("phi3", 5120, 17920, 40, 40, 10, 100352, tied=False, pad_token_id=0), 14.66),
    "Qwen3-14B": (_shape("qwen3", 5120, 17408, 40, 40, 8, 151936, tied=False, head_dim=128), 14.77),
    "Qwen3-30B-A3B": (
        _shape(
            "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, tied=False,
            head_dim=128, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        ),
        30.5,
    ),
    "Qwen3-32B": (_shape("qwen3", 5120, 25600, 64, 64, 8, 151936, tied=False, head_dim=128), 32.76),
    "Llama-3.1-70B": (_shape("llama", 8192, 28672, 80, 64, 8, 128256, tied=False), 70.6),
}  # fmt: skip


def write_config(name: str, folder: str | Path) -> None:
    """Write the model's `config.json` into `folder`."""
    shape = dict(MODELS[name][0])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, max_position_embeddings=32768, dtype="bfloat16")
    config.architectures = [type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"]
    config.save_pretrained(folder)


def has_experts(folder: str) -> bool:
    """Whether the model has experts: PEFT adapts them, which are one parameter together, only without dropout."""
    return "num_experts" in Path(folder, "config.json").read_text(encoding="utf-8")


def plan_of(folder: str, adapter: str, cards: str, group: int = 2) -> Plan:
    """The plan of a step of one group with LoRA of rank 16 on every linear layer.

    Every other setting is a default, or is in the text of the page.
    """
    words = f"""--model_name_or_path {folder} --output_dir runs/x --dtype bfloat16 --bf16 true --use_peft true --lora_r 16
        --lora_target_modules all-linear --load_in_4bit {adapter == "QLoRA"} --use_bnb_nested_quant true
        --max_completion_length {COMPLETION} --per_device_train_batch_size {group} --num_generations {group}"""
    if has_experts(folder):
        words += " --lora_dropout 0"
    sharded = "fsdp2_qlora" if adapter == "QLoRA" else "fsdp2"
    config = sharded if cards.endswith("x2") else "single_gpu"
    return plan_recipe(words.split(), EfficientGRPOConfig, config, cards, prompt_tokens=PROMPT)


def largest_group(folder: str, adapter: str, cards: str, few: Plan, many: Plan) -> int:
    """The most completions of one prompt that a rank of `cards` trains with in one micro-batch; 0 if not even two fit.

    Each completion adds the same bytes to a phase, so the largest group lies on the line through `few` and `many`. A
    group below `few` is planned itself, because the comparison of the first packed pass may count more there.
    """
    capacity = read_hardware(cards).memory
    group = MOST
    for phase in few.phases:
        of_one = (many.total(phase) - few.total(phase)) / (MANY - FEW)
        if of_one > 0:
            group = min(group, FEW + math.floor((capacity - few.total(phase)) / of_one))
        elif few.total(phase) > capacity:
            group = 0
    while 2 <= group < FEW and not plan_of(folder, adapter, cards, group).fits:
        group -= 1
    return group if group >= 2 else 0


def row(name: str) -> list[str]:
    """`[weights, largest group of each adapter on each of CARDS]`, as the table shows them."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(name, folder)
        cells = []
        for adapter in ADAPTERS:
            on_one = [plan_of(folder, adapter, "80GB", group) for group in (FEW, MANY)]
            for cards in CARDS:
                plans = on_one  # the bytes are the same on every single card
                if "x" in cards:
                    plans = [plan_of(folder, adapter, cards, group) for group in (FEW, MANY)]
                cells.append(largest_group(folder, adapter, cards, *plans))
        weights = f"{on_one[0].parameters[0] / 1e9:.3g}e9"
    return [weights, *("–" if cell == 0 else f"{MOST}+" if cell >= MOST else str(cell) for cell in cells)]


def page(rows: dict[str, list[str]]) -> str:
    """The text of docs/planned_memory.md."""
    cards = [cards.replace("GB x2", " ×2").replace("GB", "") for cards in CARDS]
    head = ["model", "weights", *(f"{adapter} {card}" for adapter in ADAPTERS for card in cards)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([name, *cells] for name, cells in rows.items())]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"""# The largest group, planned

For your own recipe, lengths and card:

```bash
trl-fsdp-qlora plan --config MY.yaml --hardware "24GB x2" --prompt_tokens 2048 --solve
```

**Planned, not measured**: nothing here has run on a GPU. The table has the largest number of completions of one prompt that a GPU trains with at once. The prompt
has {PROMPT:,} tokens and each completion {COMPLETION:,}. "LoRA 16" is one card of 16 GB. "24 ×2" is two cards of 24 GB, each with a group of that size, and the base
sharded by FSDP2. – means that not even two completions fit; {MOST} completions were the most that was asked for.

{table}

`python docs/planned_memory.py` writes this page (no weight, no GPU, ten minutes of a core). It plans {FEW} and {MANY} completions; the bytes of every phase lie on a
line through these two.

- **LoRA** has rank 16 on every linear layer (experts too, without dropout), in bf16, with AdamW and gradient checkpointing. Every other field has its default.
- **QLoRA** is nf4 with double quantization.
- Transformers generates the completions, and the group is one micro-batch. A smaller `per_device_train_batch_size` lets larger groups train
  ([prefix_sharing.md](prefix_sharing.md#any-batch-size)).
- On two cards of 24 GB, the whole bf16 base of an 8B model is not gathered for generating: `fsdp_gather="auto"` takes half of the free memory at most.

[plan.md](plan.md#what-is-counted) lists what a plan counts and what it leaves out.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    rows = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.is_file() else {}
    for name in parser.parse_args().only:
        rows[name] = row(name)
        print(name, *rows[name], flush=True)
        ROWS.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        PAGE.write_text(page({name: rows[name] for name in MODELS if name in rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
