"""Attention backends by themselves, compared with a dense mask and with finite differences in float64.

Covers `prefix_sharing/attention/cascade.py`, `prefix_sharing/attention/two_part.py`.
"""

import itertools
from types import MappingProxyType, SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from trl_fsdp_qlora.compat import triton_kernels
from trl_fsdp_qlora.compat.triton_kernels import interpreted, launch
from trl_fsdp_qlora.prefix_sharing.attention import cascade, two_part
from trl_fsdp_qlora.prefix_sharing.recurrent import level_by_level

from .helpers import completion_labels, every_level_made, make_batch, pack

LAYOUTS = {
    "one ragged group": ([5] * 3, [3, 1, 2]),
    "two equal groups": ([4, 4, 3, 3], [2, 2, 2, 2]),
    "equal prompts too": ([4, 4, 4, 4], [2, 2, 2, 2]),
    "ragged groups": ([4, 4, 3, 3, 3], [1, 3, 2, 2, 3]),
    "nothing shared": ([4, 3, 2], [2, 3, 1]),
    "everything at once": ([5, 5, 2, 4, 4, 4, 1, 1], [3, 1, 2, 3, 3, 3, 2, 1]),
}


# Rows as words: rows that begin alike share a segment. How many levels that makes.
TREES = {
    "a level that no row ends at": (["ABCDEF", "ABCDEG", "ABHIJK", "ABHIJL"], 3),
    "five levels, ragged leaves": (["ABCDEFGHI", "ABCDEFGJ", "ABCDEFKLMNO", "ABCDPQ", "ABRSTUV", "XYZ", "XYWVUTS"], 5),
    "prefixes of others, duplicates": (["ABC", "ABCDEF", "ABCDEF", "ABCDEFGH", "ABCDKL", "M"], 4),
    "parents of unequal depth": (["ABCD", "ABCE", "ABFGHIJK", "ABFGHIJL", "MN", "MO"], 3),
    "leaves next to inner segments": (["AB", "ACDE", "ACDF", "ACGHIJKL", "ACGHIJKM", "ACGHIN"], 5),
}


def of_words(words) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded rows of letters, with one more token behind each word that it is followed by."""
    width = max(map(len, words)) + 1
    ids = torch.zeros(len(words), width, dtype=torch.long)
    mask = torch.zeros(len(words), width, dtype=torch.long)
    for row, word in enumerate(words):
        ids[row, : len(word) + 1] = torch.tensor([*map(ord, word), 3])
        mask[row, : len(word) + 1] = 1
    return ids, mask


def make_layout(name, device="cpu"):
    if name in TREES:
        words, levels = TREES[name]
        ids, mask = of_words(words)
        labels = torch.full_like(ids, -100)
        last = mask.sum(1, keepdim=True) - 1
        labels.scatter_(1, last, ids.gather(1, last))
        with every_level_made():
            layout = pack(ids.to(device), mask.to(device), labels.to(device))
        assert layout.forest.levels.max() + 1 == levels
        return layout
    prompts, completions = LAYOUTS[name]
    ids, mask = make_batch(prompts, completions, prompt=5, completion=3)
    if name == "equal prompts too":  # two prompts of one length: neighbours must not be taken for one group
        ids[2:, :5] = ids[2:, :5].flip(1)
    labels = completion_labels(ids, mask, 3)
    return pack(ids.to(device), mask.to(device), labels.to(device))


def dense_mask(layout, window=None) -> torch.Tensor:
    """Which token may attend to which, pair by pair, from the places of each row's tokens: the oracle."""
    allowed = torch.zeros(layout.tokens, layout.tokens, dtype=torch.bool)
    for index_L in layout.forest.index_BL:
        index_L = index_L[index_L >= 0]
        for token, query in enumerate(index_L.tolist()):
            first = 0 if window is None else max(token + 1 - window, 0)
            allowed[query, index_L[first : token + 1]] = True
    return allowed


EVERY = [*LAYOUTS, *TREES]


