"""Sliding windows by the flash call's own: what it is given, with a dense stand-in for the kernel, and on a GPU the kernel."""

import pytest
import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention as sdpa

from trl_fsdp_qlora.prefix_sharing import cascade, windowed
from trl_fsdp_qlora.prefix_sharing.layout import pack

from .helpers import make_batch
from .test_attention import LAYOUTS, Call, dense_mask, draw, make_layout


def dense_varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """`torch.nn.attention.varlen.varlen_attn` as documented: each stretch alone, aligned at the end, (left, right) seen."""
    outs = []
    left, right = window_size
    for q, k, v in zip(
        query.split(cu_seq_q.diff().tolist()),
        key.split(cu_seq_k.diff().tolist()),
        value.split(cu_seq_k.diff().tolist()),
        strict=True,
    ):
        assert len(q) <= max_q and len(k) <= max_k
        place = torch.arange(len(k) - len(q), len(k)).unsqueeze(1) - torch.arange(len(k))
        seen = (place <= left) & (place >= -right)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        outs.append(sdpa(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [1, 2, 3, 6])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_dense_mask(name, window, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", dense_varlen)
    layout = make_layout(name)
    leaves = [x.requires_grad_() for x in draw(layout, 4, 2)]
    expected = sdpa(*leaves, attn_mask=dense_mask(layout, window), scale=0.4, enable_gqa=True).transpose(1, 2)
    weight = torch.randn_like(expected)
    reference = torch.autograd.grad((expected * weight).sum(), leaves)
    call = Call(*leaves, layout)
    call.window = window
    out = cascade.attend(call)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(torch.autograd.grad((out * weight).sum(), leaves), reference, atol=1e-12, rtol=1e-12)


def test_a_completion_copies_what_it_can_see_of_its_prompt_and_no_more(monkeypatch):
    layout = pack(*make_batch([9] * 3, [4, 2, 3], prompt=9, completion=4), 4)
    given = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **more: given.append(args) or dense_varlen(*args, **more))
    call = Call(*draw(layout, 2, 1), layout)
    call.window = 4
    cascade.attend(call)
    ((_, key, _, cu_q, cu_k, _, longest),) = given
    # A shared prompt of eight tokens; completions see three of them and themselves.
    assert cu_q.diff().tolist() == [8, 4, 2, 3] and cu_k.diff().tolist() == [8, 7, 5, 6]
    assert longest == 8 and len(key) == 26


def test_gradients_of_a_prompt_are_summed_in_float32():
    """Four parts of 1/256 beside 1: each alone is lost in bfloat16."""
    x = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0, 0, 0, 0, 0, 1])
    grad = torch.full((6, 1, 1), 1 / 256).bfloat16()
    grad[0] = 1.0
    windowed._Repeat.apply(x, index).backward(grad)
    assert x.grad.flatten().tolist() == [1 + 4 / 256, 1 / 256]


def test_a_cpu_has_no_such_kernel():
    call = Call(*draw(make_layout("one ragged group"), 2, 1), None)
    call.window = 3
    assert cascade.refuses(call) == "sliding window of 3 tokens"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: flash attention with a window")
@pytest.mark.parametrize("name", LAYOUTS)
def test_cuda_windows_equal_dense_mask(name):
    prompts, completions = LAYOUTS[name]
    ids, mask = make_batch(prompts, completions, prompt=5, completion=3)
    layout = pack(ids.cuda(), mask.cuda(), 3)
    leaves = [x.to("cuda", torch.bfloat16).requires_grad_() for x in draw(layout, 4, 2, size=32)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = sdpa(*exact, attn_mask=dense_mask(layout, 3).cuda(), scale=0.4, enable_gqa=True).transpose(1, 2)
    weight = torch.randn_like(expected)
    reference = torch.autograd.grad((expected * weight).sum(), exact)
    call = Call(*leaves, layout)
    call.window = 3
    assert cascade.refuses(call) is None
    out = cascade.attend(call)
    # bfloat16 has 8 bits of mantissa.
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    ours = torch.autograd.grad((out * weight.bfloat16()).sum(), leaves)
    for a, b in zip(ours, reference, strict=True):
        assert (a.double() - b).abs().max() <= 2e-2 * b.abs().max()
