"""`compare`: a recipe's trainer and stock TRL's take the same steps; the exit status is whether they are equal."""

import re
from pathlib import Path

import pytest

import trl_fsdp_qlora
from tests.promises.commands import TINY, refusal, run
from tests.tiny import save_recipe_files

LORA = ("--use_peft", "true", "--lora_target_modules", "all-linear", "--steps", "1")
PAIRS = ("--model_name_or_path", "base", "--pairs", "pairs.jsonl", "--chat", "false", "--use_cpu", "true")


@pytest.fixture(autouse=True)
def recipe_files(tmp_path, monkeypatch):
    """A model `base`, `data.jsonl`, and `pairs.jsonl`."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)
    pairs = [f'{{"prompt": "{i}+1=", "chosen": "{i + 1}", "rejected": "{i}"}}' for i in range(8)]
    Path("pairs.jsonl").write_text("\n".join(pairs))


def test_equal_steps_are_shown_and_nothing_is_written():
    before = sorted(Path().iterdir())
    status, text = run("compare", *TINY, *LORA, "--trainer", "grpo", "--token_selection", "uniform")
    assert status == 0, text
    for step in (0, 1):  # the first warms up
        losses = re.search(rf"(?m)^step {step}: losses (\S+) and (\S+) .* gradient norms (\S+) and (\S+) ", text)
        stock_loss, own_loss, stock_norm, own_norm = map(float, losses.groups())
        # In float32 the two add the same numbers in another order. A loss is a sum of advantages of about one.
        assert own_loss == pytest.approx(stock_loss, abs=1e-5)
        assert own_norm == pytest.approx(stock_norm, rel=1e-4) and stock_norm > 0
    share = re.search(r"(?m)^tokens computed .*: ([\d.]+)% of the padded ones$", text)
    assert 0 < float(share[1]) < 100
    assert text.splitlines()[-1].startswith("equal (float32)")
    # A setting that stock TRL does not have is named, and left out.
    assert any(line.startswith("token_selection: uniform is taken as all") for line in text.splitlines())
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("words", [(*TINY, "--trainer", "rloo"), (*PAIRS, "--bf16", "false")], ids=["rloo", "pairs"])
def test_other_trainers(words):
    """A recipe of pairs is one of DPO."""
    status, text = run("compare", *words, *LORA)
    assert status == 0 and text.splitlines()[-1].startswith("equal (float32)"), text


def test_a_wrong_loss_has_status_1(monkeypatch):
    compute_loss = trl_fsdp_qlora.EfficientGRPOTrainer._compute_loss
    wrong = lambda self, model, inputs: 1.01 * compute_loss(self, model, inputs)  # noqa: E731
    monkeypatch.setattr(trl_fsdp_qlora.EfficientGRPOTrainer, "_compute_loss", wrong)
    status, text = run("compare", *TINY, *LORA, "--trainer", "grpo")
    assert status == 1 and text.splitlines()[-1].startswith("DIFFERENT (float32)"), text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--steps 0", "--steps 0 is not a number of steps"),
        ("--trainer sft", "'sft'"),
        ("--dataset nothing.jsonl", "'nothing.jsonl': there is no such file"),
        # What the recipe's script refuses when it trains.
        ("--accelerate_config fsdp2_qlora", "--accelerate_config"),
        ("--value_samples 4", "--value_samples"),
        ("--rewards nothing", "'nothing'"),
    ],
)
def test_what_cannot_be_compared_has_status_2(words, line):
    assert line in refusal("compare", *TINY, *words.split())
