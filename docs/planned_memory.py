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

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.planning.hardware import read_hardware
from trl_fsdp_qlora.tools.planning.known_models import MODELS, known_config
from trl_fsdp_qlora.tools.planning.largest_model import BASES, largest_models
from trl_fsdp_qlora.tools.planning.plan import Plan, plan_recipe

PAGE = Path(__file__).with_suffix(".md")
ROWS = Path(__file__).with_suffix(".json")
PROMPT, COMPLETION = 1024, 1024  # tokens
FEW, MANY = 8, 32  # completions that are planned; the others lie on a line
MOST = 256  # completions; nobody asks for larger groups
CARDS = ("16GB", "24GB", "48GB", "80GB", "24GB x2")
ADAPTERS = ("LoRA", "QLoRA")
WITH_VLLM = "with vLLM"
GROUP = 8  # completions of a group, with vLLM


def write_config(name: str, folder: str | Path) -> None:
    """Write the model's `config.json` into `folder`."""
    known_config(name).save_pretrained(folder)


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


def rows_with_vllm() -> list[list[str]]:
    """`[card, largest model for each adapter with each of BASES]`, as the second table shows them."""
    plans = {}
    with tempfile.TemporaryDirectory() as folder:
        write_config("SmolLM2-135M", folder)  # its settings are those of every model
        for card in filter(lambda cards: "x" not in cards, CARDS):
            for adapter in ADAPTERS:
                plans[card, adapter] = plan_of(folder, adapter, card, GROUP)
        rows = []
        sizes = {adapter: {} for adapter in ADAPTERS}
        for card in filter(lambda cards: "x" not in cards, CARDS):
            cells = [card.replace("GB", "")]
            for adapter in ADAPTERS:
                largest = largest_models(plans[card, adapter], sizes[adapter])
                cells += [largest[base] or "–" for base in reversed(BASES)]
            rows.append(cells)
    return rows


def page(rows: dict[str, list]) -> str:
    """The text of docs/planned_memory.md."""
    vllm_head = ["card, GB", *(f"{adapter}, {base}" for adapter in ADAPTERS for base in reversed(BASES))]
    vllm_lines = [vllm_head, ["---:", *["---"] * (len(vllm_head) - 1)], *rows[WITH_VLLM]]
    vllm_table = "\n".join(f"| {' | '.join(line)} |" for line in vllm_lines)
    cards = [cards.replace("GB x2", " ×2").replace("GB", "") for cards in CARDS]
    head = ["model", "weights", *(f"{adapter} {card}" for adapter in ADAPTERS for card in cards)]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([name, *rows[name]] for name in MODELS if name in rows)]
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

## The largest model next to vLLM

A vLLM engine in the trainer's process needs the base, too. With [one copy](rollouts.md#with-vllm-only-the-adapter-moves) (`vllm_share_base: true`) it draws from the
trainer's. The largest of the dense models above that fits a card together with its engine:

{vllm_table}

A group of {GROUP} completions, in one micro-batch; the engine holds a cache for these and takes 1 GiB for its passes (assumed). **Planned, not measured.** For your own
lengths: `trl-fsdp-qlora plan --config MY.yaml --hardware 24GB --use_vllm true --vllm_mode colocate --solve`.

[plan.md](plan.md#what-is-counted) lists what a plan counts and what it leaves out.
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=[*MODELS, WITH_VLLM], default=[*MODELS, WITH_VLLM])
    rows = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.is_file() else {}
    for name in parser.parse_args().only:
        rows[name] = rows_with_vllm() if name == WITH_VLLM else row(name)
        print(name, *rows[name], flush=True)
        ROWS.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        PAGE.write_text(page({WITH_VLLM: [], **rows}), encoding="utf-8")


if __name__ == "__main__":
    main()
