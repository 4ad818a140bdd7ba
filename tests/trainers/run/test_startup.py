"""The block before the first step."""

import io
import re
import sys

from tests.tiny import lora, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.prefix_sharing.row import PassRecord
from trl_fsdp_qlora.trainers.run.startup import packed_pass_line, startup_block
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


def test_every_line_is_under_its_heading_and_fsdp_on_a_cpu_is_named_as_none(tmp_path, monkeypatch):
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=lora())
    block = headings(grpo)
    assert {"prefix sharing: auto", "completions with zero advantage skipped"} <= set(block["on"])
    assert "off" not in block and "as stock TRL" not in block and "no FSDP" not in block["hardware"][0]
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert "no FSDP" in headings(grpo)["hardware"][0]


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


def test_the_first_packed_pass_logs_its_tokens_by_level(tmp_path, monkeypatch, capsys):
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, max_steps=2, gradient_accumulation_steps=2)
    batches = []
    step = grpo.training_step

    def recorded(model, inputs, *further):
        loss = step(model, inputs, *further)
        batches.append(grpo._buffered_inputs[(grpo._step - 1) % grpo.args.steps_per_generation])
        return loss

    monkeypatch.setattr(grpo, "training_step", recorded)
    grpo.train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first packed pass")]
    batch = batches[0]
    rows = zip(
        batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"], batch["completion_mask"], strict=True
    )
    # The last token predicts none, and is not computed.
    rows = [[*p[m.bool()].tolist(), *c[n.bool()].tolist()][:-1] for p, m, c, n in rows]
    padded = len(rows) * (batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1])
    match = re.fullmatch(r"first packed pass: ([\d,]+) of ([\d,]+) padded tokens computed \((.*)\); (.*)", line)
    computed, of = (int(group.replace(",", "")) for group in match.groups()[:2])
    assert match[4] == "full attention by torch's flash attention for CPUs"
    levels = [int(part.split()[0]) for part in match[3].split(", ")]
    trie = len({tuple(row[: i + 1]) for row in rows for i in range(len(row))})
    assert trie <= computed < sum(map(len, rows)) <= of == padded
    assert sum(levels) == computed and len(levels) > 1 and match[3].startswith(f"{levels[0]} in the roots, ")
    assert packed_pass_line(record_of(3296, 28672, [768, 512, 2016])) == (
        "first packed pass: 3,296 of 28,672 padded tokens computed (768 in the roots, 512 on level 1, 2,016 "
        "on level 2)"
    )
    kernels = {"full attention": "torch's flash attention 2", "attention through a window of 6": "sdpa under a mask"}
    assert packed_pass_line(record_of(2, 3, [2], kernels)) == (
        "first packed pass: 2 of 3 padded tokens computed (2 in the roots); full attention by torch's flash "
        "attention 2; attention through a window of 6 by sdpa under a mask"
    )


def record_of(tokens, padded_tokens, levels, kernels=None) -> PassRecord:
    record = PassRecord()
    record.tokens = tokens
    record.padded_tokens = padded_tokens
    record.levels = levels
    record.kernels = kernels or {}
    return record


def test_a_padded_pass_logs_no_such_line(tmp_path, capsys):
    trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, prefix_sharing="off", max_steps=1).train()
    assert "packed pass" not in capsys.readouterr().out


def test_what_was_switched_off_and_what_runs_as_stock(tmp_path):
    off = {"prefix_sharing": "off", "skip_zero_advantage": False, "compact_generation": False}
    off["mlp_tokens_per_tile"] = "off"
    block = headings(trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, **off))
    assert [line.partition(":")[0] for line in block["off"]] == [
        "prefix sharing", "completions with zero advantage skipped", "rollouts",
        "long rows in tiles (mlp_tokens_per_tile",
    ]  # fmt: skip
    assert block["on"] == ["whole groups in every micro-batch"]
    stock = {"beta": 0.1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    grpo = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=lora(), **stock)
    grpo.sharing.disable("a layer of another kind")
    block = headings(grpo)
    assert len(block["as stock TRL"]) == 3 and "off" not in block
    assert "a layer of another kind" in block["as stock TRL"][0] and "beta=0.1" in block["as stock TRL"][1]
    lines = [line for _, line in trainer(TSPMOTrainer, TSPMOConfig, tmp_path).features()]
    assert any("T-SPMO" in line for line in lines) and not any("zero advantage" in line for line in lines)
