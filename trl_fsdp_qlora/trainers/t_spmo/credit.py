"""Credit of each token from the completions and rewards of a generation batch, by a prefix trie that is not built.

In lexicographic order, completions that share a prefix are neighbours, and two neighbours part at the end of their
longest common prefix (LCP). A node of depth d, a prefix of d tokens, is then a run of neighbours with LCP ≥ d. An edge
(p, v) is a node one deeper. The mean reward below a node is a difference of cumulative sums.

T-SPMO is from arXiv 2504.20834. The formula of A(v|p) follows the paper's abstract; it was not compared with the
authors' code.
"""

from typing import NamedTuple

import numpy as np
import torch

from ...prefix_sharing.forest import sort_by_prefix


class Transitions(NamedTuple):
    """Credit of the token transitions of one group of G completions, padded to C tokens.

    Attributes:
        advantage: float64 `(G, C)`. At (i, t), with p the first t tokens of completion i and v its next one,
            A(v|p) = mean{R_j : o_j starts with p∘v} − mean{R_j : o_j starts with p}. Zero at padding.
        representative: bool `(G, C)`. Marks each distinct pair (p, v) once; their number is |U|.
    """

    advantage: torch.Tensor
    representative: torch.Tensor


class _Nodes(NamedTuple):
    """The nodes of the trie. Entry [i, d] is about the node of depth d that sorted row i is in.

    All rows are in one node of depth 0, the empty prefix.

    Attributes:
        begins: bool. Whether row i is the first one of its node.
        first, behind: the node consists of the rows first[i, d] to behind[i, d] - 1.
    """

    begins: np.ndarray
    first: np.ndarray
    behind: np.ndarray

    @classmethod
    def of(cls, common: np.ndarray, rows: int, width: int) -> "_Nodes":
        """The nodes of sorted rows of `width` tokens; `common` has the LCP of each row with the one before it."""
        depths = np.arange(width + 1)
        numbers = np.arange(rows)[:, None]
        begins = np.ones((rows, width + 1), bool)
        begins[1:] = common[:, None] < depths
        # The first row of a node is the last one at which a node began, and its last row is before the next beginning.
        last_begin = np.where(begins, numbers, 0)
        first = np.maximum.accumulate(last_begin, axis=0)
        begin_or_end = np.where(begins, numbers, rows)
        end = np.full((1, width + 1), rows)
        next_begin = np.append(begin_or_end[1:], end, axis=0)
        from_below = np.minimum.accumulate(next_begin[::-1], axis=0)
        return cls(begins, first, from_below[::-1])

    def sums_of(self, values_G: np.ndarray) -> np.ndarray:
        """The sum over each node's rows of one value per row."""
        sums = np.concatenate([[0], np.cumsum(values_G)])
        return sums[self.behind] - sums[self.first]


def prefix_transitions(
    completion_ids: torch.Tensor, completion_mask: torch.Tensor, rewards: torch.Tensor
) -> Transitions:
    """Advantage of every (prefix, next token) pair among the completions of one group (T-SPMO, arXiv 2504.20834).

    A(v|p) is zero unless the completions that reach p continue in different ways (or one of them ends there), so only
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
    # Padding equals no token, so a completion that ends parts from those that continue.
    ids_GC = np.where(valid_GC, completion_ids.cpu().numpy(), -1)
    rows, width = ids_GC.shape
    order, common = sort_by_prefix(ids_GC, valid_GC.sum(1))
    valid_GC = valid_GC[order]
    judged_G = judged_G[order]
    rewards_G = np.nan_to_num(rewards_G[order])

    nodes = _Nodes.of(common, rows, width)
    count = nodes.sums_of(judged_G)
    total = nodes.sums_of(rewards_G)  # a completion that was not judged adds zero
    mean = total / np.maximum(count, 1)
    # At token t the prefix p is the node of depth t, and p∘v is the node of depth t + 1.
    count_of_prefix = count[:, :-1]
    count_with_token = count[:, 1:]
    mean_of_prefix = mean[:, :-1]
    mean_with_token = mean[:, 1:]
    # If no completion parts, both means are over the same rows, so their difference is set to exactly zero and not to
    # a rounding error.
    parts_GC = count_with_token != count_of_prefix
    gain_GC = mean_with_token - mean_of_prefix
    advantage_GC = np.where(valid_GC & parts_GC, gain_GC, 0.0)
    representative_GC = valid_GC & nodes.begins[:, 1:]

    inverse = np.argsort(order)
    advantage = torch.from_numpy(advantage_GC[inverse])
    representative = torch.from_numpy(representative_GC[inverse])
    return Transitions(advantage, representative)


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
    credit_of_groups = []
    transitions = 0
    credited = 0
    positions = 0
    distinct_positions = 0
    for start in range(0, len(rewards), group_size):
        rows = slice(start, start + group_size)
        group = prefix_transitions(completion_ids[rows], completion_mask[rows], rewards[rows])
        advantage_GC = torch.where(group.representative, group.advantage, 0.0)
        is_credited_GC = advantage_GC != 0
        count = int(group.representative.sum())  # |U|
        credit_of_groups.append(advantage_GC / max(count, 1))
        transitions += count
        credited += int(is_credited_GC.sum())
        # Positions before the last credited token; that token itself is only a target.
        credited_from_GC = is_credited_GC.flip(1).cumsum(1).flip(1)
        is_needed_GC = credited_from_GC[:, 1:] > 0
        positions += int(is_needed_GC.sum())
        if is_needed_GC.any():
            no_rewards_G = torch.zeros(len(is_needed_GC))
            prefixes = prefix_transitions(completion_ids[rows, :-1], is_needed_GC, no_rewards_G)
            distinct_positions += int(prefixes.representative.sum())
    groups = len(credit_of_groups)
    metrics = {
        "transitions": transitions / groups,
        "credited_transitions": credited / groups,
        "repeated_fraction": (positions - distinct_positions) / max(positions, 1),
    }
    return torch.cat(credit_of_groups).float().to(device), metrics