class Call:
    """The part of an AttentionCall that backends read."""

    softcap = sinks = None
    base = "sdpa"
    own_masks = MappingProxyType({})

    def __init__(self, query, key, value, layout, scaling=0.4, window=None):
        self.query = query
        self.key = key
        self.value = value
        self.packed_row = layout
        self.scaling = scaling
        self.window = window
        self.keys_given = []

    def run(self, q, k, v, mask):
        self.keys_given.append(k.shape[2])
        options = {"attn_mask": mask, "is_causal": mask is None, "scale": self.scaling, "enable_gqa": True}
        return sdpa(q, k, v, **options).transpose(1, 2)


def draw(layout, heads, kv_heads, size=4):
    torch.manual_seed(0)
    # (1, H, T, D) as a transposed view, which is what models hand over.
    return [
        torch.randn(1, layout.tokens, h, size, dtype=torch.float64).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads)
    ]


def assert_equals_dense_mask(call, exact, tolerance, backend=cascade):
    """Output and gradients, against those of `exact` queries, keys and values, relative to the largest, or 1."""
    seen = dense_mask(call.packed_row, call.window).to(exact[0].device)
    is_own = seen.any(1)  # what fills a row up on CUDA is in no row of the batch, and its results are not read
    expected = sdpa(*exact, attn_mask=seen, scale=0.4, enable_gqa=True).transpose(1, 2)
    weight = torch.randn_like(expected) * is_own[:, None, None]
    out = backend.attend(call)
    actual = torch.autograd.grad((out * weight.to(out.dtype)).sum(), [call.query, call.key, call.value])
    wanted_gradients = torch.autograd.grad((expected * weight).sum(), exact)
    both = zip((out[:, is_own], *actual), (expected[:, is_own], *wanted_gradients), strict=True)
    for ours, wanted in both:
        error = float((ours.double() - wanted).abs().max())
        largest = float(wanted.abs().max())
        assert error <= tolerance * max(largest, 1.0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("name", EVERY)
def test_cascade_equals_dense_mask(name, kv_heads):
    leaves = [x.requires_grad_() for x in draw(make_layout(name), 4, kv_heads)]
    assert_equals_dense_mask(Call(*leaves, make_layout(name)), leaves, 1e-12)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("name", EVERY)
def test_two_part_equals_dense_mask(name, window):
    layout = make_layout(name)
    leaves = [x.requires_grad_() for x in draw(layout, 4, 2)]
    call = Call(*leaves, layout, window=window)
    assert_equals_dense_mask(call, leaves, 1e-12, two_part)
    longest = layout.forest.lengths.max()
    deepest = layout.forest.depths.max()
    assert max(call.keys_given) <= (deepest + longest if window is None else longest + window - 1)


# Factor of the queries, and tolerance: a logit of 1,000 is off by 6e-5 in float32 before any weight is computed.
FAR_APART = {torch.float64: (3000, 1e-11), torch.float32: (300, 1e-3)}


@pytest.mark.parametrize("dtype", FAR_APART)
@pytest.mark.parametrize("backend", [cascade, two_part], ids=["cascade", "two_part"])
@pytest.mark.parametrize("name", EVERY)
def test_logits_that_are_far_apart(name, backend, dtype):
    """Logits may differ by more than exp() holds: by 88 in float32 and by 709 in float64.

    A batch of unequal segments is padded with queries of other segments. No log-sum-exp of theirs bounds their logits
    over these keys, so their weights must not be computed from it.
    """
    layout = make_layout(name)
    factor, tolerance = FAR_APART[dtype]
    query, *others = (x.to(dtype) for x in draw(layout, 4, 2))
    leaves = [x.requires_grad_() for x in (factor * query, *others)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    assert_equals_dense_mask(Call(*leaves, layout), exact, tolerance, backend)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: flash kernels")
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("name", EVERY)
def test_cuda_kernels_equal_dense_mask(name, window):
    layout = make_layout(name, "cuda")
    # In bfloat16 rounding alone reaches 3% of a gradient, which a fault of a few percent would not exceed.
    leaves = [x.to("cuda", torch.float16).requires_grad_() for x in draw(layout, 4, 2, size=32)]
    call = Call(*leaves, layout, window=window)
    assert cascade.refuses(call) is None
    # 11 bits of mantissa: at most 1.8e-3 on the emulated device.
    assert_equals_dense_mask(call, [x.detach().double().requires_grad_() for x in leaves], 5e-3)


def flash_scores(q, k, cu_q, cu_k, is_causal, scale, window_size_left=-1, window_size_right=-1):
    """For each sequence its queries, its keys, and the scores `(H, queries, keys)`, as flash attention defines them.

    The last query is aligned with the last key. A window's negative side is open; causal is a right side of 0.
    """
    right = 0 if is_causal else window_size_right
    group = q.shape[1] // k.shape[1]
    of_sequences = (itertools.starmap(slice, itertools.pairwise(cu.tolist())) for cu in (cu_q, cu_k))
    for queries, keys in zip(*of_sequences, strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys].repeat_interleave(group, 1)) * scale
        count_q, count_k = scores.shape[1:]
        ahead = torch.arange(count_k) - (torch.arange(count_q).unsqueeze(1) + count_k - count_q)
        seen = torch.ones_like(ahead, dtype=torch.bool)
        if right >= 0:
            seen &= ahead <= right
        if window_size_left >= 0:
            seen &= ahead >= -window_size_left
        assert seen.any(1).all()  # what the kernel returns for a query without a key is not documented
        yield queries, keys, scores.masked_fill(~seen, -torch.inf)


def flash_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale, **window):
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], len(q))
    for queries, keys, scores in flash_scores(q, k, cu_q, cu_k, is_causal, scale, **window):
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        lse[:, queries] = scores.logsumexp(-1)
    return out, lse, torch.empty(()), torch.empty(()), torch.empty(())


