"""The router loss of a mixture of experts, over the tokens of a padded batch of which a packed pass computes fewer.

The loss of a batch is `E * sum_e f_e * P_e`: `f_e` is how often expert e is selected, and `P_e` is its mean
probability, both over all layers and over all tokens of the batch that are no padding (Switch Transformer, equations 4
to 6, https://huggingface.co/papers/2101.03961; `load_balancing_loss_func` in transformers' Mixtral, which TRL calls).

Both are sums over tokens. A token of a packed row is weighed with the number of tokens of the batch that it
replaces. Tokens that an earlier pass computed are counted with the router logits that the pass kept. The sums of
passes that together compute one batch are added before the loss is taken.

Suffixes of shapes: M batches, T tokens of the packed row, E experts, K experts that a token selects.
"""

import numpy as np
import torch

from ..scoring.transfer import to_device
from .forest import Forest
from .row import PackedRow


@torch.compiler.disable  # every batch has another layout, so the function would be traced again for each batch
def router_sums(
    router_logits: tuple[torch.Tensor, ...], packed_row: PackedRow, top_k: int, batches: int = 1
) -> torch.Tensor:
    """Returns the sums that the router losses of the batches in a packed row are made of.

    Args:
        router_logits: of each layer, `(T, E)`.
        packed_row: of T tokens.
        top_k: number of experts that a token selects.
        batches: number of batches in the row, M; each has equally many neighbouring rows.

    Returns:
        `(M, 2, E)`: how often each expert is selected, and the sum of its probabilities.
    """
    device = router_logits[0].device
    multiplicity_MT = to_device(_multiplicity(packed_row.forest, batches), device)
    selected_ME = 0
    probability_ME = 0
    with torch.autocast(device.type, enabled=False):
        for layer, logits_TE in enumerate(router_logits):
            slot = ("router", layer)
            logits_11TE = logits_TE[None, None]  # as keys, of one row and one head
            extended_11TE = packed_row.view.extended(slot, logits_11TE)
            logits_TE = extended_11TE[0, 0].to(device)
            probability_TE = torch.softmax(logits_TE, dim=-1)
            experts_TK = torch.topk(probability_TE, top_k, dim=-1).indices
            is_selected_TE = torch.zeros_like(probability_TE, dtype=torch.float32)
            is_selected_TE.scatter_(1, experts_TK, 1.0)
            selected_ME = selected_ME + multiplicity_MT @ is_selected_TE
            probability_ME = probability_ME + multiplicity_MT @ probability_TE.float()
    return torch.stack([selected_ME, probability_ME], dim=1)


def _multiplicity(forest: Forest, batches: int) -> torch.Tensor:
    """Returns `(M, T)`: how many tokens of each batch a token of the row, or a kept one behind it, replaces."""
    tokens = int(forest.lengths.sum())
    counts = []
    for index_BL in np.split(forest.index_BL, batches):
        computed = index_BL[index_BL >= 0]
        counts.append(np.bincount(computed, minlength=tokens))
    multiplicity_MT = np.stack(counts).astype(np.float32)
    return torch.from_numpy(multiplicity_MT)


def router_loss(sums: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns the router losses `(...)` of batches with the sums `(..., 2, E)`, see [`router_sums`]."""
    selected, probability = sums.unbind(-2)
    selected = selected.detach()
    tokens = selected.sum(-1, keepdim=True) / top_k  # times the number of layers
    frequency = selected / tokens
    mean_probability = probability / tokens
    experts = selected.shape[-1]
    return experts * (frequency * mean_probability).sum(-1)
