"""The packed layer against bitsandbytes' own, in one process."""

import pytest
import torch

bnb = pytest.importorskip("bitsandbytes")

from trl_fsdp_qlora.fsdp2_qlora.distribute import BaseNotSharded, measure_base  # noqa: E402
from trl_fsdp_qlora.fsdp2_qlora.packed_linear import PackedLinear4bit, from_bytes, pack_model, to_bytes  # noqa: E402


def make_layer(quant_type="nf4", double=True, storage=torch.uint8, in_features=128, out_features=96, bias=True):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(
        in_features,
        out_features,
        bias=bias,
        compute_dtype=torch.float32,
        compress_statistics=double,
        quant_type=quant_type,
        quant_storage=storage,
    ).to("cpu")
    layer.support_avx512bf16_for_cpu = False  # the plain kernel, as in training
    return layer


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_output_and_input_gradient_are_those_of_bitsandbytes(quant_type, double, storage):
    stock = make_layer(quant_type, double, storage)
    packed = make_layer(quant_type, double, storage)
    pack_model(torch.nn.Sequential(packed))
    assert isinstance(packed, PackedLinear4bit) and isinstance(packed, bnb.nn.Linear4bit)
    assert packed.weight.dtype == torch.uint8 and not packed.weight.requires_grad
    x = torch.randn(5, 128)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = stock(x1), packed(x2)
    y1.square().sum().backward()
    y2.square().sum().backward()
    # The same kernel on the same bytes: equal to the last bit.
    assert torch.equal(y1, y2) and torch.equal(x1.grad, x2.grad)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: the 4-bit kernels of bitsandbytes")
@pytest.mark.parametrize("double", [True, False])
def test_cuda_output_and_input_gradient_are_those_of_bitsandbytes(double):
    stock, packed = (make_layer(double=double).to("cuda") for _ in range(2))
    pack_model(torch.nn.Sequential(packed))
    for rows in (1, 5):  # a single row goes through another kernel when nothing asks for a gradient
        x = torch.randn(rows, 128, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(stock(x), packed(x))
        x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
        y1, y2 = stock(x1), packed(x2)
        y1.square().sum().backward()
        y2.square().sum().backward()
        assert torch.equal(y1, y2) and torch.equal(x1.grad, x2.grad)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("out_features", [1, 7, 96])
def test_every_byte_of_the_quantization_state_survives(double, out_features):
    layer = make_layer(double=double, in_features=64, out_features=out_features)
    state = layer.weight.quant_state
    flat, layout = to_bytes(layer)
    weight, unpacked = from_bytes(flat, layout)
    assert torch.equal(weight, layer.weight.data)
    assert torch.equal(unpacked.absmax, state.absmax) and unpacked.absmax.dtype == state.absmax.dtype
    assert torch.equal(unpacked.code, state.code) and unpacked.shape == state.shape
    if double:
        assert torch.equal(unpacked.state2.absmax, state.state2.absmax)
        assert torch.equal(unpacked.state2.code, state.state2.code)
        assert unpacked.offset.item() == state.offset.item()
    assert flat.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()  # views, no copies


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


def test_a_layer_that_was_never_quantized_is_named():
    model = torch.nn.ModuleDict({"q_proj": bnb.nn.Linear4bit(64, 64)})
    with pytest.raises(ValueError, match="q_proj is a Linear4bit whose weight was never quantized"):
        pack_model(model)


def test_a_replicated_base_is_an_error():
    model = torch.nn.ModuleDict({"q_proj": make_layer(), "k_proj": make_layer()})
    pack_model(model)
    found = measure_base(model, world_size=1)
    assert found.ratio == 1.0 and found.state_full == found.quantized_full - 2 * 96 * 128 // 2
    with pytest.raises(BaseNotSharded, match=r"an even split over 2 ranks.*fsdp_version: 2"):
        measure_base(model, world_size=2)
