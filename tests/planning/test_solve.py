"""What is found the other way round fits when it is planned, and the next larger does not."""

from dataclasses import replace

import pytest

from tests.planning.models import folder, settings
from trl_fsdp_qlora.planning import passes, solve
from trl_fsdp_qlora.planning.hardware import Hardware
from trl_fsdp_qlora.planning.plan import at_least, make_plan
from trl_fsdp_qlora.planning.settings import Launch
from trl_fsdp_qlora.planning.solve import changed, fewest_cards, fits, largest, ways

pytestmark = pytest.mark.slow  # some ten plans each


def test_the_largest_fits_and_the_next_does_not(tmp_path):
    card = Hardware("a card", 2**40, 1, 1e12, 1e14)
    plan = make_plan(settings(folder(tmp_path, num_hidden_layers=2)), hardware=card)
    card = replace(card, memory=changed(plan, per_device_train_batch_size=12).peak)  # as much as 12 rows need
    plan = replace(plan, hardware=card)
    assert largest(plan, "per_device_train_batch_size", 4) == 12
    assert not changed(plan, per_device_train_batch_size=16).fits
    assert largest(replace(plan, hardware=replace(card, memory=2**20)), "max_completion_length") == 0


def test_each_way_makes_it_fit(tmp_path):
    # Rows enough for the step to need more than its first comparison, of three rows, whatever is changed.
    run = settings(folder(tmp_path, num_hidden_layers=2), max_completion_length=256, per_device_train_batch_size=32)
    card = Hardware("a card", 2**40, 1, 1e12, 1e14)
    needed = make_plan(run, hardware=card).peak
    plan = make_plan(run, hardware=replace(card, memory=int(0.9 * needed)))
    assert not plan.fits
    lines = ways(plan)
    assert "gradient_checkpointing: true" in lines and len(lines) <= 3
    assert any(line.startswith("per_device_train_batch_size: 16, gradient_accumulation_steps: 2") for line in lines)
    assert not changed(plan, gradient_checkpointing=False).fits


def test_what_cannot_fit_whatever_its_passes_take_is_not_measured(tmp_path):
    card = Hardware("a card", 2**20, 1)
    plan = make_plan(settings(folder(tmp_path, num_hidden_layers=2)), hardware=card)
    assert at_least(plan.settings, plan.config, card) <= plan.peak
    before = passes._measure.cache_info().misses
    assert not ways(plan) and not plan.fits
    assert passes._measure.cache_info().misses == before
    roomy = replace(plan, hardware=replace(card, memory=plan.peak))
    assert fits(roomy, seed=1) and not fits(replace(roomy, hardware=replace(card, memory=plan.peak - 1)), seed=1)


def test_the_fewest_cards_hold_it_and_fewer_do_not(tmp_path, monkeypatch):
    monkeypatch.setattr(solve, "_CARDS", (3, 4))
    run = settings(folder(tmp_path), Launch("fsdp2", 1), fsdp_gather="per_layer")
    card = Hardware("a card", 2**40, 4)
    of_four = changed(make_plan(run, hardware=card), processes=4)
    plan = make_plan(run, hardware=replace(card, memory=of_four.peak, cards=1))
    assert not plan.fits and fewest_cards(plan) == 4
    assert fewest_cards(replace(plan, hardware=replace(card, memory=2**20))) == 0
    whole = replace(plan, settings=replace(run, launch=Launch("ddp", 8)))
    assert fewest_cards(whole) == 0  # each has all of it, however many there are
    assert fewest_cards(replace(whole, hardware=replace(card, memory=2**36))) == 1
