"""Ties between tokens of one context at a quantile of entropies, compared with stock."""

import torch

from trl_fsdp_qlora.scoring.contexts import share_values


def test_first_of_equal_contexts():
    ids = torch.tensor([[9, 1, 5, 6, 7], [8, 1, 5, 6, 7], [8, 1, 5, 4, 7], [8, 2, 5, 6, 7]])
    mask = torch.ones_like(ids)
    mask[:, 0] = 0  # what is under the padding does not count
    values = torch.arange(12.0).view(4, 3)
    assert share_values(values, ids, mask, 3).tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 8], [9, 10, 11]]
    keys = torch.tensor([[4], [5], [4], [4]])  # the second row is about another image
    assert share_values(values, ids, mask, 3, keys).tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 8], [9, 10, 11]]
    mask[0, 2:] = 0  # the first completion was cut off and is masked: no other token gets its zeros
    values[0] = 0
    assert share_values(values, ids, mask, 3).tolist() == [[0, 0, 0], [3, 4, 5], [3, 4, 8], [9, 10, 11]]
