"""Which tokens of a completion enter the loss, and with which weight.

Every weight here makes a sum over the kept tokens an estimate of the sum over all tokens of a completion, so a loss
keeps the normaliser it has:

- `horvitz_thompson`: 1/p_t, with p_t the exact probability that token t is kept. Unbiased for every loss that is a sum
  over tokens: E[Σ_kept g_t / p_t] = Σ_t g_t. The variance grows with the largest 1/p_t.
- `self_normalized`: L/|T|, the mean over the kept tokens T times the number of tokens L. With `loss_type="grpo"` this
  is S-GRPO's own 1/|T_i|. Bounded, but with unequal p_t (α > 0, or a prefix cut) it over-weights the early tokens.

Neither is right for a ratio taken over the sequence (GSPO, VESPO): the gradient there is a nonlinear function of all
tokens' log-probabilities, which no weight on single tokens reproduces.

A weight acts on the gradient alone, see [`weight_gradient`]; so the KL term, which is read off the same
log-probabilities, is over the same tokens with the same weights.

Sources: S-GRPO and its cap, arXiv 2504.20834; uniform sampling and the random prefix cut, arXiv 2603.06619; the
probabilities are derived in `docs/token_selection.md`.
"""

from typing import NamedTuple

import numpy as np
import torch

from .transfer import to_device, widest_float

STRATEGIES = ("all", "s_grpo", "uniform", "prefix_cut")
WEIGHTINGS = ("auto", "self_normalized", "horvitz_thompson")


class TokenSelection(NamedTuple):
    """Kept tokens (`bool`) and their weights (`float32`, zero if not kept), both `(B, C)`."""

    keep: torch.Tensor
    weight: torch.Tensor


def check_selection(
    strategy: str, rate: float, always_first: int, max_tokens: int | None, weighting: str = "auto"
) -> str:
    """Check the options of [`select_tokens`] against each other and return the weighting with `"auto"` resolved.

    Raises:
        ValueError: names the value, the reason and what to write instead.
    """
    if strategy not in STRATEGIES:
        names = ", ".join(STRATEGIES)
        raise ValueError(f"token_selection={strategy!r} is unknown; the strategies are {names}")
    if weighting not in WEIGHTINGS:
        names = ", ".join(WEIGHTINGS)
        raise ValueError(f"token_selection_weighting={weighting!r} is unknown; it is one of {names}")
    if weighting == "auto":
        weighting = "self_normalized" if strategy == "s_grpo" else "horvitz_thompson"
    is_unbiased = weighting == "horvitz_thompson"
    reason = _refusal(strategy, rate, always_first, max_tokens, is_unbiased)
    if reason is not None:
        raise ValueError(f"token_selection_{reason}")
    return weighting


def _refusal(strategy: str, rate: float, always_first: int, max_tokens: int | None, is_unbiased: bool) -> str | None:
    """The option that does not go with the others, and the reason; `None` if all do."""
    if not 0 < rate <= 1:
        return f"rate={rate}: it is the share of tokens kept, in (0, 1]; use 0.5 for half"
    if always_first < 0:
        return f"always_first={always_first}: it counts tokens; use 0 for none"
    if strategy == "uniform" and always_first:
        return f"always_first={always_first}: 'uniform' has none; use 's_grpo'"
    # A cut drawn uniformly from 1..L keeps half of the tokens on average, and every token must stay possible.
    if strategy == "prefix_cut" and rate < 0.5:
        return f"rate={rate}: 'prefix_cut' cannot keep fewer than half of the tokens; use 0.5 or more"
    if max_tokens is None:
        return None
    if max_tokens < max(always_first, 1):
        return f"max_tokens={max_tokens}: it is below the tokens that are always kept; raise it"
    if strategy == "prefix_cut":
        return f"max_tokens={max_tokens}: 'prefix_cut' would never see what is behind it; lower the rate"
    if is_unbiased and max_tokens <= always_first:
        return f"max_tokens={max_tokens}: the other tokens would have probability 0"
    return None


