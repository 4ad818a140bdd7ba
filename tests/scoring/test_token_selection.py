"""Token subsets: exact probabilities, unbiased gradients, reproducible draws, refused combinations."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_fsdp_qlora.scoring.token_selection import (
    capped_probability,
    select_tokens,
    step_generator,
    weight_gradient,
)

DRAWS = 4000
ESTIMATORS = {
    "uniform": {"strategy": "uniform", "rate": 0.4},
    "uniform_capped": {"strategy": "uniform", "rate": 0.6, "max_tokens": 3},
    "prefix_cut": {"strategy": "prefix_cut", "rate": 0.5},
    "prefix_cut_from_the_middle": {"strategy": "prefix_cut", "rate": 0.75, "always_first": 2},
    "s_grpo_capped": {"strategy": "s_grpo", "rate": 0.5, "always_first": 2, "max_tokens": 4},
}


def masks(*lengths: int) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).long()


def draws(mask, count=DRAWS, weighting="horvitz_thompson", **options):
    """`count` independent selections of one mask, as one big batch."""
    generator = step_generator(0, 0, 0, 0)
    selected = select_tokens(mask.repeat(count, 1), weighting=weighting, generator=generator, **options)
    return [tensor.view(count, *mask.shape) for tensor in selected]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_frequency_of_each_token_is_one_over_its_weight(name):
    mask = masks(9, 6, 1)
    keep, weight = draws(mask, **ESTIMATORS[name])
    assert not keep[:, mask == 0].any() and not weight[~keep].any()
    probability = 1 / weight.amax(0)[mask.bool()].double()
    frequency = keep.double().mean(0)[mask.bool()]
    deviation = (probability * (1 - probability) / DRAWS).sqrt()
    # 16 tokens, so 4.5 deviations is a chance of one in ten thousand. A token of probability 1 has deviation 0.
    assert ((frequency - probability).abs() <= 4.5 * deviation + 1e-6).all()


def brute_force_capped(n, rate, room):
    total = 0.0
    for drawn in product([0, 1], repeat=n):
        total += rate ** sum(drawn) * (1 - rate) ** (n - sum(drawn)) * min(sum(drawn), room)
    return total / n


def test_capped_probability_equals_enumeration():
    for n, rate, room in product([1, 2, 7], [0.3, 0.9, 1.0], [0, 1, 3, 9]):
        got = capped_probability(torch.tensor([[n], [5]]), rate, room)[0].item()
        assert got == pytest.approx(brute_force_capped(n, rate, room), abs=1e-12)
    of_thousands = capped_probability(torch.tensor([[8192]]), 0.5, 1000).item()
    assert of_thousands == pytest.approx(1000 / 8192, rel=1e-9)


def logps_of(table, ids_BC):
    """Log-probabilities of tokens from the one before each: enough for every token to have its own gradient."""
    return table.log_softmax(-1)[torch.cat([torch.zeros_like(ids_BC[:, :1]), ids_BC[:, :-1]], 1), ids_BC]


def loss_of(logps_BC, old_BC, reference_BC, mask_BC, beta=0.1):
    """GRPO's token loss `(..., B)` with clipping active and the k3 KL, normalised by the full token count."""
    advantages = torch.tensor([1.3, -0.7, 0.4]).unsqueeze(1)
    ratio = (logps_BC - old_BC).exp()
    policy = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (reference_BC - logps_BC).exp() - (reference_BC - logps_BC) - 1
    return ((policy + beta * kl) * mask_BC).sum(-1) / mask_BC.sum(-1)


def gradients_over_draws(options, corrupt=1.0):
    """Full gradient, and one gradient a draw, through `weight_gradient` as the trainer uses it."""
    mask = masks(9, 6, 4)
    torch.manual_seed(1)
    table = torch.randn(7, 7, dtype=torch.float64, requires_grad=True)
    logps = logps_of(table, torch.randint(0, 7, mask.shape))
    old, reference = logps.detach() + 0.3 * torch.randn(2, *mask.shape)
    full = torch.autograd.grad(loss_of(logps, old, reference, mask).mean(), table, retain_graph=True)[0]
    # The estimate of one draw is linear in the tokens' gradients: take each token's once, then combine.
    values = logps[mask.bool()]
    per_token = torch.stack([torch.autograd.grad(x, table, retain_graph=True)[0].flatten() for x in values])
    keep, weight = draws(mask, **options)
    leaf = logps.detach().expand_as(keep).clone().requires_grad_()
    weighted = weight_gradient(torch.where(keep, leaf, 0.0), weight * corrupt)
    compared = (torch.where(keep, x, 0.0) for x in (old, reference))
    estimates = torch.autograd.grad(loss_of(weighted, *compared, mask).mean(-1).sum(), leaf)[0]
    return full.flatten(), estimates[:, mask.bool()] @ per_token


def standardised_error(full, estimates):
    """Hotelling's T² of the mean against the full gradient, per degree of freedom: about 1 if it is unbiased."""
    difference = estimates.mean(0) - full
    covariance = torch.cov(estimates.T) / len(estimates)
    values, vectors = torch.linalg.eigh(covariance)
    used = values > values.max() * 1e-8
    return ((difference @ vectors)[used] ** 2 / values[used]).mean().item(), int(used.sum())


