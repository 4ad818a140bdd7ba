"""Passes that compute a common beginning once, compared with padded passes: values and gradients.

Covers `prefix_sharing/attention/layers.py`, `prefix_sharing/batch.py`,
`prefix_sharing/recurrent/level_by_level.py`.
"""

import pytest
import torch

from trl_fsdp_qlora.prefix_sharing import passes, row
from trl_fsdp_qlora.prefix_sharing.attention import cascade
from trl_fsdp_qlora.prefix_sharing.batch import Batch, Instructions
from trl_fsdp_qlora.prefix_sharing.sharing import SharingOptions, install_sharing

from .calls import random_tokens
from .helpers import (
    RECURRENT,
    SUPPORTED,
    VOCABULARY,
    assert_equal_gradients,
    build,
    closed,
    gradients,
    with_stock_head,
)
from .test_attention import dense_backward, dense_forward

FAST = ("llama", "gemma2", "gpt_oss", "qwen3_5", "mamba2", "lfm2")
FAMILIES = SUPPORTED | {name: make for name, (make, _) in RECURRENT.items()}


@pytest.fixture(autouse=True)
def short_beginnings(monkeypatch):
    monkeypatch.setattr(passes, "MIN_SAVED_BY_TRUNK", 1)


def groups(draw):
    """Three prompts behind one system prompt, four completions of each, of which two begin alike; some tokens
    unlabelled.

    Each row is its tokens, which of them are labels, and how many are the prompt's.
    """
    rows = []
    system = random_tokens(12, draw)
    for n in range(3):
        prompt = torch.cat([system, random_tokens(6 + n, draw)])
        for c in range(4):
            completion = random_tokens(5 + 2 * c, draw)
            if c == 2:
                completion[:4] = rows[-1][0][len(prompt) : len(prompt) + 4]
            tokens = torch.cat([prompt, completion])
            rows.append((tokens, [*range(len(prompt) + c % 2, len(tokens))], len(prompt)))
    return rows


def shuffled(rows, seed=1) -> dict[str, torch.Tensor]:
    """A batch as GRPO's: prompts padded on the left, completions on the right; in any order."""
    draw = torch.Generator().manual_seed(seed)
    rows = [rows[i] for i in torch.randperm(len(rows), generator=draw)]
    longest = max(prompt for _, _, prompt in rows)
    width = longest + max(len(tokens) - prompt for tokens, _, prompt in rows)
    ids = torch.randint(3, VOCABULARY, (len(rows), width), generator=draw)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for i, (tokens, scored, prompt) in enumerate(rows):
        offset = longest - prompt
        ids[i, offset : offset + len(tokens)] = tokens
        mask[i, offset : offset + len(tokens)] = 1
        labels[i, offset + torch.tensor(scored)] = tokens[scored]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches_of(batch, count):
    parts = [batch[name].chunk(count) for name in ("input_ids", "attention_mask", "labels")]
    return [Batch(*part) for part in zip(*parts, strict=True)]


def run(model, batches, weights, plan=None, per_pass=1):
    model.zero_grad()
    values = []
    tokens = 0
    run_of_plan = None if plan is None else passes.PlannedForwards(plan)
    for number in range(0, len(batches), per_pass):
        some = batches[number : number + per_pass]
        names = ("input_ids", "attention_mask", "labels")
        arguments = {name: torch.cat([getattr(b, name) for b in some]) for name in names}
        if run_of_plan is None:
            output = model(**arguments, fused_lm_head=True)
        else:
            for forward in run_of_plan.of_pass(number // per_pass):
                tokens += forward.forest.tokens
                output = model(**arguments, sharing=Instructions(forward=forward), fused_lm_head=True)
        values.append(output.log_probs.detach())
        (output.log_probs * torch.cat(weights[number : number + per_pass])).sum().backward()
    return torch.cat(values), gradients(model), tokens


def compare(model, batch, count, tokens_per_pass=None, tolerance=1e-5):
    sharing = install_sharing(model, SharingOptions(compares=False))
    batches = batches_of(batch, count)
    shape = batch["labels"][:, 1:].shape
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(batch["labels"].device).chunk(count)
    with closed(sharing):
        reference, expected, _ = run(model, batches, weights)
    plan = sharing.plan_step(batches, tokens_per_pass or batch["input_ids"].numel() // count)
    values, grads, tokens = run(model, batches, weights, plan, plan.batches_per_pass)
    torch.testing.assert_close(values, reference, atol=2e-5, rtol=1e-5)
    assert_equal_gradients(grads, expected, tolerance)  # float32, sums in other orders
    return tokens


SLOW = [name for name in FAMILIES if name not in FAST]


@pytest.mark.parametrize("count", [2, 3, 12])
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in SLOW)])
def test_cut_passes_give_the_gradients_of_padded_ones(name, count):
    model = with_stock_head(build(FAMILIES[name]))
    batch = shuffled(groups(torch.Generator().manual_seed(0)))
    # Zamba's layers add up their own outputs: stock's own float32 gradients are off from float64's by up to 6.8e-5 of
    # the largest (with AVX2; 2.9e-5 without, 5.2e-5 with AVX-512).
    tolerance = 7e-5 if name == "zamba2" else 1e-5
    tokens = compare(model, batch, count, tolerance=tolerance)
    trie = len({tuple(row.tolist()[:n]) for row in without_padding(batch) for n in range(1, len(row))})
    # Every row computes the token before its first label again.
    assert tokens <= trie + 12 * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "qwen3_5"])
def test_cut_passes_on_a_gpu_give_the_gradients_of_padded_ones(name):
    """In float32, which flash attention refuses; rows are filled up to a multiple of 64 there."""
    model = with_stock_head(build(FAMILIES[name])).to("cuda")
    batch = {key: x.to("cuda") for key, x in shuffled(groups(torch.Generator().manual_seed(0))).items()}
    compare(model, batch, 3, tolerance=1e-4)


@pytest.mark.parametrize("multiple", [1, 64])
@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma3"])
def test_the_calls_for_cuda_take_kept_keys(name, multiple, monkeypatch):
    """Windows among them, in rows filled up to a multiple, with a dense stand-in for flash attention."""
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", dense_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", dense_backward)
    monkeypatch.setitem(cascade._KERNELS, "cpu", cascade._KERNELS["cuda"])
    monkeypatch.setattr(cascade, "refuses", lambda call: None)
    monkeypatch.setattr(row, "row_multiple", lambda device: multiple)
    model = with_stock_head(build(FAMILIES[name]))
    compare(model, shuffled(groups(torch.Generator().manual_seed(0))), 3)
    figures = model.prompt_sharing.figures
    assert figures.tokens % multiple == 0
    assert set(figures.layer_calls) == {"cascade"}


def without_padding(batch) -> list[torch.Tensor]:
    return [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
