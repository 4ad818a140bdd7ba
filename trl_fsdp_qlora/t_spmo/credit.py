"""From completions and rewards of a generation batch to the credit of each token."""

from typing import NamedTuple

import torch

from .trie import prefix_transitions


class Credit(NamedTuple):
    """What T-SPMO's loss needs of a batch.

    Attributes:
        credit_BC: float32, A(v|p) / |U| at one representative of each distinct transition, zero elsewhere.
        transitions: mean over groups of |U|.
        credited: mean over groups of the distinct transitions with nonzero advantage.
        forward: positions in front of the last credited token of each completion, summed over the batch.
        distinct: different prefixes among those positions; `forward - distinct` repeat another completion's.
    """

    credit_BC: torch.Tensor
    transitions: float
    credited: float
    forward: int
    distinct: int


def group_credit(
    completion_ids: torch.Tensor, completion_mask: torch.Tensor, rewards: torch.Tensor, group_size: int
) -> Credit:
    """Credit of all tokens of whole groups, one group after the other.

    Args:
        completion_ids, completion_mask: `(B, C)`, right-padded. A row without tokens (a truncated completion that is
            masked out) gives and gets nothing.
        rewards: `(B,)`; NaN where a completion was not judged.
        group_size: G; B is a multiple of it.
    """
    device = completion_ids.device
    completion_ids, completion_mask, rewards = (x.cpu() for x in (completion_ids, completion_mask, rewards))
    rewards = rewards.double().masked_fill(completion_mask.sum(1) == 0, torch.nan)
    parts, transitions, credited, forward, distinct = [], 0, 0, 0, 0
    for start in range(0, len(rewards), group_size):
        rows = slice(start, start + group_size)
        found = prefix_transitions(completion_ids[rows], completion_mask[rows], rewards[rows])
        credit = torch.where(found.representative, found.advantage, 0.0)
        parts.append(credit / max(found.count, 1))
        transitions += found.count
        credited += int((credit != 0).sum())
        # Positions up to the last credited token, which itself is only a target.
        needed = (credit != 0).flip(1).cumsum(1).flip(1)[:, 1:] > 0
        forward += int(needed.sum())
        if needed.any():
            distinct += prefix_transitions(completion_ids[rows, :-1], needed, torch.zeros(len(needed))).count
    groups = max(len(parts), 1)
    credit_BC = torch.cat(parts).float() if parts else torch.zeros(completion_ids.shape)
    return Credit(credit_BC.to(device), transitions / groups, credited / groups, forward, distinct)
