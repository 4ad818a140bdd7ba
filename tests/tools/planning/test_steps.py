"""The passes of an optimizer step of full length, against prompt sharing's plan of batches of tokens."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.prefix_sharing.helpers import build
from tests.tools.planning.models import config, folder, settings
from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.passes import Run
from trl_fsdp_qlora.prefix_sharing.recurrent.kinds import recurrent_layers
from trl_fsdp_qlora.prefix_sharing.sharing import SharingOptions, install_sharing
from trl_fsdp_qlora.tools.planning.launches import Launch
from trl_fsdp_qlora.tools.planning.steps import Pass, longest_pass, passes_like, state_bytes


@pytest.fixture(scope="module")
def sharing():
    model = AutoModelForCausalLM.from_config(config(num_hidden_layers=1), dtype=torch.float32)
    return install_sharing(model, SharingOptions(compares=False, entropy_gradient=False))


def batches_of(run) -> list[Batch]:
    count = run.gradient_accumulation_steps
    prompt = run.prompt_tokens
    rows = run.per_device_train_batch_size * count
    ids = torch.randint(3, 512, (rows, prompt + run.max_completion_length))
    first_of_group = torch.arange(rows) // run.num_generations * run.num_generations
    ids[:, :prompt] = ids[first_of_group, :prompt]
    labels = ids.clone()
    labels[:, :prompt] = -100
    parts = (x.chunk(count) for x in (ids, torch.ones_like(ids), labels))
    return [Batch(*part) for part in zip(*parts, strict=True)]


CASES = [
    {"per_device_train_batch_size": rows, "gradient_accumulation_steps": count, "num_generations": group, **changes}
    for rows, count, group in [(1, 8, 8), (2, 4, 8), (2, 8, 4), (3, 4, 6), (8, 1, 4), (8, 2, 8), (1, 12, 4), (6, 2, 4)]
    for changes in (
        {"prompt_tokens": 300, "max_completion_length": 20},
        {"prompt_tokens": 20, "max_completion_length": 40},
        {
            "prompt_tokens": 120,
            "max_completion_length": 60,
            "tokens_per_pass": random.Random(rows + group).randint(60, 900),
        },
    )
]


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_a_step_is_planned_as_the_trainer_plans_batches_of_tokens(tmp_path, sharing, fields):
    """Numbers in place of tokens have the passes that a model's own batches have."""
    run = settings(folder(tmp_path), Launch(use_cpu=True), **fields)
    torch.manual_seed(0)
    longest = longest_pass(run)
    plan = sharing.plan_step(batches_of(run), run.tokens_per_pass)
    if plan is None:
        assert (longest.trunk, longest.is_cut) == (0, False)
        return
    run_of_plan = Run(plan)
    forwards = [[*run_of_plan.of_pass(number)][-1] for number in range(len(plan.rows_of_pass))]
    assert longest.tokens + longest.trunk == max(int(forward.forest.lengths.sum()) for forward in forwards)
    assert longest.is_cut == (plan.passes_per_batch > 1)


# Rows, trunks, prompts that a pass has for itself, tokens of a prompt: trunks of 9 tokens pay in nine passes.
@pytest.mark.parametrize("rows, shared, own, prompt", [(3, 1, 0, 200), (3, 1, 2, 200), (4, 2, 0, 10), (7, 2, 3, 70)])
def test_passes_like_the_longest_one_have_its_size(rows, shared, own, prompt):
    size = Pass(rows * 19 + shared + own * prompt, rows, shared * (prompt - 1), shared)
    shared_passes = passes_like(size, completion=20)
    last = len(shared_passes.plan.rows_of_pass) - 1
    for number in (0, last):
        *trunks, forward = shared_passes.of_pass(number)
        assert [trunk.forest.tokens for trunk in trunks] == ([] if number else [size.trunk])
        read = forward.forest.lengths[forward.forest.computed :]
        assert Pass(forward.forest.tokens, len(forward.rows), int(read.sum()), len(read)) == size
        assert len(forward.view.ending) == (shared if number == last else 0)


def test_a_step_without_a_look_ahead_computes_prompts_per_micro_batch(tmp_path):
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_generations": 8}
    run = settings(folder(tmp_path), prompt_tokens=100, max_completion_length=20, **fields)
    alone = settings(tmp_path, prompt_tokens=100, max_completion_length=20, tokens_per_pass=0, **fields)
    # The trunk ends one token before its prompt does; each pass computes that one.
    assert longest_pass(run) == Pass(20, 1, trunk=99, prompts=1)
    assert longest_pass(alone) == longest_pass(run, can_share=False) == Pass(119, 1)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "mamba2", "kimi_linear"])
def test_the_bytes_of_states_that_a_row_keeps(name):
    """They are those of transformers' own cache after a forward of eight tokens."""
    model = build(name)
    cache = DynamicCache(config=model.config)
    # Mamba-2 alone takes its cache under another name.
    argument = "cache_params" if name == "mamba2" else "past_key_values"
    with torch.no_grad():
        model(torch.arange(3, 11).unsqueeze(0), use_cache=True, **{argument: cache})
    kept = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    states = [x for layer in kept for part in (layer.conv_states, layer.recurrent_states) for x in part.values()]
    width = model.config.get_text_config().hidden_size
    counted = sum(state_bytes(layer, width) for layer in recurrent_layers(model.to("meta")))
    assert counted == sum(state.nbytes for state in states if state is not None) > 0