def flash_backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, *random, scale, **window):
    """As in the paper (https://arxiv.org/abs/2307.08691), from the output and the log-sum-exp that are given."""
    grads = [torch.empty_like(x) for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    for queries, keys, scores in flash_scores(q, k, cu_q, cu_k, is_causal, scale, **window):
        weights = (scores - lse[:, queries].unsqueeze(-1)).exp()
        of_weights = torch.einsum("qhd,khd->hqk", grad[queries], v[keys].repeat_interleave(group, 1))
        of_scores = weights * (of_weights - (grad[queries] * out[queries]).sum(-1).t().unsqueeze(-1)) * scale
        grads[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, k[keys].repeat_interleave(group, 1))
        grads[1][keys] = torch.einsum("hqk,qhd->khd", of_scores, q[queries]).unflatten(1, (-1, group)).sum(2)
        grads[2][keys] = torch.einsum("hqk,qhd->khd", weights, grad[queries]).unflatten(1, (-1, group)).sum(2)
    return grads


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("name", EVERY)
def test_calls_of_cuda_kernels_equal_dense_mask(name, window, monkeypatch):
    """The calls that CUDA gets, computed in float64 by what flash attention's kernels are defined to compute."""
    monkeypatch.setitem(cascade._KERNELS, "cpu", cascade._KERNELS["cuda"])
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    layout = make_layout(name)
    leaves = [x.requires_grad_() for x in draw(layout, 4, 2)]
    assert_equals_dense_mask(Call(*leaves, layout, window=window), leaves, 1e-12)


def test_cascade_merges_in_float32_in_half_precision():
    """Against float64 on the same bfloat16 numbers; with weights rounded to bfloat16 the error would be 0.0048."""
    ids, mask = make_batch([200] * 4, [9] * 4, prompt=200, completion=9)
    layout = pack(ids, mask, completion_labels(ids, mask, 9))
    torch.manual_seed(0)
    leaves = [torch.randn(1, layout.tokens, 4, 16).bfloat16().transpose(1, 2) for _ in range(3)]
    tail = slice(200, None)
    exact = sdpa(*(x.double() for x in leaves), attn_mask=dense_mask(layout), scale=0.4).transpose(1, 2)
    out = cascade.attend(Call(*leaves, layout))
    assert (out.double() - exact)[:, tail].norm() < 0.0035 * exact[:, tail].norm()  # 0.0026


@pytest.mark.parametrize("heads, size", [(4, 16), (9, 40), (1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merging_kernel_equals_the_torch_code(monkeypatch, heads, size, dtype):
    """In Triton's interpreter, on slices and transposed log-sum-exps as flash attention gives them."""
    if not interpreted(cascade._merge_kernel):
        pytest.skip("needs Triton and TRITON_INTERPRET=1: make test-kernels")
    torch.manual_seed(0)
    own_out = torch.randn(30, heads, size, dtype=dtype)[11:]
    prompt = torch.randn(19, heads, 2 * size, dtype=dtype)[..., ::2]
    own_lse = torch.randn(heads, 30)[:, 11:].t()
    prompt_lse = 3 * torch.randn(heads, 19).t()
    # Nothing is seen there.
    prompt_lse[3] = -torch.inf
    own_lse[4] = -torch.inf
    expected = cascade.merge(own_out, own_lse, prompt, prompt_lse)
    monkeypatch.setattr(cascade, "runs", lambda kernel, x: True)
    with patch.object(cascade, "launch", side_effect=launch) as launched:
        merged = cascade.merge(own_out, own_lse, prompt, prompt_lse)
    assert launched.call_count == 1 and not triton_kernels._refused
    assert merged.dtype == dtype and merged.shape == own_out.shape
    # The interpreter truncates a float32 to bfloat16, and a card rounds it.
    torch.testing.assert_close(merged, expected.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


# --- the calls for CUDA, with a dense stand-in for the kernels ---


def scores(q, k, cu_q, cu_k, max_k, causal, scale, left, right):
    """`(H, queries, keys)` of stretches that see each other, aligned at the end; minus infinity elsewhere.

    A side of the window that is as wide as the longest keys is open.
    """
    of_q, of_k = (torch.repeat_interleave(torch.arange(len(cu) - 1), cu.diff()) for cu in (cu_q, cu_k))
    place_q, place_k = (torch.arange(int(cu[-1])) - cu[1:][of] for cu, of in ((cu_q, of_q), (cu_k, of_k)))
    ahead = place_k - place_q[:, None]
    right = 0 if causal else right
    seen = of_q[:, None] == of_k
    if left is not None and left < max_k:
        seen &= ahead >= -left
    if right is not None and right < max_k:
        seen &= ahead <= right
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)


def dense_forward(
    q, k, v, cu_q, cu_k, max_q, max_k, p, causal, debug, *, scale, window_size_left=None, window_size_right=None
):
    """`aten._flash_attention_forward`: output, log-sum-exp `(H, T)`, the random state and a debug mask.

    Of a query that sees nothing the log-sum-exp is infinite, as the kernel's is.
    """
    assert max_q == cu_q.diff().max() and max_k >= cu_k.diff().max() and not p
    s = scores(q, k, cu_q, cu_k, max_k, causal, scale, window_size_left, window_size_right)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return (
        torch.einsum("hqk,khd->qhd", s.softmax(-1).nan_to_num(), v),
        s.logsumexp(-1).nan_to_num(neginf=torch.inf),
        torch.zeros(2),
        torch.zeros(0),
        torch.zeros(0),
    )


def dense_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, p, causal, seed, offset, *, scale,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    """`aten._flash_attention_backward`, from the output and the log-sum-exp that it is given."""
    assert lse.is_contiguous() and grad.is_contiguous()
    heads = q.shape[1] // k.shape[1]
    s = scores(q, k, cu_q, cu_k, max_k, causal, scale, window_size_left, window_size_right)
    p = (s - lse[:, :, None]).exp()
    wide_k, wide_v = (x.repeat_interleave(heads, 1) for x in (k, v))
    ds = p * (torch.einsum("qhd,khd->hqk", grad, wide_v) - (grad * out).sum(-1).t()[:, :, None]) * scale
    grad_k = torch.einsum("hqk,qhd->khd", ds, q)
    grad_v = torch.einsum("hqk,qhd->khd", p, grad)
    grad_k, grad_v = (x.unflatten(1, (-1, heads)).sum(2) for x in (grad_k, grad_v))
    return torch.einsum("hqk,khd->qhd", ds, wide_k), grad_k, grad_v


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 6])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", EVERY)
def test_the_calls_for_cuda_equal_dense_mask(name, kv_heads, window, monkeypatch):
    forward = Mock(wraps=dense_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", dense_backward)
    monkeypatch.setitem(cascade._KERNELS, "cpu", cascade._KERNELS["cuda"])
    calls = []
    for most in (cascade._EXPANDED_KEYS, 1):  # all ancestors in one call, and each in one of its own
        monkeypatch.setattr(cascade, "_EXPANDED_KEYS", most)
        leaves = [x.requires_grad_() for x in draw(make_layout(name), 4, kv_heads)]
        forward.reset_mock()
        assert_equals_dense_mask(Call(*leaves, make_layout(name), window=window), leaves, 1e-12)
        calls.append(forward.call_count)
    if name == "two equal groups":
        assert (calls[0] < calls[1]) == (window is not None and window > 1)


# --- what depends on the device of a layer ---


def tensors(value):
    """All tensors in nested tuples, lists and objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, (tuple, list)) else getattr(value, "__dict__", {}).values()
    return [tensor for part in parts for tensor in tensors(part)]


def test_layers_on_two_devices_get_tensors_of_their_own():
    """A model split over devices: the second device's layers must not be given what the first one's were."""
    ids, mask = of_words(["ABC", "ABCDEFG", "ABCDEF", "ABH", "IJKL", "IJM", "ABHNOPQRSTUV", "ABHW"])
    labels = ids.masked_fill(mask == 0, -100)
    with every_level_made():
        layout = pack(ids, mask, labels)
    for device in (torch.device("cpu"), torch.device("meta")):
        call = SimpleNamespace(packed_row=layout, query=torch.empty(1, device=device), base="sdpa", window=2)
        derived = [
            two_part._batches(layout, device),
            two_part._mask(call, 2, 4, call.query),
            cascade._calls_on_cuda(layout, device, None),
            cascade._calls_on_cuda(layout, device, 3),
            level_by_level._calls(layout, device),
        ]
        for part in derived:
            kept = tensors(part)
            assert kept and {x.device for x in kept} == {device}


def refusal_on_cuda(size, capability, monkeypatch, dtype=torch.float16, value_size=None):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    query = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=(1, 4, 8, size))
    value = SimpleNamespace(shape=(1, 4, 8, value_size or size))
    return cascade.refuses(
        SimpleNamespace(query=query, value=value, window=None, softcap=None, sinks=None, own_masks={})
    )


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True)])
def test_cascade_asks_for_the_compute_capability(capability, served, monkeypatch):
    """Volta and Turing have no flash kernel in torch: `auto` must take another backend before it is called."""
    reason = refusal_on_cuda(64, capability, monkeypatch)
    assert (reason is None) == served
    assert served or f"has {capability[0]}.{capability[1]}" in reason


@pytest.mark.parametrize(("size", "dtype"), [(60, torch.float16), (264, torch.float16), (64, torch.float32)])
def test_cascade_leaves_what_torchs_kernel_does_not_take(size, dtype, monkeypatch):
    """Head sizes must be multiples of 8 up to 256, in half precision."""
    assert f"got {dtype}, {size}" in refusal_on_cuda(size, (9, 0), monkeypatch, dtype)
    assert refusal_on_cuda(256, (9, 0), monkeypatch) is None
    assert "values of size 128" in refusal_on_cuda(192, (9, 0), monkeypatch, value_size=128)


def test_cascade_refuses_what_torchs_backward_refuses_and_rocm(monkeypatch):
    """Heads of 193 to 224 run forward everywhere; their backward raises on consumer cards, after the first forward."""
    served = {
        (size, capability)
        for size in (192, 200, 224, 232, 256)
        for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))
        if refusal_on_cuda(size, capability, monkeypatch) is None
    }
    assert {capability for size, capability in served if size == 192} == {
        capability for size, capability in served if size == 256
    }
    for size in (200, 224):
        assert {capability for other, capability in served if other == size} == {(8, 0), (9, 0), (10, 0)}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "ROCm" in refusal_on_cuda(64, (9, 4), monkeypatch)
