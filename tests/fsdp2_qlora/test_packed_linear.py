"""The packed layer compared with bitsandbytes' own, in one process."""

from itertools import product

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")

from trl_fsdp_qlora.fsdp2_qlora.packed_linear import PackedLinear4bit, from_bytes, pack_model  # noqa: E402


def make_layer(quant_type="nf4", double=True, storage=torch.uint8, shape=(128, 96), bias=True, device="cpu"):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        *shape, bias, torch.float32, compress_statistics=double, quant_type=quant_type, quant_storage=storage
    )
    layer.to(device).support_avx512bf16_for_cpu = False  # the plain kernel, as in training
    return layer


ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: the 4-bit kernels of bitsandbytes")
STORAGES = (torch.uint8, torch.bfloat16, torch.float32)
SHAPES = ((128, 96), (64, 7), (64, 1))
CASES = [("cpu", *case) for case in product(("nf4", "fp4"), (True, False), STORAGES, SHAPES)]
for double in (True, False):
    CASES.append(pytest.param("cuda", "nf4", double, torch.uint8, (128, 96), marks=[pytest.mark.gpu, ON_CUDA]))


@pytest.mark.parametrize(("device", "quant_type", "double", "storage", "shape"), CASES)
def test_output_and_input_gradient_are_those_of_bitsandbytes(device, quant_type, double, storage, shape):
    """The same kernel on the same bytes: equal to the last bit."""
    stock, packed = (make_layer(quant_type, double, storage, shape, device=device) for _ in range(2))
    expected = packed.weight.quant_state.absmax.clone()
    pack_model(torch.nn.Sequential(packed))
    weight, state = from_bytes(packed.weight.data, packed.layout)
    assert torch.equal(state.absmax, expected)
    assert weight.untyped_storage().data_ptr() == packed.weight.untyped_storage().data_ptr()  # views, no copies
    assert isinstance(packed, PackedLinear4bit) and isinstance(packed, bnb.nn.Linear4bit)
    assert packed.weight.dtype == torch.uint8 and not packed.weight.requires_grad
    for rows in (1, 5):  # a single row goes through another kernel when nothing asks for a gradient
        x1 = torch.randn(rows, shape[0], device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(stock(x1), packed(x1))
        x2 = x1.clone().requires_grad_()
        y1 = stock(x1.requires_grad_())
        y2 = packed(x2)
        y1.square().sum().backward()
        y2.square().sum().backward()
        assert torch.equal(y1, y2) and torch.equal(x1.grad, x2.grad)


def test_repacked_weights_for_avx512_are_turned_back():
    stock = make_layer(bias=False)
    packed = make_layer(bias=False)
    packed.support_avx512bf16_for_cpu = bnb.nn.modules.has_avx512bf16()
    if not packed.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16, so bitsandbytes never repacks")
    packed.eval()
    x = torch.randn(3, 128)
    with torch.no_grad():
        packed(x)
    assert packed.weight.quant_state.packing_format_for_cpu
    pack_model(torch.nn.Sequential(packed))
    weight, _ = from_bytes(packed.weight.data, packed.layout)
    assert torch.equal(weight, stock.weight.data)
    # The repacking itself rounds the block maxima to bfloat16, for good: 2^-8 of every weight.
    torch.testing.assert_close(packed(x), stock(x), rtol=0, atol=2**-8 * stock(x).abs().max().item())
