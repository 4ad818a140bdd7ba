"""Sampling with one uniform number per row and step: the same distribution as `torch.multinomial`, at a fraction of its cost.

`torch.multinomial` draws one random number for every entry of the vocabulary (5% of the CPU time in a profile of 16 rows × 24
tokens of SmolLM2-135M, prefill included). Inverting the distribution function takes one for every row, which also makes a
row's draw its own: it depends on the seed, the row and the step, not on which other rows are still being generated.
"""

import torch

from ..scoring.transfer import widest_float

# Uniform numbers are drawn for this many steps at once.
_BLOCK = 128
# Width of the blocks of the vocabulary in the two-level search.
_WIDTH = 256


class RowUniforms:
    """Uniform numbers in [0, 1) for row r and step t of a batch, a function of the seed, r and t alone.

    Args:
        rows: R, rows of the batch before any of them has finished.
        device: where the numbers are used; they are drawn on the CPU, so that every device gets the same.
        seed: taken from the global random state by default, which moves by exactly one draw.
    """

    def __init__(self, rows: int, device: torch.device, seed: int | None = None):
        seed = torch.randint(2**63 - 1, ()).item() if seed is None else seed
        self._generator = torch.Generator().manual_seed(seed)
        self._rows, self._device, self._step = rows, device, 0

    def next(self, rows_A: torch.Tensor) -> torch.Tensor:
        """Shape `(A,)`, in [`widest_float`]: the next step's numbers of the rows `rows_A`, indices into the whole batch."""
        if self._step % _BLOCK == 0:
            block = torch.rand(_BLOCK, self._rows, dtype=torch.float64, generator=self._generator)
            self._block = block.to(widest_float(self._device)).to(self._device)
        self._step += 1
        return self._block[(self._step - 1) % _BLOCK, rows_A]


def draw(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The token at which the distribution function of each row passes `uniform_B`; never one of probability zero.

    Two levels, so that the distribution function is accumulated in [`widest_float`] without such a copy of the vocabulary:
    first the block of the vocabulary by the blocks' sums, then the token inside the block.

    Args:
        probs_BV: non-negative weights, float32; need not sum to one.
        uniform_B: in [0, 1).

    Returns:
        `LongTensor` of shape `(B,)`. A row with NaN or infinite weights gets an index outside the vocabulary (-1).
    """
    size, dtype = probs_BV.shape[1], widest_float(probs_BV.device)
    if size <= _WIDTH:
        weight_BV = probs_BV.to(dtype)
        return _invert(weight_BV, uniform_B)[0].where(weight_BV.sum(1).isfinite(), -1)
    whole = size - size % _WIDTH
    blocks_BN = probs_BV[:, :whole].unflatten(1, (-1, _WIDTH)).sum(-1, dtype=dtype)
    if whole < size:
        blocks_BN = torch.cat([blocks_BN, probs_BV[:, whole:].sum(-1, keepdim=True, dtype=dtype)], 1)
    block_B, left_B = _invert(blocks_BN, uniform_B)
    token_BW = block_B[:, None] * _WIDTH + torch.arange(_WIDTH, device=probs_BV.device)
    weight_BW = probs_BV.gather(1, token_BW.clamp_max(size - 1)).to(dtype) * (token_BW < size)
    inside_B, _ = _invert(weight_BW, left_B)
    token_B = block_B * _WIDTH + inside_B
    return token_B.where(blocks_BN.sum(1).isfinite(), -1)


def _invert(weights_BN: torch.Tensor, uniform_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index at which the cumulated weights pass `uniform_B` of their total, and how far into that weight (0 to 1)."""
    upto_BN = weights_BN.cumsum(1)
    total_B1 = upto_BN[:, -1:]
    target_B1 = uniform_B[:, None] * total_B1
    # By rounding the target may reach the total: then the last index of positive weight, where the total is reached.
    index_B = torch.minimum((upto_BN <= target_B1).sum(1), (upto_BN < total_B1).sum(1)).clamp_max(
        weights_BN.shape[1] - 1
    )
    weight_B = weights_BN.gather(1, index_B[:, None])[:, 0]
    before_B = upto_BN.gather(1, index_B[:, None])[:, 0] - weight_B
    return index_B, ((target_B1[:, 0] - before_B) / weight_B).clamp(0, 1)
