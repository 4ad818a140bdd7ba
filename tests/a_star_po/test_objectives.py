"""The losses against their formulas, written out in float64."""

import math

import pytest
import torch

from trl_fsdp_qlora.a_star_po.objectives import advantage_weighted_loss, normalised_advantage, regression_loss


@pytest.fixture
def batch():
    torch.manual_seed(0)
    logps_BC = -torch.rand(5, 7, dtype=torch.float64)
    mask_BC = (torch.arange(7) < torch.tensor([7, 1, 3, 5, 2]).unsqueeze(1)).long()
    return logps_BC.requires_grad_(), -torch.rand(5, 7, dtype=torch.float64), mask_BC, torch.randn(5).double()


def test_regression_sums_over_tokens_and_averages_over_rows(batch):
    logps_BC, ref_BC, mask_BC, target_B = batch
    loss, kl_BC, implicit_B = regression_loss(logps_BC, ref_BC, mask_BC, target_B, beta2=0.1)
    expected, gradient_BC = 0.0, torch.zeros(5, 7)
    for b in range(5):
        ratio = sum((logps_BC[b, t] - ref_BC[b, t]).item() for t in range(7) if mask_BC[b, t])
        assert implicit_B[b].item() == pytest.approx(0.1 * ratio)
        deltas = [(ref_BC[b, t] - logps_BC[b, t]).item() for t in range(7) if mask_BC[b, t]]
        assert kl_BC[b].sum().item() == pytest.approx(sum(math.exp(delta) - delta - 1 for delta in deltas))
        error = 0.1 * ratio - target_B[b].item()
        expected += error**2 / 5
        gradient_BC[b] = 2 * error * 0.1 / 5 * mask_BC[b]
    assert loss.item() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(loss, logps_BC)
    torch.testing.assert_close(gradient.float(), gradient_BC)


def test_regression_leaves_rows_out_whose_target_is_not_defined(batch):
    logps_BC, ref_BC, mask_BC, target_B = batch
    target_B[2] = math.nan
    loss, _, _ = regression_loss(logps_BC, ref_BC, mask_BC, target_B, beta2=0.1)
    (gradient,) = torch.autograd.grad(loss, logps_BC)
    assert loss.isfinite() and gradient.isfinite().all()
    assert (gradient[2] == 0).all() and (gradient[3][:5] != 0).all()


def test_advantage_weighted_is_policy_gradient_plus_k3(batch):
    logps_BC, ref_BC, mask_BC, advantage_B = batch
    loss, kl_BC = advantage_weighted_loss(logps_BC, ref_BC, mask_BC, advantage_B, beta=0.03)
    expected = 0.0
    for b in range(5):
        for t in range(7):
            if mask_BC[b, t]:
                delta = (ref_BC[b, t] - logps_BC[b, t]).item()
                k3 = math.exp(delta) - delta - 1
                assert kl_BC[b, t].item() == pytest.approx(k3)
                expected += (0.03 * k3 - advantage_B[b].item() * logps_BC[b, t].item()) / 5
    assert loss.item() == pytest.approx(expected)


def test_normalised_advantage():
    normal = normalised_advantage(torch.tensor([1.0, 2.0, math.nan, 3.0]))
    assert normal[2] == 0 and normal.sum().abs() < 1e-6
    assert normal[[0, 1, 3]].std().item() == pytest.approx(1, abs=1e-3)
    assert (normalised_advantage(torch.tensor([0.5, 0.5])) == 0).all()
    # Equal numbers of which float32's mean is another one.
    assert (normalised_advantage(torch.tensor([0.3] * 7 + [math.nan])) == 0).all()
    assert (normalised_advantage(torch.tensor([0.5])) == 0).all()
