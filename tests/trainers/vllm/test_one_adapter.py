"""LoRA layers of an engine on CPUs against vLLM's own and against float64, for one adapter, none, and several in a
batch.
"""

import pytest
import torch

pytestmark = pytest.mark.vllm

RANK = 4
WIDTH = 24
SLICES = (16, 8)


@pytest.mark.parametrize("adapters", [[7] * 6, [9] * 6, [0] * 6, [7, 7, 9, 9, 7, 9], [7, 9, 9, 7, 0, 7]])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("of", ["layer", "logits", "padded logits"])
def test_as_vllm_and_as_float64(of, adapters, scale):
    """Adapter ids 7 and 9 are in slots 0 and 1; id 0 is no adapter. The head's may be narrower than the logits."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper import get_punica_wrapper
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from trl_fsdp_qlora.engines.vllm.lora_on_cpu import OneAdapterOnCPU, one_adapter

    torch.manual_seed(0)
    slices = SLICES if of == "layer" else (sum(SLICES),)
    x = torch.randn(6, WIDTH)
    y = torch.randn(6, sum(SLICES) + (8 if of == "padded logits" else 0))
    down = tuple(torch.randn(2, 1, RANK, WIDTH) for _ in slices)
    up = tuple(torch.randn(2, 1, size, RANK) for size in slices)
    with one_adapter():
        mine = get_punica_wrapper(64, 8, device="cpu")
    theirs = get_punica_wrapper(64, 8, device="cpu")
    assert type(mine) is OneAdapterOnCPU and type(theirs) is PunicaWrapperCPU  # replaced inside alone
    results = []
    for wrapper in (mine, theirs):
        for ids in ([9] * 6, adapters):  # a batch after another has its own adapters
            wrapper.update_metadata(LoRAMapping(tuple(ids), tuple(ids), is_prefill=True), [7, 9], 2, 100)
        results.append(y.clone())
        if of == "layer":
            wrapper.add_lora_linear(results[-1], x, down, up, scale, slices)
        else:
            wrapper.add_lora_logits(results[-1], x, down[0], up[0], scale)
    assert mine.slot == ({7: 0, 9: 1}.get(adapters[0]) if len(set(adapters)) == 1 else None)
    # Sums of 24 and 4 products of unit size in float32, in another order.
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    if 0 in adapters and (of != "layer" or len(set(adapters)) > 1):
        return  # vLLM gives a row without an adapter that of the last slot: zeros, where there is none
    expected = y.double()
    left = 0
    for a, b, size in zip(down, up, slices, strict=True):
        for row, adapter in enumerate(adapters):
            if adapter:
                slot = {7: 0, 9: 1}[adapter]
                part = b[slot, 0].double() @ (a[slot, 0].double() @ x[row].double())
                expected[row, left : left + size] += scale * part
        left += size
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-5)
