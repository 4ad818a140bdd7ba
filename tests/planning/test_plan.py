"""What a plan puts together: the heap that stays on a CPU, what is measured once, what nothing is written to."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.planning.models import folder, settings
from trl_fsdp_qlora.compat.memory import TRL_VOCABULARY_CHUNK
from trl_fsdp_qlora.planning import passes, skeleton, static
from trl_fsdp_qlora.planning.hardware import HEAP_SHARE, HEAP_SHARE_CHECKPOINTING, Hardware
from trl_fsdp_qlora.planning.plan import ACTIVATIONS, CACHE, COMPARISON, COPY, HEAD, LOGITS, ROOM, make_plan
from trl_fsdp_qlora.planning.settings import Launch, from_config
from trl_fsdp_qlora.planning.solve import changed

CPU = Hardware("a host", 2**40, 1, gpu=False)


def test_the_fullest_pass_s_heap_lies_beside_what_follows_it(tmp_path):
    """As measured (docs/plan.md): a C library's heap does not shrink when the pass is over; what comes then lies in it."""
    plan = make_plan(settings(folder(tmp_path)), hardware=CPU)
    own = passes.loss(plan.settings, plan.config, True, False)
    assert own.heap == own.small  # no checkpointing: all of it is there at the peak
    trained = plan.phases["optimizer"][static.GRADIENTS]  # made by the pass, so in its heap
    heap = (1 + HEAP_SHARE) * own.heap
    assert plan.phases["forward_backward"][ROOM] == pytest.approx(heap - own.small, abs=2)
    assert plan.phases["optimizer"][ROOM] == pytest.approx(heap - trained, abs=2)
    assert plan.phases["save"][ROOM] == pytest.approx(heap, abs=2)
    coming = sum(plan.phases["generate"].get(part, 0) for part in (ACTIVATIONS, CACHE, LOGITS, COPY))
    assert plan.phases["generate"][ROOM] == pytest.approx(heap - coming, abs=2)
    assert ROOM not in plan.phases["load"]
    kept = make_plan(settings(folder(tmp_path), gradient_checkpointing=True), hardware=CPU)
    own = passes.loss(kept.settings, kept.config, True, False)
    assert kept.phases["save"][ROOM] == pytest.approx((1 + HEAP_SHARE_CHECKPOINTING) * own.heap, abs=2)


def test_a_scoring_pass_has_the_heap_beside_it_that_the_step_before_left(tmp_path):
    plan = make_plan(settings(folder(tmp_path), beta=0.1), hardware=CPU)
    parts = plan.phases["score"]
    heap = plan.phases["save"][ROOM]
    assert parts[ROOM] + parts[ACTIVATIONS] == pytest.approx(heap, abs=2) and heap > 2 * parts[ACTIVATIONS]


def test_gradients_are_counted_once_where_the_step_has_one_pass(tmp_path):
    """Of full training, whose gradients weigh: a pass makes them while activations go; of several passes all but the first find them."""
    folder(tmp_path)
    one, two = (
        make_plan(settings(tmp_path, use_peft=False, gradient_accumulation_steps=n), hardware=CPU) for n in (1, 2)
    )
    whole = one.phases["optimizer"][static.GRADIENTS]
    assert one.phases["forward_backward"].get(static.GRADIENTS, 0) < 0.3 * whole
    assert two.phases["forward_backward"][static.GRADIENTS] == whole


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_the_comparison_keeps_gradients_aside_and_comes_before_the_optimizers_state(tmp_path, optim):
    card = Hardware("a card", 2**40, 1)
    fields = {"use_peft": False, "num_generations": 2, "per_device_train_batch_size": 2, "optim": optim}
    plan = make_plan(settings(folder(tmp_path), **fields), hardware=card)
    whole = plan.phases["optimizer"][static.GRADIENTS]
    state = plan.phases["optimizer"].get(static.OPTIMIZER, 0)
    own = passes.loss(plan.settings, plan.config, True, True).peak
    first = passes.comparison(plan.settings, plan.config, True, True).peak + whole
    assert first > own and state == (0 if optim == "sgd" else 2 * whole)
    added = plan.phases["forward_backward"]
    together = sum(added.get(part, 0) for part in (ACTIVATIONS, HEAD, COMPARISON, static.GRADIENTS))
    assert together == max(own, first - state)


def test_a_prefill_has_its_prompts_keys_and_values_beside_it(tmp_path):
    """Long prompts, short completions: generation needs most before its first token."""
    run = settings(folder(tmp_path), prompt_tokens=256, max_completion_length=1)
    plan = make_plan(run, hardware=CPU)
    shape = passes.Shape(2, 256, 0, False)
    prefill = passes.measure(run, plan.config, shape, False, False).peak
    prompts = 2 * 256 * 5 * 2 * 2 * 32 * 4  # rows, tokens, layers, keys and values, heads, their size, bytes
    assert (
        sum(plan.phases["generate"].get(part, 0) for part in (ACTIVATIONS, CACHE, LOGITS, COPY)) == prefill + prompts
    )


def test_a_plan_within_a_launch_of_fsdp2_knows_it_before_accelerate_says_so(monkeypatch):
    """On GPUs the state says MULTI_GPU until the trainer has made its `Accelerator`, which is after the plan."""

    def config(device):
        state = SimpleNamespace(distributed_type=SimpleNamespace(value="MULTI_GPU"))
        return SimpleNamespace(
            distributed_state=state,
            deepspeed_plugin=None,
            world_size=2,
            device=SimpleNamespace(type=device),
            bf16=True,
            fp16=False,
        )

    assert from_config(config("cuda"), None).launch.kind == "ddp"
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert from_config(config("cuda"), None).launch.kind == "fsdp2"
    assert from_config(config("cpu"), None).launch.kind == "ddp"  # which accelerate makes of it there


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
