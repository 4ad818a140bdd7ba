"""The passes of an optimizer step of full length, against prompt sharing's plan of batches of tokens."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.prefix_sharing.helpers import build
from tests.tools.planning.models import config, folder, settings
from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.sharing import SharingOptions, install_sharing
from trl_fsdp_qlora.tools.planning.fake_run import FakeRun, Lengths, _batch_of
from trl_fsdp_qlora.tools.planning.launches import Launch


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


def passes_of(run, sharing):
    """The micro-batches and passes that a plan runs of a step."""
    rows = run.per_device_train_batch_size
    row_B = np.arange(rows * run.gradient_accumulation_steps)
    whole = _batch_of(row_B // run.num_generations, Lengths(run.prompt_tokens, run.max_completion_length))
    micro_batches = [whole.rows(part) for part in np.split(row_B, run.gradient_accumulation_steps)]
    return FakeRun(run, config(), False)._passes(sharing, whole, micro_batches)


def tokens_of(plan, number: int) -> int:
    """Tokens of a pass, with those of the trunks that it reads."""
    return int(plan.forest_of_pass(number)[0].lengths.sum())


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_the_passes_that_are_run_are_the_largest_of_the_trainers_own_step(tmp_path, sharing, fields):
    run = settings(folder(tmp_path), Launch(use_cpu=True), **fields)
    torch.manual_seed(0)
    rows = run.per_device_train_batch_size
    batches, part = passes_of(run, sharing)
    assert sum(len(batch.input_ids) for batch in batches) == sum(map(len, part.rows_of_pass))
    plan = sharing.plan_step(batches_of(run), run.tokens_per_pass)
    if plan is None:
        assert len(batches) == len(part.rows_of_pass) == 1 and not part.is_shared
        return
    of_all, of_part = ([tokens_of(x, number) for number in range(len(x.rows_of_pass))] for x in (plan, part))
    assert max(of_part) == max(of_all)
    assert len(of_part) <= 1 + 2 * rows
    assert (part.passes_per_batch > 1) == (plan.passes_per_batch > 1 and len(of_part) > 1)


LENGTHS = {"prompt_tokens": 100, "max_completion_length": 20}


@pytest.mark.parametrize(
    ("limit", "kind", "tokens"),
    [
        ({}, "single", [99 + 20] * 2),  # the trunk ends one token before its prompt does; each pass computes that one
        ({"tokens_per_pass": 0}, "single", [100 + 19]),
        ({}, "fsdp1", [100 + 19]),
    ],
)
def test_without_a_look_ahead_prompts_run_per_micro_batch(tmp_path, sharing, limit, kind, tokens):
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_generations": 8}
    run = settings(folder(tmp_path), Launch(kind, 2, use_cpu=True), **LENGTHS, **fields, **limit)
    _, part = passes_of(run, sharing)
    assert [tokens_of(part, number) for number in range(len(part.rows_of_pass))] == tokens
    assert part.is_shared == (len(tokens) > 1)


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "mamba2", "kimi_linear"])
def test_the_cache_of_recurrent_layers_is_transformers_own(name, tmp_path):
    """That of transformers' model after a forward of full rows."""
    model = build(name)
    model.config.save_pretrained(tmp_path)
    run = settings(tmp_path, use_peft=False, prompt_tokens=8, max_completion_length=4)
    planned = FakeRun(run, model.config, False).generation_bytes()
    cache = DynamicCache(config=model.config)
    # Mamba-2 alone takes its cache under another name.
    argument = "cache_params" if name == "mamba2" else "past_key_values"
    with torch.no_grad():
        model(torch.arange(3, 15).expand(run.rollout_rows, -1), use_cache=True, **{argument: cache})
    kept = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    states = [x for layer in kept for part in (layer.conv_states, layer.recurrent_states) for x in part.values()]
    keys = [x for layer in cache.layers for x in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    size = sum(x.nbytes for x in (*states, *keys) if x is not None)
    assert planned.cache == pytest.approx(size, rel=0.01)  # with a few tokens