def select_tokens(
    completion_mask: torch.Tensor,
    strategy: str,
    *,
    rate: float = 0.5,
    always_first: int = 0,
    max_tokens: int | None = None,
    weighting: str = "auto",
    generator: torch.Generator | None = None,
) -> TokenSelection:
    """Draw the tokens that enter the loss.

    Tokens are numbered t = 0.. over the valid tokens of their completion, with anything between them.

    - `all`: every valid token, weight 1; draws nothing.
    - `s_grpo`: t < α always, the others with probability `rate`. If these are more than `max_tokens`, that many stay:
      the first α, and a random subset of the rest.
    - `uniform`: the same with α = 0.
    - `prefix_cut`: tokens 0..K−1 with K uniform on {m..L}, m = (2·rate − 1)·L, and at least α and 1. The expected
      share is `rate`. Tokens behind the cut need not be computed at all; the largest Horvitz–Thompson weight is
      L − m + 1.

    With several optimisation passes over a batch (`num_iterations > 1`), draw again for each pass: the policy of the
    second pass depends on the subset of the first, so weights drawn once would be correlated with the gradient that
    they multiply, and the second estimate would be biased.

    Args:
        completion_mask: `(B, C)`, nonzero for tokens that count. In a row without any, no token is kept.
        strategy: one of `STRATEGIES`.
        rate: P; for `prefix_cut` the expected share of the tokens, 0.5 or more.
        always_first: α. Completions no longer than α are kept whole.
        max_tokens: cap on the kept tokens of one completion.
        weighting: `"self_normalized"`, `"horvitz_thompson"`, or `"auto"`, which is the former for `s_grpo`.
        generator: a CPU generator; see [`step_generator`].

    Returns:
        [`TokenSelection`] on the mask's device.

    Raises:
        ValueError: as [`check_selection`].
    """
    weighting = check_selection(strategy, rate, always_first, max_tokens, weighting)
    device = completion_mask.device
    valid_BC = completion_mask.bool()
    if strategy == "all":
        return TokenSelection(valid_BC, valid_BC.float())
    # Probabilities of long completions need float64, which Apple's GPUs do not have.
    if widest_float(device) is not torch.float64:
        valid_BC = valid_BC.to("cpu")
    if strategy == "prefix_cut":
        keep_BC, probability_BC = _prefix_cut(valid_BC, rate, always_first, generator)
    else:
        keep_BC, probability_BC = _bernoulli(valid_BC, rate, always_first, max_tokens, generator)
    keep_BC &= valid_BC
    if weighting == "horvitz_thompson":
        tiny = torch.finfo(torch.float64).tiny  # for padding, which is never kept
        weight_BC = probability_BC.clamp(min=tiny).reciprocal()
    else:
        kept_B1 = keep_BC.sum(-1, keepdim=True).clamp(min=1)
        length_B1, _ = _numbered(valid_BC)
        weight_B1 = length_B1 / kept_B1
        weight_BC = weight_B1.expand(keep_BC.shape)
    weight_BC = torch.where(keep_BC, weight_BC, 0.0).float()
    return TokenSelection(keep_BC.to(device), weight_BC.to(device))


