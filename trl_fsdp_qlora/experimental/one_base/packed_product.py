"""A linear layer of vLLM that multiplies by the packed bytes of the trainer's 4-bit layers.

vLLM has no layers of bitsandbytes, and it stacks the rows of several of the trainer's layers in one of its own. The
product is bitsandbytes' registered operator, which the trainer's layers call, too. It reads the packed weight if there
are few rows, and dequantizes it otherwise. To `torch.compile` and to CUDA graphs it is one operator.

This module imports vLLM, so only the code that starts an engine imports it.
"""

from collections.abc import Callable

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase

from ...fsdp2_qlora.packed_linear import is_repacked, weight_and_state

# Of block maxima per nested maximum; bitsandbytes' operator knows no other number.
_NESTED_BLOCK = 256


def why_not_readable(layer: Linear4bit) -> str | None:
    """Why the product cannot read a 4-bit layer; `None` if it can."""
    state = weight_and_state(layer)[1]
    if is_repacked(state):
        return "bitsandbytes repacked it for this CPU"
    if tuple(state.shape) != (layer.out_features, layer.in_features):
        return "it is stored transposed"
    if state.nested and state.state2.blocksize != _NESTED_BLOCK:
        return f"its block maxima are quantized in blocks of {state.state2.blocksize}"
    return None


class PackedProduct(LinearMethodBase):
    """How a layer of vLLM multiplies: by `layers` of the trainer, whose outputs are concatenated in this order."""

    def __init__(self, layers: list[Linear4bit]):
        self.rows = [layer.out_features for layer in layers]
        self.weights = []
        for layer in layers:
            weight, state = weight_and_state(layer)
            absmax = state.absmax
            nested = [None, None, None]
            if state.nested:
                of_absmax = state.state2
                absmax = of_absmax.absmax
                nested = [state.absmax, of_absmax.code, state.offset]
            constants = [list(state.shape), absmax, state.blocksize, state.quant_type]
            bytes_N1 = weight.view(-1, 1)
            self.weights.append((bytes_N1, constants, nested))

    def create_weights(self, *args, **kwargs) -> None:
        """The weights are the trainer's."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        biases = [None] * len(self.rows) if bias is None else bias.split(self.rows)
        multiply = torch.ops.bitsandbytes.gemm_4bit
        parts = []
        for (weight, constants, nested), part_of_bias in zip(self.weights, biases, strict=True):
            parts.append(multiply(x, weight, *constants, part_of_bias, *nested))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def in_order_of_rows(
    parameter: nn.Parameter, load: Callable, parts: list[tuple[Linear4bit, tuple, dict]]
) -> list[Linear4bit] | None:
    """Layers in the order in which vLLM stacks their rows in a weight; `None` if they do not fill it row by row.

    vLLM's own function determines the order: it is called with the numbers of the rows, one column wide.

    Args:
        parameter: vLLM's weight, of which no element is read or written.
        load: the function that copies a part of a checkpoint into it.
        parts: layers, with the further arguments that `load` gets for each.
    """
    sizes = [layer.out_features for layer, _, _ in parts]
    column = torch.arange(sum(sizes), dtype=torch.float64).unsqueeze(1)
    numbers = column.split(sizes)
    data = parameter.data
    placed = torch.full((len(data), 1), -1.0, dtype=torch.float64)
    parameter.data = placed
    for rows, (_, positional, keywords) in zip(numbers, parts, strict=True):
        load(parameter, rows, *positional, **keywords)
    parameter.data = data
    first_rows = []
    for rows in numbers:
        places = torch.nonzero(placed[:, 0] == rows[0, 0])
        if len(places) != 1:
            return None
        first_rows.append(places.item())
    order = sorted(range(len(parts)), key=first_rows.__getitem__)
    expected = torch.cat([numbers[i] for i in order])
    if not torch.equal(placed, expected):
        return None
    return [parts[i][0] for i in order]
