"""What is found the other way round fits when it is planned, and the next larger does not."""

from dataclasses import replace

import pytest

from tests.planning.models import folder, settings
from trl_fsdp_qlora.planning.hardware import Hardware
from trl_fsdp_qlora.planning.plan import CONTEXT, make_plan
from trl_fsdp_qlora.planning.solve import changed, largest, ways

pytestmark = pytest.mark.slow  # some twenty plans


def test_the_largest_fits_and_the_next_does_not(tmp_path):
    card = Hardware("a card", CONTEXT + 60 * 2**20, 1, 1e12, 1e14)
    plan = make_plan(settings(folder(tmp_path)), hardware=card)
    found = largest(plan, "per_device_train_batch_size", 4)
    assert found and found % 4 == 0
    assert changed(plan, per_device_train_batch_size=found).fits
    assert not changed(plan, per_device_train_batch_size=found + 4).fits
    assert largest(replace(plan, hardware=replace(card, memory=2**20)), "max_completion_length") == 0


def test_each_way_makes_it_fit(tmp_path):
    run = settings(folder(tmp_path), max_completion_length=256)
    card = Hardware("a card", 2**40, 1, 1e12, 1e14)
    needed = make_plan(run, hardware=card).peak
    plan = make_plan(run, hardware=replace(card, memory=int(0.9 * needed)))
    assert not plan.fits
    lines = ways(plan)
    assert "gradient_checkpointing: true" in lines and len(lines) <= 3
    assert any(line.startswith("per_device_train_batch_size: 4, gradient_accumulation_steps: 2") for line in lines)
    assert not changed(plan, gradient_checkpointing=False).fits
