"""The packed layer against bitsandbytes' own, in one process."""

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")

from trl_fsdp_qlora.fsdp2_qlora.distribute import BaseNotSharded, measure_base  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora.packed_linear import PackedLinear4bit, from_bytes, pack_model  # noqa: E402


def make_layer(quant_type="nf4", double=True, storage=torch.uint8, shape=(128, 96), bias=True, device="cpu"):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        *shape, bias, torch.float32, compress_statistics=double, quant_type=quant_type, quant_storage=storage
    )
    layer.to(device).support_avx512bf16_for_cpu = False  # the plain kernel, as in training
    return layer


def assert_same_output_and_gradient(stock, packed, x):
    """The same kernel on the same bytes: equal to the last bit."""
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = stock(x1), packed(x2)
    y1.square().sum().backward()
    y2.square().sum().backward()
    assert torch.equal(y1, y2) and torch.equal(x1.grad, x2.grad)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(128, 96), (64, 7), (64, 1)])
def test_output_and_input_gradient_are_those_of_bitsandbytes(quant_type, double, storage, shape):
    stock, packed = (make_layer(quant_type, double, storage, shape) for _ in range(2))
    expected = packed.weight.quant_state.absmax.clone()
    pack_model(torch.nn.Sequential(packed))
    weight, state = from_bytes(packed.weight.data, packed.layout)
    assert torch.equal(state.absmax, expected)
    assert weight.untyped_storage().data_ptr() == packed.weight.untyped_storage().data_ptr()  # views, no copies
    assert isinstance(packed, PackedLinear4bit) and isinstance(packed, bnb.nn.Linear4bit)
    assert packed.weight.dtype == torch.uint8 and not packed.weight.requires_grad
    assert_same_output_and_gradient(stock, packed, torch.randn(5, shape[0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: the 4-bit kernels of bitsandbytes")
@pytest.mark.parametrize("double", [True, False])
def test_cuda_output_and_input_gradient_are_those_of_bitsandbytes(double):
    stock, packed = (make_layer(double=double, device="cuda") for _ in range(2))
    pack_model(torch.nn.Sequential(packed))
    for rows in (1, 5):  # a single row goes through another kernel when nothing asks for a gradient
        x = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(stock(x), packed(x))
        assert_same_output_and_gradient(stock, packed, x)


def test_repacked_weights_for_avx512_are_turned_back():
    stock, packed = make_layer(bias=False), make_layer(bias=False)
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


def test_a_replicated_base_is_an_error():
    model = torch.nn.ModuleDict({"q_proj": make_layer(), "k_proj": make_layer()})
    pack_model(model)
    found = measure_base(model, world_size=1)
    assert found.ratio == 1.0 and found.state_full == found.quantized_full - 2 * 96 * 128 // 2
    with pytest.raises(BaseNotSharded, match=r"an even split over 2 ranks.*fsdp_version: 2"):
        measure_base(model, world_size=2)