@pytest.mark.parametrize("name", ["uniform", "prefix_cut", "s_grpo_capped"])
def test_the_horvitz_thompson_gradient_is_unbiased(name):
    full, estimates = gradients_over_draws(ESTIMATORS[name])
    error, dimensions = standardised_error(full, estimates)
    # Mean of `dimensions` chi-squares with one degree each.
    limit = 1 + 4 * (2 / dimensions) ** 0.5
    assert error < limit
    wrong, _ = standardised_error(full, gradients_over_draws(ESTIMATORS[name], corrupt=1.1)[1])
    assert wrong > limit


def test_self_normalized_is_s_grpos_mean_over_the_kept():
    mask = masks(9, 5)
    keep, weight = select_tokens(mask, "s_grpo", rate=0.5, always_first=1, generator=step_generator(0, 1, 0, 0))
    values = torch.randn(mask.shape)
    want = torch.stack([row[kept].mean() for row, kept in zip(values, keep, strict=True)])
    torch.testing.assert_close((values * weight).sum(-1) / mask.sum(-1), want)


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    strategy=st.sampled_from(["all", "s_grpo", "uniform", "prefix_cut"]),
    rate=st.floats(0.5, 1.0),
    always_first=st.integers(0, 15),
    cap=st.integers(0, 5) | st.none(),
    weighting=st.sampled_from(["self_normalized", "horvitz_thompson"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_what_holds_for_every_draw(lengths, strategy, rate, always_first, cap, weighting, seed):
    always_first = 0 if strategy == "uniform" else always_first
    cap = None if cap is None or strategy == "prefix_cut" else always_first + 1 + cap
    mask = masks(*lengths, 12)
    # Holes, as tool results leave them.
    mask[:, 3] = 0
    options = {"rate": rate, "always_first": always_first, "max_tokens": cap, "weighting": weighting}
    keep, weight = select_tokens(mask, strategy, **options, generator=step_generator(seed, 0, 0, 0))
    assert keep.dtype == torch.bool and weight.dtype == torch.float32 and keep.shape == weight.shape == mask.shape
    assert not (keep & (mask == 0)).any()
    assert weight.isfinite().all() and torch.equal(weight > 0, keep)
    first = (mask.cumsum(-1) <= always_first) & mask.bool()
    assert (keep | ~first).all()
    if cap is not None and strategy != "all":
        assert (keep.sum(-1) <= cap).all()
    if strategy == "prefix_cut":
        number = mask.cumsum(-1)
        kept_to = torch.where(keep, number, 0).amax(-1, keepdim=True)
        assert torch.equal(keep, (number <= kept_to) & mask.bool())
        assert (keep.any(-1) == mask.bool().any(-1)).all()
    again = select_tokens(mask, strategy, **options, generator=step_generator(seed, 0, 0, 0))
    assert torch.equal(keep, again.keep) and torch.equal(weight, again.weight)


def test_prefix_cut_keeps_the_expected_share():
    for rate in (0.5, 0.7, 1.0):
        keep, _ = draws(masks(100), strategy="prefix_cut", rate=rate)
        shares = keep.double().mean((1, 2))
        # {m..L} holds whole numbers: up to half a token of 100 off, in addition to the draw's own error.
        assert abs(shares.mean() - rate) < 0.0051 + 4 * shares.std() / DRAWS**0.5


def test_draws_depend_on_seed_step_micro_step_and_rank_alone():
    state = torch.get_rng_state()
    keys = [tuple(int(i == one) for i in range(4)) for one in range(5)]
    drawn = [select_tokens(masks(64), "uniform", generator=step_generator(*key)).keep.tolist() for key in keys]
    assert all(first != second for i, first in enumerate(drawn) for second in drawn[:i])
    assert torch.equal(state, torch.get_rng_state())


def test_options_that_cannot_be_right_are_refused():
    for options, named in (
        ({"strategy": "sgrpo"}, "token_selection='sgrpo'"),
        ({"strategy": "uniform", "rate": float("nan")}, r"token_selection_rate=nan: .*in \(0, 1\]"),
        ({"strategy": "uniform", "always_first": 3}, "token_selection_always_first=3: 'uniform' .*'s_grpo'"),
        ({"strategy": "s_grpo", "always_first": 4, "max_tokens": 3}, "token_selection_max_tokens=3: "),
        (
            {"strategy": "s_grpo", "always_first": 4, "max_tokens": 4, "weighting": "horvitz_thompson"},
            "token_selection_max_tokens=4: .* probability 0",
        ),
        ({"strategy": "prefix_cut", "rate": 0.3}, r"token_selection_rate=0\.3: 'prefix_cut' .* 0\.5 or more"),
        ({"strategy": "prefix_cut", "rate": 0.75, "max_tokens": 30}, "token_selection_max_tokens=30: 'prefix_cut'"),
    ):
        with pytest.raises(ValueError, match=named):
            select_tokens(masks(5), **options)
