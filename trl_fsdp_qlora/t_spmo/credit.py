"""Credit of each token from the completions and rewards of a generation batch, by a prefix trie that is not built.

In lexicographic order, completions that share a prefix are neighbours, and two neighbours part at the end of their
longest common prefix (LCP). A node of depth d is then a run of neighbours with LCP ≥ d, an edge (p, v) is a node one
deeper, and the mean reward below a node is a difference of cumulative sums.
"""

from typing import NamedTuple

import numpy as np
import torch

from ..prefix_sharing.forest import rows_behind_subtree, sort_by_prefix


class Transitions(NamedTuple):
    """Credit of the token transitions of one group of G completions, padded to C tokens.

    Attributes:
        advantage: float64 `(G, C)`. At (i, t), with p the first t tokens of completion i and v its next one,
            A(v|p) = mean{R_j : o_j starts with p∘v} − mean{R_j : o_j starts with p}. Zero at padding.
        representative: bool `(G, C)`. Marks each distinct pair (p, v) once; their number is |U|.
    """

    advantage: torch.Tensor
    representative: torch.Tensor


def prefix_transitions(
    completion_ids: torch.Tensor, completion_mask: torch.Tensor, rewards: torch.Tensor
) -> Transitions:
    """Advantage of every (prefix, next token) pair among the completions of one group (T-SPMO, arXiv 2504.20834).

    A(v|p) is zero unless the completions that reach p go on in different ways (or one of them ends there), so only
    branching prefixes carry credit.

    Args:
        completion_ids: `(G, C)` token ids of one prompt's completions, right-padded; C is 1 or more.
        completion_mask: `(G, C)`, nonzero on a completion's own tokens; ones, then zeros.
        rewards: `(G,)`. A completion with the reward NaN was not judged: it gets no credit and changes no mean.

    Returns:
        [`Transitions`], on the CPU.
    """
    valid_GC = completion_mask.cpu().numpy().astype(bool)
    rewards_G = rewards.detach().cpu().numpy().astype(np.float64)
    judged_G = ~np.isnan(rewards_G)
    valid_GC &= judged_G[:, None]
    # Padding equals no token, so a completion that ends parts from those that go on.
    ids_GC = np.where(valid_GC, completion_ids.cpu().numpy(), -1)
    rows, width = ids_GC.shape
    length_G = valid_GC.sum(1)
    order, common = sort_by_prefix(ids_GC, length_G)
    valid_GC = valid_GC[order]
    judged_G = judged_G[order]
    length_G = length_G[order]
    rewards_G = np.nan_to_num(rewards_G[order])
    # starts[i, d]: row i is the first of its node of depth d. Every completion starts with the empty prefix.
    depth = np.arange(width + 1)
    starts = np.ones((rows, width + 1), bool)
    starts[1:] = common[:, None] < depth
    starts[:, 0] = False
    starts[0, 0] = True
    first = np.maximum.accumulate(np.where(starts, np.arange(rows)[:, None], 0), axis=0)
    after = rows_behind_subtree(common, width + 1)
    reward_sum = np.concatenate([[0.0], np.cumsum(rewards_G * judged_G)])
    judged_sum = np.concatenate([[0], np.cumsum(judged_G)])
    size = judged_sum[after] - judged_sum[first]
    mean = (reward_sum[after] - reward_sum[first]) / np.maximum(size, 1)
    # If no completion parts, both means are over the same rows, so their difference is set to exactly zero and not to
    # a rounding error.
    advantage = np.where(valid_GC & (size[:, 1:] != size[:, :-1]), mean[:, 1:] - mean[:, :-1], 0.0)
    representative = valid_GC & starts[:, 1:]

    inverse = np.argsort(order)
    return Transitions(torch.from_numpy(advantage[inverse]), torch.from_numpy(representative[inverse]))


def group_credit(
    completion_ids: torch.Tensor, completion_mask: torch.Tensor, rewards: torch.Tensor, group_size: int
) -> tuple[torch.Tensor, dict[str, float]]:
    """Credit of all tokens of whole groups, one group after the other.

    Args:
        completion_ids, completion_mask: `(B, C)`, right-padded. A row without tokens (a truncated completion that is
            masked out) gets no credit and changes no mean.
        rewards: `(B,)`; NaN if a completion was not judged.
        group_size: G; B is a multiple of it.

    Returns:
        Float32 `(B, C)`: A(v|p) / |U| at one representative of each distinct transition, zero elsewhere. And three
        metrics: the mean over groups of |U|; the mean over groups of the transitions with nonzero advantage; and the
        fraction of positions that repeat another completion's prefix, among the positions before the last credited
        token of each completion.
    """
    device = completion_ids.device
    completion_ids = completion_ids.cpu()
    completion_mask = completion_mask.cpu()
    rewards = rewards.cpu().double().masked_fill(completion_mask.sum(1) == 0, torch.nan)
    parts = []
    transitions = 0
    credited = 0
    forward = 0
    distinct = 0
    for start in range(0, len(rewards), group_size):
        rows = slice(start, start + group_size)
        group = prefix_transitions(completion_ids[rows], completion_mask[rows], rewards[rows])
        credit = torch.where(group.representative, group.advantage, 0.0)
        count = int(group.representative.sum())
        parts.append(credit / max(count, 1))
        transitions += count
        credited += int((credit != 0).sum())
        # Positions before the last credited token; that token itself is only a target.
        needed = (credit != 0).flip(1).cumsum(1).flip(1)[:, 1:] > 0
        forward += int(needed.sum())
        if needed.any():
            prefixes = prefix_transitions(completion_ids[rows, :-1], needed, torch.zeros(len(needed)))
            distinct += int(prefixes.representative.sum())
    metrics = {
        "transitions": transitions / len(parts),
        "credited_transitions": credited / len(parts),
        "repeated_fraction": (forward - distinct) / max(forward, 1),
    }
    return torch.cat(parts).float().to(device), metrics
