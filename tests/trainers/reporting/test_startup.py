"""The block before the first step.

Covers `utils/plain.py`.
"""

import io
import re
import sys

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.prefix_sharing.status import Status
from trl_fsdp_qlora.trainers.reporting.startup import startup_block
from trl_fsdp_qlora.utils.plain import counted


def headings(grpo, steps: int = 3) -> dict[str, list[str]]:
    """Heading -> lines of the block of a trainer whose run has so many steps."""
    lines_of = {}
    heading = None
    for line in startup_block(grpo.args, grpo.model, steps, grpo.features()).splitlines()[1:]:
        name, text = re.fullmatch(r"  (?:([a-zA-Z][\w ]*):)? +(.*)", line).groups()
        heading = name or heading
        lines_of.setdefault(heading, []).append(text)
    return lines_of


def test_every_line_is_under_its_heading(tmp_path):
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=lora())
    block = headings(grpo)
    assert {"prefix sharing: auto", "completions with zero advantage skipped"} <= set(block["on"])
    assert "off" not in block and "as stock TRL" not in block


def test_one_of_a_thing_is_no_plural(tmp_path):
    def rows(**changes):
        grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, **changes)
        block = headings(grpo, steps=1)
        return [block[name][0] for name in ("optimizer step", "generation batch", "whole run")]

    assert rows(per_device_train_batch_size=4) == [
        "4 completions in the loss = 1 prompt × 4 completions",
        "4 completions = 1 prompt × 4, every optimizer step",
        "1 optimizer step, 1 prompt, 4 completions",
    ]
    assert [counted(n, "row") for n in (0, 1, 1.0, 2, 1024, 0.5)] == [
        "0 rows", "1 row", "1 row", "2 rows", "1,024 rows", "0.5 rows",
    ]  # fmt: skip


def test_the_block_begins_a_line_of_its_own_after_a_progress_bar(tmp_path, monkeypatch):
    screen = io.StringIO()  # a terminal shows both on one screen
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen)
    trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, disable_tqdm=False, max_steps=1).train()
    lines = [line.split("\r")[-1].strip() for line in screen.getvalue().split("\n")]
    assert "trl-fsdp-qlora" in lines and "0%" in screen.getvalue(), lines


def test_what_was_switched_off_and_what_runs_as_stock(tmp_path):
    off = {"prefix_sharing": "off", "skip_zero_advantage": False, "compact_generation": False}
    off["mlp_tokens_per_tile"] = "off"
    block = headings(trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, **off))
    assert [line.partition(":")[0] for line in block["off"]] == [
        "prefix sharing", "completions with zero advantage skipped", "rollouts",
        "long rows in tiles of tokens (mlp_tokens_per_tile",
    ]  # fmt: skip
    assert block["on"] == ["whole groups in every micro-batch"]
    stock = {"beta": 0.1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=lora(), **stock)
    grpo.sharing.status = Status.as_stock("a layer of another kind")
    block = headings(grpo)
    assert len(block["as stock TRL"]) == 3 and "off" not in block
    assert "a layer of another kind" in block["as stock TRL"][0] and "beta=0.1" in block["as stock TRL"][1]
    lines = [line for _, line in trainer(TSPMOTrainer, TSPMOConfig, tmp_path).features()]
    assert any("T-SPMO" in line for line in lines) and not any("zero advantage" in line for line in lines)
