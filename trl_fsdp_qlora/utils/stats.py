"""Accuracy with its uncertainty."""

from math import sqrt


def wilson_interval(correct: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson score interval `(low, high)` of `correct` of `n` trials (E. B. Wilson, JASA 22, 1927), 95% by default.

    `z` is the normal quantile; the interval is `(0, 1)` for n = 0.
    """
    if n == 0:
        return 0.0, 1.0
    share = correct / n
    variance = share * (1 - share) / n
    centre = share + z * z / (2 * n)
    spread = z * sqrt(variance + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = (centre - spread) / scale
    high = (centre + spread) / scale
    return max(0.0, low), min(1.0, high)


def format_accuracy(correct: int, n: int) -> str:
    """`'71.3% (n=512, 95% interval 67.2-75.0)'`."""
    percent = 100 * correct / max(n, 1)
    low, high = (100 * bound for bound in wilson_interval(correct, n))
    return f"{percent:.1f}% (n={n}, 95% interval {low:.1f}-{high:.1f})"