def _uniform(shape: torch.Size, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Random numbers in [0, 1), drawn on the CPU, so that every device draws the same."""
    on_host = torch.rand(shape, generator=generator, dtype=torch.float64)
    return to_device(on_host, device)


def _numbered(valid_BC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of completions `(B, 1)`, and the number of each valid token in its completion `(B, C)`, from 0."""
    return valid_BC.sum(-1, keepdim=True), valid_BC.cumsum(-1) - 1


def _prefix_cut(
    valid_BC: torch.Tensor, rate: float, always_first: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep a beginning of random length: which tokens are kept, and the probability of each to be."""
    length_B1, number_BC = _numbered(valid_BC)
    share_B1 = (2 * rate - 1) * length_B1
    rounded_B1 = share_B1.round().long()
    at_least = max(always_first, 1)
    shortest_B1 = rounded_B1.clamp(min=at_least).minimum(length_B1)
    choices_B1 = length_B1 - shortest_B1 + 1
    draw_B1 = _uniform(length_B1.shape, length_B1.device, generator)
    cut_B1 = shortest_B1 + (draw_B1 * choices_B1).long()
    # A token is kept by all cuts behind it.
    cuts_behind_BC = length_B1 - number_BC
    probability_BC = (cuts_behind_BC / choices_B1).clamp(max=1.0)
    return number_BC < cut_B1, probability_BC.double()


def _bernoulli(
    valid_BC: torch.Tensor,
    rate: float,
    always_first: int,
    max_tokens: int | None,
    generator: torch.Generator | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep each token behind the first with `rate`: which tokens are kept, and the probability of each to be."""
    length_B1, number_BC = _numbered(valid_BC)
    is_first_BC = number_BC < always_first
    draw_BC = _uniform(number_BC.shape, number_BC.device, generator)
    is_drawn_BC = valid_BC & ~is_first_BC & (draw_BC < rate)
    probability_B1 = torch.full(length_B1.shape, rate, dtype=torch.float64, device=length_B1.device)
    if max_tokens is not None:
        # The random number of a token that was drawn is uniform below the rate, so the smallest are a random subset.
        room = max_tokens - always_first
        drawn_numbers_BC = draw_BC.masked_fill(~is_drawn_BC, torch.inf)
        order_BC = drawn_numbers_BC.argsort(-1)
        rank_BC = order_BC.argsort(-1)
        is_drawn_BC &= rank_BC < room
        others_B1 = length_B1 - always_first
        probability_B1 = capped_probability(others_B1, rate, room, most=number_BC.shape[-1])
    probability_BC = torch.where(is_first_BC, 1.0, probability_B1)
    return is_first_BC | is_drawn_BC, probability_BC


def capped_probability(n: torch.Tensor, rate: float, room: int, most: int | None = None) -> torch.Tensor:
    """Chance of one of `n` tokens to stay if each is drawn with `rate` and at most `room` of the drawn ones are kept.

    All n tokens have the same chance, so it is the expected number of kept ones over n:
    E[min(Bin(n, rate), room)] / n, in float64.

    Args:
        n: `(…, 1)`.
        most: no n is larger. `None` reads the maximum from the device, for which the host waits.
    """
    n = n.clamp(min=1).double()
    if rate == 1.0:
        return (room / n).clamp(max=1.0)
    if most is None:
        most = int(n.max())
    # E[min(X, room)] = Σ_j P(X = j)·min(j, room). The terms are computed as logarithms, because n may be in the
    # thousands.
    j = torch.arange(most + 1, dtype=torch.float64, device=n.device)
    remaining = (n - j).clamp(min=0)
    log_factorial = torch.lgamma(n + 1)
    log_choose = log_factorial - torch.lgamma(j + 1)
    log_choose = log_choose - torch.lgamma(remaining + 1)
    log_of_drawn = j * np.log(rate)
    log_of_others = remaining * np.log1p(-rate)
    log_power = log_of_drawn + log_of_others
    probability = torch.exp(log_choose + log_power)
    probability = torch.where(j <= n, probability, 0.0)
    kept = j.clamp(max=room)
    expected = (probability * kept).sum(-1, keepdim=True)
    return expected / n


def step_generator(seed: int, step: int, micro_step: int, rank: int) -> torch.Generator:
    """A generator seeded by the arguments alone, so a resumed run draws what the uninterrupted one would have drawn.

    Ranks and micro-batches draw independently, and the global generators are not touched.
    """
    sequence = np.random.SeedSequence([seed, step, micro_step, rank])
    (entropy,) = sequence.generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(entropy))


def weight_gradient(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`values` unchanged, their gradient multiplied by `weight`, elementwise.

    A loss that is a sum of one term per token, KL included, then has the unweighted value and the weighted gradient.
    """
    fixed = values.detach()
    return fixed + weight * (values - fixed)
