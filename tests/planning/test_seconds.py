"""Seconds of a step: the work of a tiny model counted by hand, and what a card does with it."""

from dataclasses import replace

import pytest

from tests.planning.models import folder, settings
from trl_fsdp_qlora.planning import seconds
from trl_fsdp_qlora.planning.hardware import CARDS, Speed, _known, read_hardware
from trl_fsdp_qlora.planning.plan import make_plan
from trl_fsdp_qlora.planning.settings import Launch

# tests/planning/models.py: 5 layers, hidden 128, inner 384, 4 heads of 32 (2 of keys), vocabulary 512, untied head.
LAYER = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 384 + 2 * 128
BASE = 5 * LAYER + 128  # and the last norm
HEAD = 512 * 128
# Rank 8 at q, k, v, o, gate, up, down: 8 x (in + out).
ADAPTER = 5 * 8 * (256 + 192 + 192 + 256 + 512 + 512 + 512)


def planned(tmp_path, **changes):
    return make_plan(settings(folder(tmp_path), Launch(), **changes), hardware="h100")


def test_the_work_of_a_step_is_what_is_counted_by_hand(tmp_path):
    """8 rows of 40 tokens behind 2 prompts of 48, packed: 2 x 48 + 8 x 40 = 416 tokens, 320 of them scored."""
    plan = planned(tmp_path)
    work = seconds.work(plan)
    assert plan.parameters[1] == ADAPTER
    pairs = 2 * 48**2 / 2 + 8 * (40 * 48 + 40**2 / 2)
    attention = 4 * pairs * 5 * 128
    forward = 2 * (BASE + ADAPTER) * 416 + attention
    backward = forward + 2 * ADAPTER * 416 + attention
    loss = work["forward_backward"]
    assert loss.flops == pytest.approx(forward + backward + 3 * 2 * 320 * HEAD)
    assert loss.bytes == 2 * 4 * BASE + 3 * 4 * HEAD and loss.layers == 10
    # A prefill of both prompts, then 40 times one token of 8 rows, with 48 + 20 tokens of keys and values each.
    prefill = 2 * (BASE + ADAPTER) * 96 + 4 * 48**2 * 5 * 128
    step = 2 * (BASE + ADAPTER + HEAD) * 8 + 4 * 8 * 68 * 5 * 128
    cache = 8 * 68 * 2 * 64 * 4 * 5
    assert work["generate"].flops == pytest.approx(prefill + 40 * step)
    assert work["generate"].bytes == pytest.approx(4 * BASE + 40 * (4 * (BASE + HEAD) + cache))
    assert work["optimizer"].bytes == pytest.approx((2 + 1 + 2 * 2) * 4 * ADAPTER) and "score" not in work


@pytest.mark.slow  # six plans
def test_what_makes_a_step_longer(tmp_path):
    plain = seconds.work(planned(tmp_path))
    kept = seconds.work(planned(tmp_path, gradient_checkpointing=True))["forward_backward"]
    attention = 4 * (48**2 + 8 * (40 * 48 + 800)) * 5 * 128
    assert kept.flops - plain["forward_backward"].flops == pytest.approx(2 * (BASE + ADAPTER) * 416 + attention)
    full = seconds.work(planned(tmp_path, use_peft=False))["forward_backward"]
    # No adapter; a product more for every weight and for the head.
    assert full.flops - plain["forward_backward"].flops == pytest.approx(
        (2 * BASE - 6 * ADAPTER) * 416 + 2 * 320 * HEAD
    )
    padded = seconds.work(planned(tmp_path, prefix_sharing="off"))["forward_backward"]
    assert padded.flops > 1.5 * plain["forward_backward"].flops
    reference = seconds.work(planned(tmp_path, beta=0.1))
    assert reference["score"].flops == pytest.approx(2 * (BASE + ADAPTER) * 416 + attention + 2 * 320 * HEAD)
    # Four micro-batches of one generation: each step of one micro-batch draws a quarter of it.
    drawn = seconds.work(planned(tmp_path, steps_per_generation=4))
    assert drawn["generate"].layers == plain["generate"].layers / 4
    assert drawn["score"].layers == plain["forward_backward"].layers / 2


def test_a_span_is_a_maximum_at_the_best_and_a_sum_at_the_worst():
    speed = Speed(100.0, 10.0)
    assert seconds.span(seconds.Work(600.0, 40.0), speed) == (10.0, 28.0)  # 600/60 and 40/8; 600/30 + 40/5
    assert seconds.span(seconds.Work(60.0, 40.0), speed) == (5.0, 10.0)
    assert seconds.span(seconds.Work(layers=1000), speed) == pytest.approx((0.1, 0.6))


def test_the_line_says_what_was_assumed_or_why_there_is_none(tmp_path):
    plan = planned(tmp_path)
    said = seconds.told(plan)
    assert "989 TFLOP/s and 3350 GB/s (data sheet), of which 30 to 60% and 50 to 80% are assumed" in said
    assert "not estimated, the speed of 24 GB" in seconds.told(replace(plan, hardware=read_hardware("24GB")))
    host = read_hardware("cpu", 1)
    assert "(measured now)" in seconds.told(replace(plan, hardware=host))
    two = replace(plan.settings, launch=Launch("ddp", 2))
    assert "not estimated, the ranks share" in seconds.told(replace(plan, hardware=host, settings=two))


def test_every_card_has_a_speed_and_is_known_by_its_driver_s_name():
    assert all(read_hardware(card).speed is not None for card in CARDS)
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "NVIDIA A10": "a10",
        "Tesla T4": "t4",
    }
    names |= {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "", "NVIDIA GeForce RTX 4090": "rtx4090", "GH": ""}
    assert {name: _known(name) for name in names} == names
