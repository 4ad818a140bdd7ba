"""The forest of a batch and the packed row made of it, against a reconstruction by brute force.

Covers `prefix_sharing/row.py`.
"""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_fsdp_qlora.prefix_sharing.attention.cascade import _whole_ancestors
from trl_fsdp_qlora.prefix_sharing.forest import build_forest
from trl_fsdp_qlora.prefix_sharing.status import CannotPack

from .helpers import (
    completion_labels,
    every_level_made,
    make_batch,
    pack,
    read_batch,
)

LETTERS = 40  # token ids below


class Rows(NamedTuple):
    """A batch `(B, L)`, and what it was made from: the first real column of each row."""

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor
    offsets: list[int]

    def words(self) -> list[list[int]]:
        return [row[kept.bool()].tolist() for row, kept in zip(self.ids, self.mask, strict=True)]

    def scored(self) -> list[list[int]]:
        """Of each row the tokens that are labels; no token predicts one in the first column."""
        return [
            [t for t in range(len(word)) if o + t and self.labels[row, o + t] != -100]
            for row, (o, word) in enumerate(zip(self.offsets, self.words(), strict=True))
        ]

    def needed(self) -> list[list[int]]:
        """Of each row the tokens up to the one that predicts its last label."""
        return [word[: max(scored, default=0)] for word, scored in zip(self.words(), self.scored(), strict=True)]


def batch_of(words, scored, offsets, width, seed=0) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    # Padding holds random tokens, too: nothing may depend on them.
    ids = torch.randint(0, LETTERS, (len(words), width), generator=draw)
    mask, labels = torch.zeros(2, len(words), width, dtype=torch.long)
    labels -= 100
    for row, (word, offset) in enumerate(zip(words, offsets, strict=True)):
        ids[row, offset : offset + len(word)] = torch.tensor(word, dtype=torch.long)
        mask[row, offset : offset + len(word)] = 1
        for token in scored[row]:
            labels[row, offset + token] = word[token]
    return Rows(ids, mask, labels, offsets)


@st.composite
def batches(draw):
    """Rows that continue earlier ones from any place, or equal them; padded on any side, in any order, with any
    labels.
    """
    letters = draw(st.sampled_from([2, 3, LETTERS]))
    tails = st.lists(st.integers(0, letters - 1), max_size=draw(st.sampled_from([3, 25])))
    words = []
    for _ in range(draw(st.integers(1, 9))):
        begins = draw(st.sampled_from([[], *words]))
        begins = begins[: draw(st.integers(0, len(begins)))] if draw(st.booleans()) else begins
        words.append(begins + draw(tails))
    words = draw(st.permutations(words))
    width = max(map(len, words)) + draw(st.integers(0, 3)) or 1
    offsets = []
    scored = []
    side = draw(st.sampled_from(["left", "right", "both"]))
    for word in words:
        room = width - len(word)
        offsets.append({"left": room, "right": 0}.get(side, draw(st.integers(0, room))) if word else 0)
        some = st.lists(st.integers(1, len(word) - 1)) if len(word) > 1 else st.just([])
        of_row = sorted(set(draw(st.one_of(st.just(range(1, len(word))), some, st.just([])))))
        # Stock leaves a label in the first column out.
        scored.append([0, *of_row] if word and offsets[-1] == 0 and draw(st.booleans()) else of_row)
    return batch_of(words, scored, offsets, width, draw(st.integers(0, 99)))


def trie_of(words) -> set[tuple[int, ...]]:
    """Every beginning of every word."""
    return {tuple(word[: n + 1]) for word in words for n in range(len(word))}


def seen_from(forest, index: int) -> list[int]:
    """The indices of the packed row that the query at `index` attends to, in order, by the documented rule."""
    segment = int(np.searchsorted(forest.starts, index, side="right")) - 1
    own_segment = range(forest.starts[segment], index + 1)
    path = []
    parent = forest.parents[segment]
    while parent >= 0:
        path.insert(0, range(forest.starts[parent], forest.starts[parent] + forest.lengths[parent]))
        parent = forest.parents[parent]
    return [*itertools.chain(*path), *own_segment]


def packed_as(kind, rows: Rows, **options):
    if kind == "every level":
        with every_level_made():
            return pack(*rows[:3], **options)
    return pack(*rows[:3], **options)


KINDS = ("levels that pay", "every level")


def not_empty(rows: Rows) -> Rows:
    """Something has to be computed; prompt sharing sees to it."""
    if any(rows.needed()):
        return rows
    ids = torch.tensor([[1, 2]])
    return Rows(ids, torch.ones_like(ids), torch.tensor([[-100, 2]]), [0])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(batches().map(not_empty))
