"""The split of cards between a server that draws ahead and the trainer, against sums by hand."""

import json
from dataclasses import replace

import pytest
from transformers import Qwen3MoeConfig

from tests.tools.planning.models import config, folder, settings, words
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.planning import split
from trl_fsdp_qlora.tools.planning.hardware import GIB, Hardware, rates
from trl_fsdp_qlora.tools.planning.plan import plan_recipe
from trl_fsdp_qlora.tools.planning.settings import Launch
from trl_fsdp_qlora.tools.planning.split import find_splits

PROMPT, COMPLETION = 48, 40  # of `tests.tools.planning.models`, whose base has these weights in a layer, five times:
LAYER = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 384 + 2 * 128
WEIGHTS = 5 * LAYER + 128 + 512 * 128  # with the last norm and the head, without the input embeddings
EMBEDDINGS = 512 * 128
CACHE = 5 * 2 * 2 * 32 * 4  # bytes of a token: keys and values of two heads, in float32
ATTENTION = 5 * 4 * 4 * 32  # operations of a token for each token before it
MIDDLE = PROMPT + COMPLETION / 2
TOKEN = 2 * WEIGHTS + ATTENTION * MIDDLE
AHEAD = {"use_vllm": True, "vllm_mode": "server", "rollouts_ahead": 1}
CARD = Hardware("card", GIB, 2, bandwidth=1e9 / 0.6, flops=1e10 / 0.4)  # 1e9 bytes and 1e10 operations are used


def draw_seconds(rows: int, flops: float = 1e10) -> float:
    """Of one copy of the base: each token step reads the weights and all rows, or computes a token of each."""
    read = 4 * WEIGHTS + rows * CACHE * MIDDLE
    prompts = rows // 4 * PROMPT * (2 * WEIGHTS + ATTENTION * PROMPT / 2)
    return COMPLETION * max(read / 1e9, rows * TOKEN / flops) + prompts / flops


def splits_of(path, hardware=CARD, cards=2, training=None, ranks=2, **changes):
    changes = {**AHEAD, "gradient_accumulation_steps": 4, **changes}
    launch = Launch("ddp", ranks)
    return find_splits(settings(path, launch, **changes), config(), hardware, cards, training)


@pytest.mark.parametrize("flops", [1e10, 1e15], ids=["operations decide", "bandwidth decides"])
def test_seconds_of_two_cards(tmp_path, flops):
    """64 completions a step: 8 a micro-batch, 4 micro-batches, 2 ranks."""
    found = splits_of(folder(tmp_path), replace(CARD, flops=flops / 0.4))
    (one,) = found.possible
    assert found.chosen == one and (one.drawing, one.training, one.shards) == (1, 1, 1)
    assert found.completions == 64 and one.values == {"gradient_accumulation_steps": 8}
    assert one.draw == pytest.approx(draw_seconds(64, flops))
    # Two prompts and eight completions a micro-batch, whose last tokens predict nothing; forward and backward.
    trained = 8 * (2 * PROMPT + 8 * (COMPLETION - 1))
    assert one.rest == pytest.approx(trained * 2 * TOKEN / flops)
    assert (one.ahead, one.in_turns) == (max(one.draw, one.rest), one.draw + one.rest)
    # Colocated, both cards draw half of the rows and train on half of them.
    assert found.colocated.draw == pytest.approx(draw_seconds(32, flops))
    assert found.colocated.rest == pytest.approx(one.rest / 2)


PASSES = {
    "checkpointing": ({"gradient_checkpointing": True}, 3 / 2),
    "the reference, too": ({"beta": 0.1}, 3 / 2),
    "twice over each batch": ({"num_iterations": 2}, (2 + 1 / 2) / 2),
}


@pytest.mark.parametrize(("changes", "factor"), PASSES.values(), ids=PASSES)
def test_each_pass_counts(tmp_path, changes, factor):
    path = folder(tmp_path)
    plain, other = (splits_of(path, **more).chosen for more in ({}, changes))
    assert other.rest == pytest.approx(factor * plain.rest)
    assert other.draw == pytest.approx(plain.draw / (2 if "num_iterations" in changes else 1))


def test_a_batch_of_two_steps_is_drawn_for_both(tmp_path):
    """A step has half of a generation's seconds; steps_per_generation keeps its share of the ranks."""
    one = splits_of(folder(tmp_path), steps_per_generation=8).chosen
    assert one.values == {"gradient_accumulation_steps": 8, "steps_per_generation": 16}
    assert one.draw == pytest.approx(draw_seconds(128) / 2)


def test_four_cards(tmp_path):
    """Three ranks do not divide 16 micro-batches; the split is that of the faster step."""
    four = replace(CARD, cards=4)
    found = splits_of(folder(tmp_path), four, cards=4, ranks=4)
    assert [(one.drawing, one.training) for one in found.possible] == [(3, 1), (2, 2)]
    assert found.chosen == min(found.possible, key=lambda one: one.ahead)
    assert splits_of(folder(tmp_path), four, cards=4, ranks=4, training=1).chosen.training == 1
    halves = found.possible[1]
    assert halves.draw == pytest.approx(draw_seconds(64)) and halves.values == {"gradient_accumulation_steps": 8}


