"""Writes the table at the head of docs/out_of_memory.md: the longest completion on a card, by `plan`.

    python docs/longest_rows.py

Run it when `plan` has changed; it needs no weight and no GPU, and some minutes of a core. Three lengths are planned,
and then others near the one that is looked for.
"""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.planning.hardware import GIB
from trl_fsdp_qlora.tools.planning.known_models import known_config
from trl_fsdp_qlora.tools.planning.plan import Plan, changed, plan_recipe

PAGE = Path(__file__).with_name("out_of_memory.md")
ROWS = Path(__file__).with_suffix(".json")
BEGIN, END = "<!-- longest rows: python docs/longest_rows.py -->\n", "<!-- end of longest rows -->\n"
PROMPT, GROUP = 1024, 8
POSITIONS = 262144  # nobody asks for longer rows
LENGTHS = (16384, 32768, 65536)
CARDS = (16, 24, 48, 80)  # GB
# Plans are made until one lies so near to the length that is looked for, as a part of it.
NEAR, TRIES = 0.01, 6
# A row's name: the model, and whether its base is in 4 bits.
MODELS = {"Qwen3-8B QLoRA": ("Qwen3-8B", True), "Qwen3-4B LoRA": ("Qwen3-4B", False)}
OPTIONS = {
    "checkpointing alone": {"mlp_tokens_per_tile": "off"},
    "offload": {"mlp_tokens_per_tile": "off", "gradient_checkpointing_kwargs": {"offload": True}},
    "offload and tiles": {"mlp_tokens_per_tile": "auto", "gradient_checkpointing_kwargs": {"offload": True}},
}


def plan_of(name: str, option: str, card: int, completion: int) -> Plan:
    """The plan of a step on one group, row by row, whose completions are drawn on another machine."""
    model, four_bits = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        config = known_config(model)
        config.max_position_embeddings = POSITIONS
        config.save_pretrained(folder)
        words = f"""--model_name_or_path {folder} --output_dir runs/x --dtype bfloat16 --bf16 true --use_peft true
            --lora_r 16 --lora_target_modules all-linear --load_in_4bit {four_bits} --use_bnb_nested_quant true
            --use_vllm true --vllm_mode server --per_device_train_batch_size 1 --gradient_accumulation_steps {GROUP}
            --num_generations {GROUP} --max_completion_length {LENGTHS[0]}"""
        plan = plan_recipe(words.split(), EfficientGRPOConfig, "single_gpu", f"{card}GB", prompt_tokens=PROMPT)
        return changed(plan, max_completion_length=completion, **OPTIONS[option])


def solved(plans: list[Plan], card: int) -> int:
    """The longest completion with which every phase fits a card, in multiples of 16; 0 if none does.

    It lies on the parabolas through the phases of three plans.
    """
    most = POSITIONS - PROMPT
    x = np.array([plan.settings.completion_tokens for plan in plans]) / LENGTHS[0]
    for phase in plans[0].phases:
        if plans[0].total(phase) == plans[-1].total(phase):  # the optimizer's update
            continue
        square, line, constant = np.polyfit(x, [plan.total(phase) / GIB for plan in plans], 2)
        roots = np.roots([square, line, constant - card])
        positive = [float(root.real) for root in roots if abs(root.imag) < 1e-9 and root.real > 0]
        most = min(most, math.floor(min(positive, default=0) * LENGTHS[0]))
    return most // 16 * 16


def longest(plan_at: Callable[[int], Plan], card: int) -> int:
    """[`solved`] with plans ever nearer to it: a phase is the larger of a pass and of its comparison, no parabola."""
    lengths = list(LENGTHS)
    for _ in range(TRIES):
        found = solved([plan_at(length) for length in lengths], card)
        nearest = min(lengths, key=lambda length: abs(length - found))
        if not found or abs(found - nearest) <= NEAR * found:
            return found
        lengths = sorted([*lengths, found], key=lambda length: abs(length - found))[:3]
    return found


def with_rows_of(plan: Plan, completion: int) -> Plan:
    """The plan as it is but for the tokens of its longest pass, which has one completion and reads a trunk."""
    longest_pass = plan.step.longest
    assert longest_pass.rows == longest_pass.prompts == 1
    return replace(plan, step=plan.step._replace(longest=longest_pass._replace(tokens=completion)))


def row(name: str) -> dict[str, list]:
    """By option, the longest completion on each card, and the host memory of the longest of them in GiB."""
    cells = {}
    for option in OPTIONS:
        plan_at = cache(partial(plan_of, name, option, CARDS[-1]))
        lengths = [longest(plan_at, card) for card in CARDS]
        host = [with_rows_of(plan_at(LENGTHS[0]), length).host_bytes / GIB for length in lengths]
        cells[option] = [[length, round(size, 1)] for length, size in zip(lengths, host, strict=True)]
    return cells


def table(rows: dict[str, dict[str, list]]) -> str:
    """The text between the two marks of the page."""
    head = ["longest completion", *(f"{card} GB" for card in CARDS)]
    lines = [head, ["---", *["---:"] * len(CARDS)]]
    for name, cells in rows.items():
        for option, of_cards in cells.items():
            texts = [f"{length:,}" + (f" ({host:g})" if host else "") if length else "–" for length, host in of_cards]
            lines.append([f"{name}, {option}", *texts])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def write(rows: dict[str, dict[str, list]]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n" + table(rows) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    rows = {}
    for name in MODELS:
        rows[name] = row(name)
        print(name, rows[name], flush=True)
    ROWS.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    write(rows)


if __name__ == "__main__":
    main()
