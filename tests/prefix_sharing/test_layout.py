"""The packed row against a reconstruction by brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_fsdp_qlora.prefix_sharing.layout import UnpackableBatch, cut_rows, pack, read_batch

from .helpers import make_batch


@st.composite
def batches(draw):
    """Random groups of random sizes; prompts may repeat, occur once, or have one token."""
    prompt, completion = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    groups = draw(st.lists(st.tuples(st.integers(1, prompt), st.integers(1, 5)), min_size=1, max_size=5))
    prompt_lengths = [length for length, size in groups for _ in range(size)]
    completion_lengths = [draw(st.integers(0, completion)) for _ in prompt_lengths]
    ids, mask = make_batch(prompt_lengths, completion_lengths, prompt, completion, seed=draw(st.integers(0, 99)))
    score = draw(
        st.none() | st.lists(st.booleans(), min_size=ids[:, prompt:].numel(), max_size=ids[:, prompt:].numel())
    )
    if score is not None:
        score = torch.tensor(score).view(len(ids), completion)
    return ids, mask, completion, score


def visible_tokens(layout, index: int) -> tuple[list[int], list[int]]:
    """Tokens and positions that a query at `index` of the packed row may see, in order, by the documented rule."""
    starts, lengths = layout.starts, layout.lengths
    segment = int(np.searchsorted(starts, index, side="right")) - 1
    seen = list(range(starts[segment], index + 1))
    if segment >= layout.num_roots:
        prompt = layout.prompt_of_child[segment - layout.num_roots]
        seen = list(range(starts[prompt], starts[prompt] + lengths[prompt])) + seen
    return layout.input_ids[0, seen].tolist(), layout.position_ids[0, seen].tolist()


@settings(max_examples=150, deadline=None)
@given(batches())
def test_every_prediction_comes_from_its_own_history_and_the_row_holds_nothing_else(batch):
    ids, mask, completion, score = batch
    layout = pack(ids, mask, completion, score)
    prompt = ids.shape[1] - completion
    scored = mask[:, prompt:].bool() if score is None else mask[:, prompt:].bool() & score
    # Every scored token appears once, at its own place.
    assert sorted(layout.scatter_index_N.tolist()) == scored.flatten().nonzero().squeeze(1).tolist()
    columns = layout.score_index_N, layout.score_targets_N, layout.scatter_index_N
    for index, target, place in zip(*(column.tolist() for column in columns), strict=True):
        row, token = divmod(place, completion)
        assert target == ids[row, prompt + token]
        first = prompt - int(mask[row, :prompt].sum())
        tokens, positions = visible_tokens(layout, index)
        assert tokens == ids[row, first : prompt + token].tolist()
        assert positions == list(range(first, prompt + token))  # stock's positions: columns of the padded batch
    # (P - 1) + the positions that predict up to the last scored one, per run of equal prompts.
    expected, previous, shared = 0, None, False
    for row in range(len(ids)):
        prompt_tokens = tuple(ids[row, :prompt][mask[row, :prompt].bool()].tolist())
        shared, previous = shared and prompt_tokens == previous, prompt_tokens
        last = scored[row].nonzero().flatten()
        if len(last):
            expected += int(last[-1]) + 1 + (0 if shared else len(prompt_tokens) - 1)
            shared = True
    assert layout.tokens == max(expected, 1) == layout.input_ids.shape[1] == int(layout.lengths.sum())


@settings(max_examples=60, deadline=None)
@given(batches())
def test_whole_rows_count_every_valid_token_as_often_as_the_padded_batch(batch):
    ids, mask, completion, _ = batch
    layout = pack(ids, mask, completion, whole_rows=True)
    counted = torch.zeros(200).index_add(0, layout.input_ids[0], layout.multiplicity_1T[0])
    expected = torch.zeros(200).index_add(0, ids[mask.bool()], torch.ones(int(mask.sum())))
    torch.testing.assert_close(counted, expected)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 60))
def test_cutting_covers_every_row_once_and_keeps_the_budget(batch, budget):
    ids, mask, completion, score = batch
    facts = read_batch(ids, mask, completion, score)
    cuts = cut_rows(facts, budget, None)
    assert [row for first, last in cuts for row in range(first, last)] == list(range(len(ids)))
    for first, last in cuts:
        part = slice(first, last)
        layout = pack(ids[part], mask[part], completion, facts=facts.rows(part))
        assert layout.tokens <= budget or last - first == 1


def test_neighbouring_groups_of_equal_size_lie_side_by_side():
    ids, mask = make_batch([7, 7, 5, 5, 5, 7, 7], [3, 3, 2, 1, 3, 3, 3], 8, 4)
    layout = pack(ids, mask, 4)
    assert layout.children_per_family.tolist() == [3, 2, 2]
    assert layout.lengths.tolist() == [4, 6, 6, 2, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("hole", [(0, 3), (0, 7), (1, slice(0, 5))], ids=["prompt", "completion", "no prompt"])
def test_masks_with_holes_are_refused(hole):
    ids, mask = make_batch([5, 5], [4, 4], 5, 4)
    mask[hole] = 0
    with pytest.raises(UnpackableBatch):
        pack(ids, mask, 4)
