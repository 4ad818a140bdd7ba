"""What a plan puts together, and the other way round: what is found to fit was planned itself, and the next larger does not fit."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.planning.models import folder, settings
from trl_fsdp_qlora.planning import passes
from trl_fsdp_qlora.planning import plan as module
from trl_fsdp_qlora.planning.hardware import Hardware
from trl_fsdp_qlora.planning.plan import (
    ACTIVATIONS,
    CACHE,
    TOKEN_STEP,
    changed,
    fewest_cards,
    largest,
    make_plan,
    ways,
)
from trl_fsdp_qlora.planning.settings import Launch, from_config

CPU = Hardware("a host", 2**40, 1, gpu=False)
CARD = Hardware("a card", 2**40, 1)


def test_a_prefill_has_its_prompts_keys_and_values_beside_it(tmp_path):
    """Long prompts, short completions: generation needs most before its first token."""
    run = settings(folder(tmp_path), prompt_tokens=256, max_completion_length=1, compact_generation=False)
    plan = make_plan(run, hardware=CPU)
    shape = passes.Shape(8, 256, 0, False)
    prefill = passes.measure(run, plan.config, shape, False)
    prompts = 8 * 256 * 5 * 2 * 2 * 32 * 4  # rows, tokens, layers, keys and values, heads, their size, bytes
    coming = sum(plan.phases["generate"].get(part, 0) for part in (ACTIVATIONS, CACHE, TOKEN_STEP))
    assert coming == prefill + prompts


def test_a_plan_within_a_launch_of_fsdp2_knows_it_before_accelerate_says_so(monkeypatch):
    """On GPUs the state says MULTI_GPU until the trainer has made its `Accelerator`, which is after the plan."""

    def config(device):
        state = SimpleNamespace(distributed_type=SimpleNamespace(value="MULTI_GPU"))
        device = SimpleNamespace(type=device)
        return SimpleNamespace(distributed_state=state, deepspeed_plugin=None, world_size=2, device=device, bf16=True)

    assert from_config(config("cuda"), None).launch.kind == "ddp"
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert from_config(config("cuda"), None).launch.kind == "fsdp2"
    assert from_config(config("cpu"), None).launch.kind == "ddp"  # which accelerate makes of it there


@pytest.mark.slow  # six plans
def test_plans_for_other_numbers_of_ranks_measure_nothing_again(tmp_path):
    run = settings(folder(tmp_path), Launch("fsdp2", 2))
    card = replace(CARD, cards=8)
    first = make_plan(run, hardware=card)
    before = {*passes._measured}, {*passes._whole}
    four = changed(first, processes=4)
    assert ({*passes._measured}, {*passes._whole}) == before
    passes._measured.clear()
    passes._whole.clear()
    assert make_plan(replace(run, launch=Launch("fsdp2", 4)), hardware=card).phases == four.phases
    longer = changed(first, max_completion_length=80)
    assert longer.phases["forward_backward"] != first.phases["forward_backward"]
    for name, value in (("gradient_checkpointing", True), ("load_in_4bit", True)):
        assert changed(first, **{name: value}).phases != first.phases, name


@pytest.mark.slow  # some ten plans
def test_the_largest_fits_and_the_next_does_not(tmp_path):
    plan = make_plan(settings(folder(tmp_path, num_hidden_layers=2)), hardware=CARD)
    card = replace(CARD, memory=changed(plan, per_device_train_batch_size=12).peak)  # as much as 12 rows need
    plan = replace(plan, hardware=card)
    assert largest(plan, "per_device_train_batch_size", 4) == 12
    assert not changed(plan, per_device_train_batch_size=16).fits
    assert largest(replace(plan, hardware=replace(card, memory=2**20)), "max_completion_length") == 0


@pytest.mark.slow  # some ten plans
def test_each_way_makes_it_fit(tmp_path):
    # Rows enough for the step to need more than the comparison, of three rows, whatever is changed.
    run = settings(folder(tmp_path, num_hidden_layers=2), max_completion_length=256, per_device_train_batch_size=32)
    needed = make_plan(run, hardware=CARD).peak
    plan = make_plan(run, hardware=replace(CARD, memory=int(0.9 * needed)))
    assert not plan.fits
    lines = ways(plan)
    assert "gradient_checkpointing: true" in lines and len(lines) <= 3
    assert any(line.startswith("per_device_train_batch_size: 16, gradient_accumulation_steps: 2") for line in lines)
    assert not changed(plan, gradient_checkpointing=False).fits


@pytest.mark.slow  # some ten plans
def test_the_fewest_cards_hold_it_and_fewer_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CARDS", (3, 4))
    run = settings(folder(tmp_path), Launch("fsdp2", 1), fsdp_gather="per_layer")
    of_four = changed(make_plan(run, hardware=CARD), processes=4)
    plan = make_plan(run, hardware=replace(CARD, memory=of_four.peak))
    assert not plan.fits and fewest_cards(plan) == 4
    assert fewest_cards(replace(plan, hardware=replace(CARD, memory=2**20))) == 0
    whole = replace(plan, settings=replace(run, launch=Launch("ddp", 8)))
    assert fewest_cards(whole) == 0  # each has all of it, however many there are
    assert fewest_cards(replace(whole, hardware=replace(CARD, memory=2**36))) == 1
