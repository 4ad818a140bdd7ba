"""The first pass of each model is computed both ways and compared."""

import contextlib
from collections.abc import Iterator

import torch

# Largest |Δ log-probability| in nats that rounding explains. Padded and packed float32 passes were never further apart
# than 6e-5 here (SmolLM2-135M), while a completion cut off its prompt, a lost window or a leaking recurrent state moves
# log-probabilities by 0.1 to 2 in a trained model.
MAX_DIFFERENCE_FP32 = 1e-3
# In half precision single tokens differ by a few hundredths from run to run; the mean over all tokens does not.
MEAN_DIFFERENCE_HALF = 0.05


@contextlib.contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """No dropout and no gradients inside, each module's own mode again afterwards.

    Modules that own parameters keep their mode: dropout sits in the others, and bitsandbytes repacks a 4-bit weight
    for good the first time its layer runs in evaluation mode on some CPUs.
    """
    modes = [(module, module.training) for module in model.modules() if not module._parameters]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def difference(packed_BC: torch.Tensor, stock_BC: torch.Tensor, dtype: torch.dtype) -> tuple[str | None, bool]:
    """What is wrong with the packed log-probabilities, and whether there was anything to compare.

    Args:
        packed_BC, stock_BC: log-probabilities, zero where nothing was scored; only places where both have a value
            count, since the packed pass may be asked for fewer.
        dtype: what the model computes in.

    Returns:
        `(problem, compared)`; `problem` is `None` where rounding explains the difference.
    """
    both = (packed_BC != 0) & (stock_BC != 0)
    if not both.any():
        return None, False
    error = (packed_BC - stock_BC)[both].float().abs()
    if not torch.isfinite(error).all():
        return "log-probabilities are not finite on one of the two paths", True
    if dtype in (torch.bfloat16, torch.float16):
        value, limit, what = error.mean().item(), MEAN_DIFFERENCE_HALF, "mean"
    else:
        value, limit, what = error.max().item(), MAX_DIFFERENCE_FP32, "largest"
    if value <= limit:
        return None, True
    return f"{what} difference in log-probability from the padded pass is {value:.2g} nats (limit {limit:.2g})", True
