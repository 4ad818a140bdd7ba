"""Models loaded with a flash-attention kernel share prompts, with transformers' own functions underneath.

The kernel itself is a dense one here: what is tested is that transformers finds it, by its own name, each time.
"""

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from .helpers import assert_equals_stock, build, prepared

HUB = "kernels-community/flash-attn2"


def dense(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """`flash_attn_func` on `(n, length, H, D)`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[2:]
    behind = torch.arange(keys - queries, keys).unsqueeze(1) - torch.arange(keys)
    seen = behind >= 0 if causal else torch.ones(queries, keys, dtype=torch.bool)
    if window_size[0] >= 0:
        seen = seen & (behind <= window_size[0])
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2)


# fmt: off
def dense_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0,
):
    """`flash_attn_varlen_func`; transformers reads from the signature what a kernel can do."""
    options = dropout_p, softmax_scale, causal, window_size, softcap
    cut = [x.tensor_split(cu[1:-1].tolist()) for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))]
    parts = zip(*cut, strict=True)
    return torch.cat([dense(*(x.unsqueeze(0) for x in part), *options)[0] for part in parts])
# fmt: on


@pytest.fixture(params=["flash_attention_2", HUB])
def kernel(request, monkeypatch):
    """A kernel that transformers knows by this name and no other."""
    asked = []

    def load(implementation, *args, **kwargs):
        assert implementation == request.param, f"transformers looked for a kernel called {implementation}"
        asked.append(implementation)
        process = flash._lazy_define_process_function(dense_varlen)
        return (dense, dense_varlen, None, flash._pad_input, flash._unpad_input), (process, dict)

    monkeypatch.setattr(flash, "lazy_import_flash_attention", load)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", load)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    AttentionInterface.register(request.param, flash_attention_forward)
    AttentionMaskInterface.register(request.param, flash_attention_mask)
    return request.param, asked


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma2"])
def test_a_model_with_a_flash_kernel_shares_prompts(name, kernel):
    implementation, asked = kernel
    model = build(name)
    model.set_attn_implementation(implementation)
    sharing = prepared(model)
    figures = assert_equals_stock(model, sharing)
    assert asked and set(figures.layer_calls) == {"cascade" if name == "llama" else "two_part"}
    registered = model.config._attn_implementation
    assert "flash" not in registered and "/" not in registered
    with sharing.original_attention():  # generation gets the kernel by its own name
        assert model.config._attn_implementation == implementation
    assert model.config._attn_implementation == registered
