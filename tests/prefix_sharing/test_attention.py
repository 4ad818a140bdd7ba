"""Backends on their own: float64 gradients by finite differences, and a dense mask as oracle."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from trl_fsdp_qlora.prefix_sharing import cascade
from trl_fsdp_qlora.prefix_sharing.layout import pack

from .helpers import make_batch

LAYOUTS = {
    "one ragged group": ([5] * 3, [3, 1, 2]),
    "two equal groups": ([4, 4, 3, 3], [2, 2, 2, 2]),
    "equal prompts too": ([4, 4, 4, 4], [2, 2, 2, 2]),
    "ragged groups": ([4, 4, 3, 3, 3], [1, 3, 2, 2, 3]),
    "nothing shared": ([4, 3, 2], [2, 3, 1]),
    "everything at once": ([5, 5, 2, 4, 4, 4, 1, 1], [3, 1, 2, 3, 3, 3, 2, 1]),
}


def make_layout(name):
    prompts, completions = LAYOUTS[name]
    ids, mask = make_batch(prompts, completions, prompt=5, completion=3)
    if name == "equal prompts too":  # two prompts of one length: neighbours must not be taken for one group
        ids[2:, :5] = ids[2:, :5].flip(1)
    return pack(ids, mask, 3)


def dense_mask(layout, window=None) -> torch.Tensor:
    """Who may attend to whom, pair by pair: the oracle."""
    owner = [s for s, n in enumerate(layout.lengths) for _ in range(n)]
    family = [f for f, n in enumerate(layout.children_per_family) for _ in range(n)]
    allowed = torch.zeros(layout.tokens, layout.tokens, dtype=torch.bool)
    for i, s in enumerate(owner):
        parent = layout.num_singles + family[s - layout.num_roots] if s >= layout.num_roots else None
        for j, t in enumerate(owner):
            distance = int(layout.position_ids[0, i] - layout.position_ids[0, j])
            allowed[i, j] = ((t == s and j <= i) or t == parent) and (window is None or distance < window)
    return allowed


class Call:
    """The part of an AttentionCall that `cascade.attend` reads."""

    window = softcap = sinks = None

    def __init__(self, query, key, value, layout, scaling=0.4):
        self.query, self.key, self.value, self.layout, self.scaling = query, key, value, layout, scaling


def draw(layout, heads, kv_heads, size=4):
    torch.manual_seed(0)
    # (1, H, T, D) as a transposed view, which is what models hand over.
    return [
        torch.randn(1, layout.tokens, h, size, dtype=torch.float64).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", LAYOUTS)
def test_cascade_equals_dense_mask(name, kv_heads):
    layout = make_layout(name)
    leaves = [x.requires_grad_() for x in draw(layout, 4, kv_heads)]
    expected = sdpa(*leaves, attn_mask=dense_mask(layout), scale=0.4, enable_gqa=True).transpose(1, 2)
    weight = torch.randn_like(expected)
    reference = torch.autograd.grad((expected * weight).sum(), leaves)
    out = cascade.attend(Call(*leaves, layout))
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.autograd.grad((out * weight).sum(), leaves), reference, atol=1e-12, rtol=1e-12)


def test_cascade_gradient_by_finite_differences():
    layout = make_layout("ragged groups")
    leaves = [x.requires_grad_() for x in draw(layout, 2, 1, size=2)]
    assert torch.autograd.gradcheck(lambda *x: cascade.attend(Call(*x, layout)), leaves)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: flash kernels")
@pytest.mark.parametrize("name", LAYOUTS)
def test_cuda_kernels_equal_dense_mask(name):
    prompts, completions = LAYOUTS[name]
    ids, mask = make_batch(prompts, completions, prompt=5, completion=3)
    layout = pack(ids.cuda(), mask.cuda(), 3)
    leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in draw(layout, 4, 2, size=32)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = sdpa(*exact, attn_mask=dense_mask(layout).cuda(), scale=0.4, enable_gqa=True).transpose(1, 2)
    weight = torch.randn_like(expected)
    reference = torch.autograd.grad((expected * weight).sum(), exact)
    call = Call(*leaves, layout)
    out = cascade.attend(call)
    # bfloat16 has 8 bits of mantissa.
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    ours = torch.autograd.grad((out * weight.bfloat16()).sum(), leaves)
    for a, b in zip(ours, reference, strict=True):
        assert (a.double() - b).abs().max() <= 2e-2 * b.abs().max()


def test_cascade_merges_in_float32_in_half_precision(monkeypatch):
    """Against float64 on the same bfloat16 numbers: all that is left is the kernels' own rounding of each part."""
    prompts, completions = [200] * 4, [9] * 4
    layout = pack(*make_batch(prompts, completions, prompt=200, completion=9), 9)
    torch.manual_seed(0)
    shape = (1, layout.tokens, 4, 16)
    leaves = [torch.randn(shape).bfloat16().transpose(1, 2) for _ in range(3)]
    tail = slice(layout.children_start, None)
    exact = sdpa(*(x.double() for x in leaves), attn_mask=dense_mask(layout), scale=0.4).transpose(1, 2)
    out = cascade.attend(Call(*leaves, layout))
    error = ((out.double() - exact)[:, tail].norm() / exact[:, tail].norm()).item()

    def rounded_weight(own_out, own_lse, prompt_out, prompt_lse):
        share = torch.sigmoid(prompt_lse - own_lse).unsqueeze(-1)
        return torch.lerp(own_out, prompt_out, share.to(own_out.dtype))

    monkeypatch.setattr(cascade, "merge", rounded_weight)
    rounded = cascade.attend(Call(*leaves, layout))
    error_rounded = ((rounded.double() - exact)[:, tail].norm() / exact[:, tail].norm()).item()
    assert error < 0.7 * error_rounded  # 0.0026 and 0.0048
