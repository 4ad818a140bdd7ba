"""The frozen head's Triton kernels against float64 logits: on a GPU, or in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/scoring/test_fused_tile.py     # needs Triton, no GPU
"""

import importlib.util
import os

import pytest
import torch

from trl_fsdp_qlora.compat.trl import ChunkedLogProbFunction
from trl_fsdp_qlora.scoring.frozen_head import FrozenHeadLogProbFunction

from .float64 import assert_equal, gradient, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA, or TRITON_INTERPRET=1 before Python starts"
    ),
]
N, H, V = 11, 24, 75
# bfloat16 has 8 bits: 2⁻⁸ for each weight of the second product, another for the gradient that is handed on, and twice as
# much in Triton's interpreter, which cuts bits off where a GPU rounds.
ROUNDED = 2**-6


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    """Sizes at which one call crosses tiles, chunks and blocks and ends in partial ones."""
    from trl_fsdp_qlora.scoring import fused_tile

    monkeypatch.setattr(fused_tile, "TOKEN_TILE", 8)
    monkeypatch.setattr(fused_tile, "VOCABULARY_CHUNK", 32)
    monkeypatch.setattr(fused_tile, "HIDDEN_BLOCK", 16)


def problem(dtype=torch.float32, spread: float = 1.0):
    torch.manual_seed(0)
    hidden_NH = torch.randn(N, H).to(DEVICE, dtype).requires_grad_()
    weight_VH = (torch.randn(V, H) * spread).to(DEVICE, dtype)
    targets_N = torch.randint(0, V, (N,))
    targets_N[:2] = torch.tensor([0, V - 1])
    return hidden_NH, weight_VH, targets_N.to(DEVICE), torch.randn(N).to(DEVICE)


def fused(hidden, weight, bias, targets, temperature=1.0, softcap=None, logit_scale=1.0, keep=True):
    return FrozenHeadLogProbFunction.apply(
        hidden, weight, bias, targets, temperature, softcap, logit_scale, keep, True
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("temperature", "logit_scale"), [(1.0, 1.0), (0.7, 0.25)])
def test_equals_float64_logits(bias, softcap, temperature, logit_scale):
    hidden, weight, targets, upstream = problem()
    bias_V = torch.randn(V).to(DEVICE) if bias else None
    settings = temperature, softcap, logit_scale
    found = fused(hidden, weight, bias_V, targets, *settings)
    assert_equal(found, hidden, weight, bias_V, targets, upstream, *settings)


def test_logits_that_grow_along_the_vocabulary_move_the_reference():
    """Every chunk has a new maximum, hundreds of nats above the last one's."""
    hidden, weight, targets, upstream = problem()
    ramp_V = torch.linspace(-300, 300, V).to(DEVICE)
    assert_equal(fused(hidden, weight, ramp_V, targets), hidden, weight, ramp_V, targets, upstream)


def test_a_target_that_is_not_scored_has_no_value_and_no_gradient():
    hidden, weight, targets, upstream = problem()
    every = fused(hidden, weight, None, targets)[0]
    some = targets.clone()
    some[::3] = -100
    log_probs, _ = fused(hidden, weight, None, some)
    scored = some >= 0
    assert not log_probs[~scored].any() and torch.equal(log_probs[scored], every[scored])
    got, all_rows = gradient(log_probs, hidden, upstream), gradient(every, hidden, upstream)
    assert not got[~scored].any() and torch.equal(got[scored], all_rows[scored])


def test_a_pass_without_gradient_gives_the_same_bits():
    hidden, weight, targets, _ = problem()
    with torch.no_grad():
        old = fused(hidden, weight, None, targets, softcap=5.0, keep=False)
    new = fused(hidden, weight, None, targets, softcap=5.0)
    assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])


def test_bfloat16_rounds_the_weights_of_the_second_product_alone():
    hidden, weight, targets, upstream = problem(torch.bfloat16)
    log_probs, entropy = fused(hidden, weight, None, targets)
    exact = hidden.detach().double().requires_grad_()
    want, want_entropy = reference(exact, weight, None, targets)
    # Products of bfloat16 operands are exact in float32.
    torch.testing.assert_close(log_probs.double(), want, atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=2e-5, rtol=0)
    expected = gradient(want, exact, upstream)
    ours = gradient(log_probs, hidden, upstream).double()
    assert (ours - expected).abs().max() <= ROUNDED * expected.abs().max()
    stock = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 32, None, 1.0, ("log_probs",))[0]
    stocks = gradient(stock, hidden, upstream).double()
    assert (ours - expected).norm() <= (stocks - expected).norm()


def test_autocast_projects_rounded_operands_and_hands_on_float32():
    hidden, weight, targets, upstream = problem()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        log_probs, _ = fused(hidden, weight, None, targets)
    exact = hidden.detach().bfloat16().double().requires_grad_()
    want, _ = reference(exact, weight.bfloat16(), None, targets)
    torch.testing.assert_close(log_probs.double(), want, atol=2e-5, rtol=0)
    got, expected = gradient(log_probs, hidden, upstream), gradient(want, exact, upstream)
    assert got.dtype == torch.float32
    assert (got - expected).norm() <= ROUNDED * expected.norm()


def test_a_sure_model_keeps_its_gradient_in_bfloat16():
    """W[y] - Σ p W loses what 1 - p_y is worth once p_y, rounded to 8 bits, is one."""
    _, weight, targets, upstream = problem(torch.bfloat16)
    sure = (weight[targets].float() * 0.7).bfloat16().requires_grad_()
    log_probs, _ = fused(sure, weight, None, targets)
    exact = sure.detach().double().requires_grad_()
    want, _ = reference(exact, weight, None, targets)
    assert 0 < (1 - want.exp()).median() < 2**-9
    got, expected = gradient(log_probs, sure, upstream).double(), gradient(want, exact, upstream)
    rows = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert rows.max() <= ROUNDED


def test_no_token():
    hidden, weight, targets, _ = problem()
    log_probs, entropy = fused(hidden[:0], weight, None, targets[:0])
    log_probs.sum().backward()
    assert log_probs.shape == entropy.shape == (0,) and not hidden.grad.any()
