"""oneDNN's linear layers on weights in an order of its own: two operators that torch's compiler uses, checked.

They are not documented. Where a release differs, [`MISFIT`] says so and layers are computed as they are.
"""

import functools

import torch

_EXPECTED = {
    "_reorder_linear_weight": "Tensor self, int? batch_size=None",
    "_linear_pointwise": "Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm",
}


@functools.cache
def misfit() -> str | None:
    """Why weights cannot be kept in oneDNN's order with the installed torch; `None` where they can.

    Beside the signatures one small product is compared, since the operators promise nothing.
    """
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return "torch runs without oneDNN"
    for name, arguments in _EXPECTED.items():
        operator = getattr(torch.ops.mkldnn, name, None)
        if operator is None:
            return f"torch {torch.__version__} has no mkldnn::{name}"
        if f"({arguments})" not in str(operator.default._schema):
            return f"torch {torch.__version__} differs in mkldnn::{name}: expected ({arguments})"
    x, weight = torch.linspace(-1, 1, 6).view(2, 3), torch.linspace(2, -1, 15).view(5, 3)
    if not torch.allclose(linear(x, reordered(weight, 2), None), x @ weight.T, rtol=1e-5, atol=1e-5):
        return f"mkldnn::_linear_pointwise of torch {torch.__version__} does not compute a linear layer"
    return None


def reordered(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of `weight` `(out, in)`, float32, in the order that is fastest for inputs of about `rows` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` `(…, in)` times a [`reordered`] weight: `(…, out)`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
