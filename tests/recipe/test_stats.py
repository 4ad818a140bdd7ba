import itertools

import pytest

from trl_fsdp_qlora.recipe.stats import format_accuracy, pass_at_k, wilson_interval


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (29, 30, 0.8333, 0.9941),  # the interval of 29 of 30 is 83-99%
        (0, 10, 0.0, 0.2775),  # Brown, Cai & DasGupta 2001, table: Wilson at x = 0 is z²/(n + z²)
        (5, 10, 0.2366, 0.7634),
    ],
)
def test_wilson_against_published_values(correct, n, low, high):
    assert wilson_interval(correct, n) == pytest.approx((low, high), abs=5e-4)


def test_wilson_edges():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="outside"):
        wilson_interval(3, 2)


def test_pass_at_k_is_the_share_of_subsets_with_a_hit():
    n, correct = 6, 2
    hits = [i < correct for i in range(n)]
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(hits, k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    with pytest.raises(ValueError, match="at least 3 samples"):
        pass_at_k(2, 1, 3)


def test_format():
    assert format_accuracy(29, 30) == "96.7% (n=30, 95% interval 83.3-99.4)"
