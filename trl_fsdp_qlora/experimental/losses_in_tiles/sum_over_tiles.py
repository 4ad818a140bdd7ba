"""A loss that is a sum over tokens, with the logits of one tile of them at a time.

The gradients are summed in the forward: the weight of each token in the loss is known, so that the backward only
multiplies by its gradient. Nothing is projected twice.

Suffixes of shapes: N tokens of the loss, T those of a tile, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch.autograd.function import once_differentiable

# Elements of a tile of logits: 16 MiB in float32 on a CPU, and 128 MiB on a GPU, which wants few and large launches.
TILE_ELEMENTS = 2**22
TILE_ELEMENTS_GPU = 2**25


def tiles_of(tokens: int, vocabulary: int, on_gpu: bool) -> list[slice]:
    """Slices of `tokens` tokens whose logits fit into a tile."""
    size = max(1, (TILE_ELEMENTS_GPU if on_gpu else TILE_ELEMENTS) // vocabulary)
    return [slice(start, start + size) for start in range(0, tokens, size)]


class SumOverTiles(torch.autograd.Function):
    """`(sum_N of weight · loss, loss_N)` of N tokens. Hidden states and head get the gradients of the sum.

    Args:
        loss_of_tile: `(tile, hidden_TH, weight_VH, bias_V)` to `loss_T`.
        tiles: slices of the N tokens.
        weight_N: of the tokens.
        hidden_NH, weight_VH, bias_V: of the student.
    """

    @staticmethod
    def forward(ctx, loss_of_tile: Callable, tiles: Sequence[slice], weight_N, hidden_NH, weight_VH, bias_V):
        needed = ctx.needs_input_grad[3:]
        inputs = (hidden_NH, weight_VH, bias_V)
        # Half precision would lose the head's gradients of later tiles in the sum of the earlier ones.
        precision = torch.promote_types(hidden_NH.dtype, torch.float32)
        gradients = [
            torch.zeros_like(x, dtype=precision) if is_needed else None
            for x, is_needed in zip(inputs, needed, strict=True)
        ]
        loss_N = torch.zeros_like(weight_N)
        for tile in tiles:
            of_tile = [None if x is None else x.detach() for x in (hidden_NH[tile], weight_VH, bias_V)]
            of_tile = [x.requires_grad_() if n else x for x, n in zip(of_tile, needed, strict=True)]
            with torch.set_grad_enabled(any(needed)):
                loss_T = loss_of_tile(tile, *of_tile)
                sum_of_tile = (loss_T * weight_N[tile]).sum()
            loss_N[tile] = loss_T.detach()
            if any(needed):
                grads = iter(
                    torch.autograd.grad(sum_of_tile, [x for x in of_tile if x is not None and x.requires_grad])
                )
                for gradient, part in zip(gradients, (tile, slice(None), slice(None)), strict=True):
                    if gradient is not None:
                        gradient[part] += next(grads)
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        ctx.mark_non_differentiable(loss_N)
        return (loss_N * weight_N).sum(), loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_sum: torch.Tensor, _):
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return None, None, None, *(None if x is None else (x * grad_sum).to(dtype) for x, dtype in gradients)