def test_a_base_that_one_card_does_not_hold_lies_on_two(tmp_path):
    row = CACHE * (PROMPT + COMPLETION)
    small = replace(CARD, cards=4, memory=int((2 * WEIGHTS + 5 * row) * 4 / 4 / 0.9) + WEIGHTS)
    found = splits_of(folder(tmp_path), small, cards=4, ranks=4)
    assert {one.drawing: one.shards for one in found.possible} == {2: 2}
    # Fewer rows at once than are drawn: they come in waves, each of which reads the weights again.
    at_once = int((2 * small.memory * 0.9 - 4 * (WEIGHTS + EMBEDDINGS)) // row)
    waves = -(-128 // at_once)
    read = max((4 * WEIGHTS + at_once * CACHE * MIDDLE) / 1e9, at_once * TOKEN / 1e10)
    prompts = 32 * PROMPT * (2 * WEIGHTS + ATTENTION * PROMPT / 2) / 1e10
    assert waves > 1
    assert found.chosen.draw == pytest.approx((waves * COMPLETION * read + prompts) / 2)
    needed = (
        4 * (WEIGHTS + EMBEDDINGS) + row
    )  # a token reads one row of the embeddings, but all of them lie on the card
    for memory, shards in ((needed / 0.9 + 1, 1), ((needed - 4 * EMBEDDINGS) / 0.9, 2)):
        found = splits_of(folder(tmp_path), replace(small, memory=int(memory)), cards=4, ranks=4)
        assert {one.drawing: one.shards for one in found.possible}[2] == shards
    assert splits_of(folder(tmp_path), replace(small, memory=4 * WEIGHTS // 8), cards=4, ranks=4).chosen is None


def test_experts_count_as_often_as_they_are_met(tmp_path):
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    mixture = Qwen3MoeConfig(**shape, num_experts_per_tok=2, vocab_size=256, architectures=["Qwen3MoeForCausalLM"])
    run = settings(folder(tmp_path), Launch("ddp", 2), **AHEAD, lora_target_modules=["q_proj"])
    estimate = split._Estimate(run, mixture, CARD)
    assert estimate.experts == 2 * 8 * 3 * 64 * 32
    assert estimate.token_flops(0) == 2 * (estimate.others + estimate.experts / 4)


def test_without_rates_a_half_is_where_to_start(tmp_path):
    unknown = Hardware("24 GB", 24 * GIB, 4)
    found = splits_of(folder(tmp_path), unknown, cards=4, ranks=4)
    assert (found.chosen.drawing, found.chosen.training, found.chosen.draw) == (2, 2, None)
    assert "no seconds, because memory alone" in "\n".join(split.format_splits(found, "24 GB"))


def test_the_plan_is_that_of_the_split(tmp_path, capsys):
    """Its ranks, their micro-batches and their memory; with `--num_processes` that many train."""
    line = words(folder(tmp_path), **AHEAD, gradient_accumulation_steps=4, bf16=True)
    plan = plan_recipe(line, EfficientGRPOConfig, hardware="h100 x4", prompt_tokens=PROMPT)
    chosen = plan.splits.chosen
    assert plan.settings.launch.processes == chosen.training
    assert plan.settings.gradient_accumulation_steps * chosen.training == 16 and plan.enough_cards
    two = plan_recipe(line, EfficientGRPOConfig, None, "h100 x4", 2, prompt_tokens=PROMPT)
    assert two.settings.launch.processes == 2 and (two.splits.completions, two.splits.chosen.drawing) == (64, 2)
    for changes in ({"vllm_server_base_url": "http://other-node:8000"}, {"rollouts_ahead": 0}):
        other = plan_recipe([*line, *words_of(changes)], EfficientGRPOConfig, hardware="h100 x4")
        assert other.splits is None and other.settings.launch.processes == 4
    assert main(["plan", *line, "--hardware", "h100 x4"]) == 0
    printed = capsys.readouterr().out
    assert "cards that draw + train" in printed and "colocated on all 4" in printed and "an estimate" in printed
    assert f"* the trainer gets --num_processes {chosen.training}" in printed
    assert main(["plan", *line, "--hardware", "h100 x1"]) == 0
    assert "with one card nothing is gained" in capsys.readouterr().out
    assert main(["plan", *line, "--hardware", "24GB x2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["chosen"]["draw"] is None


def words_of(changes: dict) -> list[str]:
    return [word for name, value in changes.items() for word in (f"--{name}", str(value))]


def test_rates_of_a_card_by_the_name_that_cuda_gives_it():
    assert rates("NVIDIA H100 80GB HBM3") == rates("h100") == {"bandwidth": 3350e9, "flops": 989e12}
    assert rates("NVIDIA GeForce RTX 4090") == rates("rtx4090")
    assert rates("NVIDIA L40S") == rates("l40s") != rates("NVIDIA L4")
    assert rates("NVIDIA RTX A6000") == rates("a6000")
    assert rates("NVIDIA A100-SXM4-80GB") == rates("a100")
    assert rates("NVIDIA A100-SXM4-40GB") == rates("a10040gb") != rates("a100")
    others = (
        "Some other card",
        "NVIDIA H100 PCIe",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3070 Ti",
    )
    for name in (*others, "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA H100 NVL"):
        assert not rates(name), name
