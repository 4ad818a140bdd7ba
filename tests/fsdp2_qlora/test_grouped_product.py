"""The kernels of grouped products in Triton's interpreter; test_experts.py has the layers that call them."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("bitsandbytes")

from trl_fsdp_qlora.compat import triton_kernels
from trl_fsdp_qlora.compat.triton_kernels import interpreted
from trl_fsdp_qlora.fsdp2_qlora import experts, grouped_product

NEEDS_INTERPRETER = pytest.mark.skipif(
    not interpreted(grouped_product._product_kernel),
    reason="needs Triton and TRITON_INTERPRET=1: make test-kernels",
)


@NEEDS_INTERPRETER
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("out_features", "in_features", "number"), [(96, 64, 6), (128, 192, 5), (80, 128, 3)])
def test_tritons_packed_product_equals_bitsandbytes_and_torch(out_features, in_features, number, nested):
    """Expert by expert; some experts have no rows, some more than a tile has."""
    layout = experts._layout((out_features, in_features), torch.float32, "nf4", nested)
    rows = experts._quantize(torch.randn(number, out_features, in_features), layout)
    wanted = torch.stack([experts._dequantize(*experts.from_bytes(row, layout)) for row in rows])
    ends = torch.tensor([0, 19, 19, 21, 30, 31])[:number].int()
    x = torch.randn(int(ends[-1]), in_features)
    multiplied = torch.cat(
        [
            part.double() @ weight.double().T
            for part, weight in zip(x.tensor_split(ends[:-1].long()), wanted, strict=True)
        ]
    )
    with patch.object(grouped_product, "runs", return_value=True):
        assert torch.equal(grouped_product.dequantize_experts(rows, layout, torch.float32), wanted)
        product = grouped_product.multiply_packed(x, rows, layout, ends)
        # Rounding of float32 sums: at most 7.4e-6 over twelve seeds; torch's own product had 2.9e-5.
        torch.testing.assert_close(product.double(), multiplied, atol=2e-5, rtol=0)
        many = torch.randn(number * 16 + 1, in_features)
        assert grouped_product.multiply_packed(many, rows, layout, ends) is None
    assert not triton_kernels._refused


@NEEDS_INTERPRETER
def test_tritons_grouped_products_equal_float64():
    """Gradients of rows and matrices too; some groups have no rows, and the last has several tiles."""
    x = torch.randn(150, 40)
    weight = torch.randn(4, 72, 40)
    ends = torch.tensor([0, 33, 33, 150]).int()
    grad = torch.randn(150, 72)
    results = []
    for ours in (False, True):
        dtype = torch.float32 if ours else torch.float64
        inputs = [x.to(dtype, copy=True).requires_grad_(), weight.to(dtype, copy=True).requires_grad_()]
        with patch.object(grouped_product, "runs", return_value=True):
            if ours:
                out = grouped_product.GroupedLinear.apply(*inputs, ends)
            else:
                parts = zip(inputs[0].tensor_split(ends[:-1].long()), inputs[1], strict=True)
                out = torch.cat([part @ matrix.T for part, matrix in parts])
            out.backward(grad.to(dtype))
        results.append([out.detach(), *(each.grad for each in inputs)])
    for wanted, got in zip(*results, strict=True):
        # Rounding of float32 sums: at most 7.7e-6 over twelve seeds; torch's own products had 1.9e-5.
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=0)
    assert not triton_kernels._refused
