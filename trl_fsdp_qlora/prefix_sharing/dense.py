"""A packed row for models whose attention is code of their own: one mask of all its pairs, `(1, 1, T, T)`.

The last resort: those layers know no segments, so they compute every pair of the row and throw most of them away. It is used
only for rows that have no more pairs than stock's padded ones ([`pays`]), which then cost no more time or memory than these.
"""

import numpy as np
import torch
from transformers import PreTrainedModel

from ..scoring.transfer import to_device
from .batch import BatchFacts
from .layout import PackedLayout
from .support import layer_types


def refuses(model: PreTrainedModel) -> str | None:
    """Why the attention of `model` cannot be told by a mask who sees whom, or `None`."""
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return f"attn_implementation={model.config._attn_implementation!r} takes no such mask"
    others = set(layer_types(model.config.get_text_config(decoder=True))) - {"full_attention", "indexed_attention"}
    if others:
        return f"a mask of all pairs does not tell {', '.join(sorted(others))} layers apart"
    for module in model.get_decoder().modules():
        if hasattr(module, "set_attention_type"):  # BigBird
            return f"{type(module).__name__} attends to blocks in long rows"
        if any(x.ndim > 1 and 1 < x.shape[-1] == x.shape[-2] for x in module.buffers(recurse=False)):
            return f"{type(module).__name__} masks by the place in the row"
    return None


def pays(facts: BatchFacts, width: int) -> bool:
    """Whether a row of this batch of `width` columns has no more pairs than stock computes."""
    tokens = (facts.prompt_lengths_B[facts.starts_group_B] - 1).sum() + facts.completion_lengths_B.sum()
    return int(tokens) ** 2 <= len(facts.new_prompt_B) * width**2


def mask(layout: PackedLayout, dtype: torch.dtype) -> torch.Tensor:
    """`(1, 1, T, T)`, added to the scores: its segment so far, and the prompt of a completion."""
    device = layout.input_ids.device
    segment_S = np.arange(len(layout.lengths))
    prompt_of = layout.num_singles + np.repeat(np.arange(layout.num_families), layout.children_per_family)
    prompt_S = np.concatenate([segment_S[: layout.num_roots], prompt_of])
    segment_T, prompt_T = (torch.from_numpy(np.repeat(x, layout.lengths)) for x in (segment_S, prompt_S))
    segment_T, prompt_T = to_device(segment_T, device), to_device(prompt_T, device)
    seen = ((segment_T[:, None] == segment_T) | (prompt_T[:, None] == segment_T)).tril()
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
