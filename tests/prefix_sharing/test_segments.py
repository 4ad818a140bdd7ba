"""Segments of a packed row as batches for kernels, compared with the segments cut out one by one."""

import numpy as np
import pytest
import torch

from trl_fsdp_qlora.prefix_sharing.segments import (
    MOST_PADDED,
    TOKENS_PER_CALL,
    SegmentBatch,
    additive,
    cumulative,
    equal_runs,
    join,
    padded_batches,
)

LENGTHS = {
    "equal": [5] * 6,
    "alike": [7, 6, 7, 5, 7],
    "one is long": [3, 3, 900, 3, 3],
    "growing": list(range(1, 60)),
    "one": [4],
}


def layout(lengths: list[int]) -> tuple[np.ndarray, np.ndarray, int]:
    ends = np.cumsum(lengths)
    return ends - lengths, np.array(lengths), int(ends[-1])


@pytest.mark.parametrize("name", LENGTHS)
def test_batches_hold_each_segment_once_with_little_padding(name):
    starts, lengths, tokens = layout(LENGTHS[name])
    x = torch.randn(1, 2, tokens, 3)  # (1, H, T, D)
    batches = padded_batches(starts, lengths, tokens)
    together = join([batch.without_padding(batch.heads_of(x).transpose(1, 2).flatten(0, 1)) for batch in batches])
    assert torch.equal(together, x[0].transpose(0, 1))
    assert np.concatenate([batch.own_tokens() for batch in batches]).tolist() == list(range(tokens))
    for batch in batches:
        assert batch.tokens <= MOST_PADDED * len(batch.own_tokens()) + TOKENS_PER_CALL


def test_neighbours_of_equal_length_are_a_view_of_the_row():
    starts, lengths, tokens = layout([5, 5, 5])
    x = torch.randn(1, tokens, 4)
    (batch,) = padded_batches(starts, lengths, tokens)
    of_segments = batch.rows_of(x)
    assert of_segments.shape == (3, 5, 4) and of_segments.data_ptr() == x.data_ptr()


def test_runs_of_equal_length():
    runs = equal_runs([0, 2, 4, 7], [2, 2, 3, 2])
    assert [(run.start, run.count, run.length) for run in runs] == [(0, 2, 2), (4, 1, 3), (7, 1, 2)]


def test_a_copied_segment_is_padded_with_tokens_of_the_row():
    batch = SegmentBatch.copied(np.array([6, 0]), np.array([2, 3]), tokens=8, shortest=4)
    assert batch.index_NL.tolist() == [[6, 7, 7, 7], [0, 1, 2, 3]]  # no index is behind the row's end
    assert batch.own_tokens().tolist() == [6, 7, 0, 1, 2]


def test_lengths_and_masks_as_kernels_take_them():
    total, longest = cumulative([3, 1, 2], torch.device("cpu"))
    assert total.tolist() == [0, 3, 4, 6] and total.dtype is torch.int32 and longest == 3
    seen = torch.tensor([[True, False], [True, True]])
    mask = additive(seen, torch.float32)
    assert mask.shape == (1, 1, 2, 2)
    assert torch.equal(mask[0, 0].softmax(-1), torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