def test_every_label_is_predicted_from_its_own_history(kind, rows):
    layout = packed_as(kind, rows)
    forest = layout.forest
    width = rows.ids.shape[1]
    assert layout.tokens == layout.input_ids.shape[1] == forest.tokens == forest.starts[-1] + forest.lengths[-1]
    wanted = {}
    for row, (word, scored) in enumerate(zip(rows.words(), rows.scored(), strict=True)):
        for token in scored:
            wanted[row * (width - 1) + rows.offsets[row] + token - 1] = word[:token], word[token]
    assert sorted(layout.scatter_index_N.tolist()) == sorted(wanted)
    columns = layout.result_index_N, layout.targets_N, layout.scatter_index_N
    for index, target, result in zip(*(column.tolist() for column in columns), strict=True):
        seen = seen_from(forest, index)
        history, token = wanted[result]
        assert target == token and layout.input_ids[0, seen].tolist() == history
        positions = layout.position_ids[0, seen]
        # Columns of a row of its tree, so the row's own if all rows have the same padding in front.
        assert (positions.diff() == 1).all() and positions[0] in rows.offsets


@pytest.mark.parametrize("kind", KINDS[1:])
@settings(max_examples=50, deadline=None)
@given(batches().map(not_empty))
def test_nothing_is_computed_twice_if_every_level_is_made(kind, rows):
    assert packed_as(kind, rows).tokens == len(trie_of(rows.needed()))


@settings(max_examples=40, deadline=None)
@given(batches().map(not_empty))
def test_a_forest_is_no_longer_than_with_one_shared_beginning(rows):
    """One level of prompts is what every trainer has at least; and one beginning that all rows have in common."""
    needed = rows.needed()
    tokens = pack(*rows[:3]).tokens
    assert len(trie_of(needed)) <= tokens
    prompts: dict[tuple, int] = {}
    for word, scored in zip(rows.words(), rows.scored(), strict=True):
        if scored:
            prompt = tuple(word[: scored[0]])
            prompts[prompt] = prompts.get(prompt, len(prompt)) + max(scored) - len(prompt)
    assert tokens <= sum(prompts.values())
    for shared in {tuple(word[:n]) for word in needed for n in range(1, len(word) + 1)}:
        having = [word for word in needed if tuple(word[: len(shared)]) == shared]
        assert tokens <= sum(map(len, needed)) - (len(having) - 1) * len(shared)


def best_of_one_level(words) -> int:
    """Fewest tokens, if each row may share one beginning with others: by trying every beginning."""

    def least(prefix: tuple, rows: list) -> int:
        """Tokens behind `prefix` of rows that begin with it and share nothing so far."""
        together = len(prefix) + sum(len(word) - len(prefix) for word in rows)
        nexts = {}
        ended = 0
        for word in rows:
            if len(word) > len(prefix):
                nexts.setdefault(word[len(prefix)], []).append(word)
            else:
                ended += len(word)
        apart = ended + sum(least((*prefix, token), few) for token, few in nexts.items())
        return min(together, apart) if prefix else apart

    return least((), words)


@settings(max_examples=40, deadline=None)
@given(batches().map(not_empty))
def test_the_first_level_is_the_best_and_further_ones_save(rows):
    assert pack(*rows[:3]).tokens <= best_of_one_level([word for word in rows.needed() if word])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(batches())
def test_each_token_counts_as_often_as_in_the_padded_batch(kind, rows):
    if not rows.mask.any():
        return
    layout = packed_as(kind, rows, is_whole=True)
    index_BL = torch.from_numpy(layout.forest.index_BL)
    tokens = layout.input_ids[0][index_BL[index_BL >= 0]]
    counted = torch.bincount(tokens, minlength=LETTERS).float()
    expected = torch.zeros(LETTERS).index_add(0, rows.ids[rows.mask.bool()], torch.ones(int(rows.mask.sum())))
    torch.testing.assert_close(counted, expected)


