"""The functions of the package flash-attn, as dense attention in plain operations."""

import torch


def dense(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0):
    """`flash_attn_func` on `(n, length, H, D)`."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, keys = scores.shape[2:]
    ends = torch.arange(keys - queries, keys, device=q.device)
    behind = ends.unsqueeze(1) - torch.arange(keys, device=q.device)
    seen = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
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
