"""What a plan puts together: the heap that stays on a CPU, what is measured once, what nothing is written to."""

from dataclasses import replace

import pytest

from tests.planning.models import folder, settings
from trl_fsdp_qlora.planning import passes, skeleton
from trl_fsdp_qlora.planning.hardware import HEAP_SHARE, HEAP_SHARE_CHECKPOINTING, Hardware
from trl_fsdp_qlora.planning.plan import ACTIVATIONS, CACHE, LOGITS, ROOM, make_plan
from trl_fsdp_qlora.planning.settings import Launch
from trl_fsdp_qlora.planning.solve import changed
from trl_fsdp_qlora.upstream.memory import TRL_VOCABULARY_CHUNK

CPU = Hardware("a host", 2**40, 1, gpu=False)


def test_the_fullest_pass_s_heap_lies_beside_what_follows_it(tmp_path):
    """As measured (docs/plan.md): a C library's heap does not shrink when the pass is over; what comes then lies in it."""
    plan = make_plan(settings(folder(tmp_path)), hardware=CPU)
    own = passes.loss(plan.settings, plan.config, True, False)
    assert own.heap == own.small  # no checkpointing: all of it is there at the peak
    heap = (1 + HEAP_SHARE) * own.heap
    assert plan.phases["forward_backward"][ROOM] == pytest.approx(heap - own.small, abs=2)
    assert plan.phases["optimizer"][ROOM] == pytest.approx(heap, abs=2)
    coming = sum(plan.phases["generate"].get(part, 0) for part in (ACTIVATIONS, CACHE, LOGITS))
    assert plan.phases["generate"][ROOM] == pytest.approx(heap - coming, abs=2)
    assert ROOM not in plan.phases["load"]
    kept = make_plan(settings(folder(tmp_path), gradient_checkpointing=True), hardware=CPU)
    own = passes.loss(kept.settings, kept.config, True, False)
    assert kept.phases["optimizer"][ROOM] == pytest.approx((1 + HEAP_SHARE_CHECKPOINTING) * own.heap, abs=2)


def test_a_buffer_that_is_not_written_to_is_handed_out(tmp_path):
    """TRL's, on padded rows with a vocabulary smaller than its columns; the frozen head's kernel has none."""
    run = settings(folder(tmp_path), prefix_sharing="off")
    scored = passes.loss_shape(run, False, False).scored
    assert (
        make_plan(run, hardware=CPU).unwritten == scored * (TRL_VOCABULARY_CHUNK - 1024) * 4
    )  # whole pages of 512 columns
    assert make_plan(settings(tmp_path), hardware=CPU).unwritten == 0


@pytest.mark.slow  # six plans
def test_plans_for_other_numbers_of_ranks_measure_nothing_again(tmp_path):
    run = settings(folder(tmp_path), Launch("fsdp2", 2))
    card = Hardware("a card", 2**40, 8)
    first = make_plan(run, hardware=card)
    passes_before, models_before = passes._measure.cache_info().misses, skeleton.whole.cache_info().misses
    four = changed(first, processes=4)
    assert passes._measure.cache_info().misses == passes_before and skeleton.whole.cache_info().misses == models_before
    anew = replace(run, launch=Launch("fsdp2", 4))
    passes._measure.cache_clear()
    skeleton.whole.cache_clear()
    assert make_plan(anew, hardware=card).phases == four.phases
    longer = changed(first, max_completion_length=80)
    assert longer.phases["forward_backward"] != first.phases["forward_backward"]
    for field, value in (("gradient_checkpointing", True), ("load_in_4bit", True)):
        assert changed(first, **{field: value}).phases != first.phases, field