@pytest.mark.parametrize("kind", KINDS[:2])
@settings(max_examples=50, deadline=None)
@given(batches().map(not_empty))
def test_every_segment_attends_to_each_of_its_ancestors_once(kind, rows):
    """Its queries are whole segments, in the order of the row."""
    forest = packed_as(kind, rows).forest
    wanted = {(s, a) for s in range(forest.segments) for a in forest.path(s)}
    pairs = []
    ends = forest.starts + forest.lengths
    for level, queries in enumerate(forest.queries()):
        ancestors = list(queries)
        assert (forest.levels[ancestors] == level).all() and (np.diff(ancestors) > 0).all()
        for ancestor, tokens in queries.items():
            assert (np.diff(tokens) > 0).all()
            inside = np.flatnonzero(np.isin(forest.starts, tokens))
            assert np.isin(ends[inside] - 1, tokens).all()
            assert forest.lengths[inside].sum() == len(tokens)
            pairs += [(int(segment), ancestor) for segment in inside]
    assert sorted(pairs) == sorted(wanted)
    for segment, parent in enumerate(forest.parents.tolist()):
        assert forest.is_leaf[segment] == (segment not in forest.parents)
        assert forest.levels[segment] == (forest.levels[parent] + 1 if parent >= 0 else 0)
        assert forest.depths[segment] == (
            ends[parent] - forest.starts[parent] + forest.depths[parent] if parent >= 0 else 0
        )


def test_calls_of_attention_grow_with_the_number_of_levels():
    """Turns of a conversation: each sample begins with the one before it, and ends with an answer of its own."""
    turns, turn, answer = 27, 30, 12
    history = np.arange(turns * turn)
    tokens_BL = np.full((turns, turns * turn + answer), -1)
    lengths_B = (np.arange(turns) + 1) * turn + answer
    for row, length in enumerate(lengths_B.tolist()):
        tokens_BL[row, : length - answer] = history[: length - answer]
        tokens_BL[row, length - answer : length] = 10_000 + row
    forest = build_forest(tokens_BL, lengths_B)
    assert forest.levels.max() > 20  # the last turns save too little for levels of their own
    assert len(_whole_ancestors(forest, torch.device("cpu"))) == forest.levels.max()


@pytest.mark.parametrize("shortest", [2, 4])
@settings(max_examples=40, deadline=None)
@given(batches().map(not_empty))
def test_continued_segments_have_the_shortest_length_of_a_state(shortest, rows):
    with every_level_made():
        forest = pack(*rows[:3], min_length=shortest).forest
    assert (forest.lengths[~forest.is_leaf] >= shortest).all()


@pytest.mark.parametrize("hole", [(0, 3), (0, 7), (1, slice(5))], ids=["prompt", "completion", "no prompt"])
def test_masks_with_holes_are_refused(hole):
    ids, mask = make_batch([5, 5], [4, 4], 5, 4)
    mask[hole] = 0
    with pytest.raises(CannotPack):
        read_batch(ids, mask, completion_labels(ids, mask, 4))


def test_a_label_without_a_token_is_refused():
    ids, mask = make_batch([5, 5], [4, 2], 5, 4)
    labels = completion_labels(ids, mask, 4)
    labels[1, -1] = 5
    with pytest.raises(CannotPack):
        read_batch(ids, mask, labels)


def test_images_are_not_parted():
    """Rows that part inside a span share what comes before it; rows with equal spans share them."""
    words = np.array([[1, 2, 9, 9, 9, 3, 4], [1, 2, 9, 9, 8, 3, 4], [1, 2, 9, 9, 9, 3, 5]])
    spans = np.array([[2, 4]] * 3)
    lengths = np.array([7, 7, 7])
    with every_level_made():
        forest = build_forest(words, lengths, spans)
    assert forest.tokens == 2 + 4 + 1 + 1 + 5
    for start, length, row in zip(forest.depths, forest.lengths, forest.source, strict=True):
        inside = set(range(start, start + length)) & {2, 3, 4}
        assert inside in (set(), {2, 3, 4}), row


def test_each_token_of_an_agents_turns_is_computed_once():
    """Two episodes of forty turns, whose thinking is gone from the history: each turn parts from the one before."""
    draw = np.random.default_rng(0)

    def ids(count):
        return draw.integers(3, 500, count).tolist()

    head = ids(250)
    rows = []
    for _ in range(2):
        history = list(head)
        for _ in range(40):
            said = ids(10)
            rows.append(history + ids(30) + said)
            history = history + said + ids(40)
    lengths_B = np.array(list(map(len, rows)))
    tokens_BL = np.full((len(rows), lengths_B.max()), -1)
    for row, tokens in zip(tokens_BL, rows, strict=True):
        row[: len(tokens)] = tokens
    built = build_forest(tokens_BL, lengths_B)
    distinct = {hash(tuple(row[: i + 1])) for row in rows for i in range(len(row))}
    assert built.tokens <= 1.02 * len(distinct)
    assert lengths_B.sum() > 10 * len(distinct)
