"""What is found to fit was planned itself, and the next larger does not fit.

Covers `tools/planning/known_models.py`.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny import these_first
from tests.tools.planning.models import folder, settings
from trl_fsdp_qlora.tools.planning import largest
from trl_fsdp_qlora.tools.planning.hardware import GIB, Hardware
from trl_fsdp_qlora.tools.planning.known_models import MODELS, known_config
from trl_fsdp_qlora.tools.planning.launches import Launch
from trl_fsdp_qlora.tools.planning.plan import changed, make_plan

CARD = Hardware("a card", 2**40, 1)


def found(bytes_of, capacity: int, most: int, start: int) -> tuple[int, int]:
    """What `most_that_fits` finds if a count takes `bytes_of(count)`, and the number of plans that it makes."""
    tried = []

    def plan_of(count):
        tried.append(count)
        peak = bytes_of(count)
        return SimpleNamespace(peak=peak, capacity=capacity, fits=peak <= capacity)

    return largest.most_that_fits(plan_of, most, start), len(tried)


@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda count: 1000 + 7 * count,
        lambda count: 1000 + max(7 * count, 20 * count - 900),  # a kink: another phase needs most
        lambda count: 1000 + 7 * count + count**2 // 50,  # a mask
        lambda count: 1000 + 64 * (-(-count // 8)),  # steps
    ],
    ids=["line", "kink", "mask", "steps"],
)
def test_the_search_finds_what_counting_up_finds_in_few_plans(bytes_of):
    for capacity in (500, 1007, 1100, 2000, 9000, 10**9):
        for most in (1, 40, 4000):
            brute_force = max([count for count in range(1, most + 1) if bytes_of(count) <= capacity], default=0)
            for start in (0, 1, 25, 5000):
                largest_count, plans = found(bytes_of, capacity, most, start)
                assert largest_count == brute_force
                assert plans <= 16
    # Its own plan, one beyond, the answer, the next.
    assert found(lambda count: 1000 + 7 * count, 9000, 4000, 25)[1] <= 4


@pytest.mark.parametrize(("positions", "longest"), [(400, 144), (271, 0), (2**20, 2**17)])
def test_no_length_is_found_beyond_the_models_positions(tmp_path, positions, longest, monkeypatch):
    fits = SimpleNamespace(peak=0, capacity=1, fits=True)
    plan = make_plan(settings(folder(tmp_path, num_hidden_layers=1), prompt_tokens=256), CARD)
    plan.config.max_position_embeddings = positions
    monkeypatch.setattr(largest, "changed", lambda plan, **values: fits)
    assert largest.longest(plan) == longest


def test_no_more_completions_are_tried_than_a_step_can_have(tmp_path, monkeypatch):
    """With vLLM and micro-batches of a row, the bytes do not depend on the group."""
    plan = make_plan(settings(folder(tmp_path, num_hidden_layers=1), gradient_accumulation_steps=16), hardware=CARD)
    fits = SimpleNamespace(peak=0, capacity=1, fits=True)
    monkeypatch.setattr(largest, "changed", lambda plan, **values: fits)
    # Eight rows in each of sixteen micro-batches are 32 groups of four.
    assert largest.largest_group(plan) == 8192 // 32


@pytest.mark.slow  # some forty plans
@pytest.mark.exhaustive
def test_the_largest_group_and_the_longest_completion_fit_and_larger_ones_do_not(tmp_path):
    """A card on which a whole group of eight does not fit, next to one row of it."""
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_generations": 8}
    run = settings(folder(tmp_path, num_hidden_layers=2), Launch(), prompt_tokens=200, **fields)
    plan = make_plan(run, hardware=CARD)
    whole = changed(plan, per_device_train_batch_size=4, gradient_accumulation_steps=2, tokens_per_pass=0)
    plan = make_plan(run, hardware=replace(CARD, memory=whole.peak))
    group_in_a_batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "tokens_per_pass": 0}
    assert not changed(plan, **group_in_a_batch).fits
    group = largest.largest_group(plan)
    assert group >= 8 and largest.with_group(plan, group).fits and not largest.with_group(plan, group + 1).fits
    longest = largest.longest(plan)
    assert changed(plan, max_completion_length=longest).fits
    assert not changed(plan, max_completion_length=longest + 16).fits
    assert largest.longest(make_plan(run, replace(CARD, memory=2**20))) == 0


@pytest.mark.slow  # four of the models
@pytest.mark.exhaustive
def test_the_largest_model_fits_and_the_next_larger_one_does_not(tmp_path):
    card = Hardware("16 GB", 16 * GIB)
    plan = make_plan(settings(folder(tmp_path), Launch(), load_in_4bit=True), card)
    names = list(MODELS)
    name = largest.largest_model(plan)
    following = known_config(names[names.index(name) + 1])
    assert (
        make_plan(plan.settings, card, known_config(name)).fits and not make_plan(plan.settings, card, following).fits
    )


@pytest.mark.parametrize("name", these_first(MODELS, "SmolLM2-135M", "Qwen3-0.6B"))
def test_a_known_model_has_the_weights_that_its_card_states(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(known_config(name))
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert weights == pytest.approx(MODELS[name][1] * 1e9, rel=0.01)
