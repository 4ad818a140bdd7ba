"""Beginnings that passes share, and the forest of each pass, against the rows themselves, compared word by word."""

import numpy as np
import pytest
import torch

from trl_fsdp_qlora.prefix_sharing.forest import build_forest
from trl_fsdp_qlora.prefix_sharing.shared_prefixes import build_pass_forest, shared_prefixes

from .helpers import read_batch

PROMPT, COMPLETION, ROWS, PASSES = 10, 4, 12, 3
MIN_SAVED = 3


def step(seed: int):
    """Rows of two letters, so that beginnings are equal at any depth: on the host, as lists, and the pass of each."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 5, (ROWS, PROMPT + COMPLETION), generator=draw)
    ids[ROWS // 2 :, :6] = ids[0, :6]  # one beginning of many rows
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    pass_B = np.arange(ROWS) % PASSES
    return read_batch(ids, torch.ones_like(ids), labels), ids.tolist(), pass_B


@pytest.mark.parametrize("seed", range(8))
def test_kept_beginnings_are_those_of_their_rows_and_save_enough(seed):
    sequences, words, pass_B = step(seed)
    kept = shared_prefixes(sequences, pass_B, MIN_SAVED)
    assert kept
    for number, prefix in enumerate(kept):
        beginning = words[prefix.rows[0]][: prefix.depth]
        assert sorted(prefix.rows) == [row for row, word in enumerate(words) if word[: prefix.depth] == beginning]
        assert prefix.depth < PROMPT  # the token that predicts the first label belongs to the pass
        passes = {int(pass_B[row]) for row in prefix.rows}
        assert (prefix.first, prefix.last) == (min(passes), max(passes))
        containing = [
            (other.depth, place)
            for place, other in enumerate(kept)
            if other.depth < prefix.depth and words[other.rows[0]][: other.depth] == beginning[: other.depth]
        ]
        depth_of_parent, parent = max(containing, default=(0, -1))
        assert prefix.parent == parent < number  # parents come first
        assert (len(passes) - 1) * (prefix.depth - depth_of_parent) >= MIN_SAVED


@pytest.mark.parametrize("seed", range(8))
def test_a_passs_forest_holds_each_row_behind_kept_beginnings(seed):
    sequences, words, pass_B = step(seed)
    kept = shared_prefixes(sequences, pass_B, MIN_SAVED)

    def build(subset):
        return build_forest(subset.tokens_BL, subset.needed_B)

    for number in range(PASSES):
        rows = np.flatnonzero(pass_B == number)
        forest, segment_of = build_pass_forest(sequences, kept, rows, build, min_length=1)
        segment_T = np.repeat(np.arange(forest.segments), forest.lengths)
        word_of_index = {}
        for row, indices in zip(rows, forest.index_BL, strict=True):
            for place in range(PROMPT + COMPLETION - 1):  # the last token predicts nothing
                index = int(indices[place])
                segment = segment_T[index]
                assert forest.depths[segment] + index - forest.starts[segment] == place
                history = words[row][: place + 1]
                assert word_of_index.setdefault(index, history) == history
        assert len(word_of_index) == len(segment_T)  # no token is in the forest that no row needs
        assert segment_of.keys() == {node for node, prefix in enumerate(kept) if set(rows) & set(prefix.rows)}
        for node, segment in segment_of.items():
            assert forest.depths[segment] + forest.lengths[segment] == kept[node].depth


def test_rows_without_labels_and_one_pass_share_nothing():
    sequences, _, pass_B = step(0)
    assert shared_prefixes(sequences, np.zeros_like(pass_B), MIN_SAVED) == []
    sequences.scored_BL[:] = False
    assert shared_prefixes(sequences, pass_B, MIN_SAVED) == []
