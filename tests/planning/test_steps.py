"""The passes of an optimizer step in numbers, against prompt sharing's own plan of the same batches."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.planning.models import config, folder, settings
from trl_fsdp_qlora.planning.settings import Launch
from trl_fsdp_qlora.planning.steps import plan_step
from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.passes import build_pass_forest
from trl_fsdp_qlora.prefix_sharing.sharing import install_sharing


@pytest.fixture(scope="module")
def sharing():
    model = AutoModelForCausalLM.from_config(config(num_hidden_layers=1), dtype=torch.float32)
    return install_sharing(model, compares=False, entropy_gradient=False)


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


@pytest.mark.parametrize("kind", ["single", "zero2"])
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_passes_trunks_and_tokens_are_those_of_the_door(tmp_path, sharing, fields, kind):
    run = settings(folder(tmp_path), Launch(kind, use_cpu=True), **fields)
    torch.manual_seed(0)
    batches = batches_of(run)
    step = plan_step(run)
    trainer = sharing.plan_step(batches, run.tokens_per_pass, one_by_one=kind == "zero2")
    if trainer is None:
        assert not step.is_shared
        return
    forwards = trainer.forwards
    assert (step.batches_per_pass, step.passes_per_batch) == (trainer.batches_per_pass, trainer.passes_per_batch)
    assert (step.passes, step.trunks) == (len(forwards.rows_of_pass), int(forwards.trunks.sum()))
    assert step.values == (0 if trainer.values is None else trainer.values.count)
    of_passes = [
        build_pass_forest(forwards.sequences, forwards.kept, rows, forwards.rules).of_pass()[0].tokens
        for rows in forwards.rows_of_pass
    ]
    of_trunks = [node.depth - (forwards.kept[node.parent].depth if node.parent >= 0 else 0) for node in forwards.kept]
    assert step.computed == sum(of_passes) + sum(of_trunks)
    alive = [
        sum(tokens for tokens, node in zip(of_trunks, forwards.kept, strict=True) if node.first <= number <= node.last)
        for number in range(step.passes)
    ]
    held = [a + b for a, b in zip(of_passes, alive, strict=True)]
    assert step.longest.tokens + step.longest.trunk == max(held)
    assert (step.longest.tokens, step.longest.trunk) in zip(of_passes, alive, strict=True)


def test_a_step_without_a_look_ahead_computes_prompts_per_micro_batch(tmp_path):
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "num_generations": 8}
    run = settings(folder(tmp_path), prompt_tokens=100, max_completion_length=20, **fields)
    shared = plan_step(run)
    alone = plan_step(settings(tmp_path, prompt_tokens=100, max_completion_length=20, tokens_per_pass=0, **fields))
    stock = plan_step(settings(tmp_path, prompt_tokens=100, max_completion_length=20, prefix_sharing="off", **fields))
    # The trunk ends one token before its prompt does; each pass computes that one.
    assert shared.computed == 99 + 8 * 20 and (shared.forwards, shared.gathers) == (9, 18)
    assert alone.computed == 8 * 119 and (alone.forwards, alone.gathers) == (8, 16)
    assert stock.computed == 8 * 120
    assert plan_step(run, "ZeRO-3").computed == alone.computed and plan_step(run, "ZeRO-3").reason == "ZeRO-3"
    # A generation of two micro-batches: nobody knows what comes behind them.
    two = settings(tmp_path, prompt_tokens=100, max_completion_length=20, steps_per_generation=2, **fields)
    assert plan_step(two).trunks == 4 * shared.trunks
