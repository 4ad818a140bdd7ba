"""The packed row, flat and nested (every prefix of a group once), against a reconstruction by brute force."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_fsdp_qlora.prefix_sharing import attention
from trl_fsdp_qlora.prefix_sharing.layout import UnpackableBatch, cut_rows, pack, read_batch

from .helpers import PROMPT, SUPPORTED, assert_equals_stock, awkward_batch, build, make_batch, prepared

ALWAYS = float("inf")


@st.composite
def batches(draw):
    """Random groups of random sizes; prompts may repeat, occur once, or have one token, and completions be words over few letters."""
    prompt, completion = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    groups = draw(st.lists(st.tuples(st.integers(1, prompt), st.integers(1, 6)), min_size=1, max_size=5))
    prompt_lengths = [length for length, size in groups for _ in range(size)]
    completion_lengths = [draw(st.integers(0, completion)) for _ in prompt_lengths]
    ids, mask = make_batch(prompt_lengths, completion_lengths, prompt, completion, seed=draw(st.integers(0, 99)))
    ids[:, prompt:] %= draw(st.sampled_from([2, 99]))
    some = torch.rand(len(ids), completion, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.5
    return ids, mask, completion, draw(st.sampled_from([None, some]))


def histories(ids, mask, completion, score, nested):
    """For every scored token the tokens in front of it, and what a forward needs once: by group, behind a flat row's prompt by row."""
    prompt = ids.shape[1] - completion
    scored = mask[:, prompt:].bool() if score is None else mask[:, prompt:].bool() & score
    group, previous, wanted, needed = 0, None, {}, set()
    for row in range(len(ids)):
        first = prompt - int(mask[row, :prompt].sum())
        head = tuple(ids[row, first:prompt].tolist())
        group, previous = group + (head != previous), head
        for token in scored[row].nonzero().flatten().tolist():
            text = ids[row, first : prompt + token].tolist()
            wanted[row * completion + token] = first, text, ids[row, prompt + token].item()
            alone = [None if nested or n < len(head) - 1 else row for n in range(len(text))]
            needed |= {(group, alone[n], tuple(text[: n + 1])) for n in range(len(text))}
    return wanted, needed


def seen_from(layout, index: int) -> list[int]:
    """The places of the row that a query at `index` may see, in order, by the documented rule."""
    segment = int(np.searchsorted(layout.starts, index, side="right")) - 1
    own = range(layout.starts[segment], index + 1)
    if layout.end_T is not None:
        return [k for k in own if index < layout.end_T[k]]
    if segment < layout.num_roots:
        return [*own]
    prompt = layout.prompt_of_child[segment - layout.num_roots]
    return [*range(layout.starts[prompt], layout.starts[prompt] + layout.lengths[prompt]), *own]


@pytest.mark.parametrize("nested", [False, True])
@settings(max_examples=100, deadline=None)
@given(batches())
def test_every_prediction_comes_from_its_own_history_and_nothing_stands_twice(nested, batch):
    layout = pack(*batch, pairs_per_token=ALWAYS if nested else None)
    wanted, needed = histories(*batch, nested)
    assert layout.tokens == max(len(needed), 1) == layout.input_ids.shape[1] == int(layout.lengths.sum())
    assert sorted(layout.scatter_index_N.tolist()) == sorted(wanted)
    columns = layout.score_index_N, layout.score_targets_N, layout.scatter_index_N
    for index, target, place in zip(*(column.tolist() for column in columns), strict=True):
        seen, (first, text, token) = seen_from(layout, index), wanted[place]
        assert target == token and layout.input_ids[0, seen].tolist() == text
        # Stock's positions: columns of the padded batch.
        assert layout.position_ids[0, seen].tolist() == list(range(first, first + len(text)))


@pytest.mark.parametrize("pairs_per_token", [None, ALWAYS])
@settings(max_examples=40, deadline=None)
@given(batches())
def test_whole_rows_count_every_valid_token_as_often_as_the_padded_batch(pairs_per_token, batch):
    ids, mask, completion, _ = batch
    layout = pack(ids, mask, completion, whole_rows=True, pairs_per_token=pairs_per_token)
    counted = torch.zeros(200).index_add(0, layout.input_ids[0], layout.multiplicity_1T[0])
    expected = torch.zeros(200).index_add(0, ids[mask.bool()], torch.ones(int(mask.sum())))
    torch.testing.assert_close(counted, expected)


@settings(max_examples=40, deadline=None)
@given(batches(), st.integers(1, 60))
def test_cutting_covers_every_row_once_and_keeps_the_budget(batch, budget):
    ids, mask, completion, _ = batch
    facts = read_batch(*batch)
    cuts = cut_rows(facts, budget, None)
    assert [row for first, last in cuts for row in range(first, last)] == list(range(len(ids)))
    for first, last in cuts:
        part = slice(first, last)
        layout = pack(ids[part], mask[part], completion, facts=facts.rows(part))
        assert layout.tokens <= budget or last - first == 1


def test_neighbouring_groups_of_equal_size_lie_side_by_side():
    layout = pack(*make_batch([7, 7, 5, 5, 5, 7, 7], [3, 3, 2, 1, 3, 3, 3], 8, 4), 4)
    assert layout.children_per_family.tolist() == [3, 2, 2]
    assert layout.lengths.tolist() == [4, 6, 6, 2, 1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("hole", [(0, 3), (0, 7), (1, slice(0, 5))], ids=["prompt", "completion", "no prompt"])
def test_masks_with_holes_are_refused(hole):
    ids, mask = make_batch([5, 5], [4, 4], 5, 4)
    mask[hole] = 0
    with pytest.raises(UnpackableBatch):
        pack(ids, mask, 4)


def test_a_nested_row_is_taken_only_where_it_pays():
    ids, mask = make_batch([4] * 6, [6] * 6, 4, 6)
    ids[:, 4:] = torch.arange(36).view(6, 6) + 3
    # No token twice: only the copies of the prompt's last token are saved, 5 of 39 tokens for 1,156 pairs of 333.
    flat = pack(ids, mask, 6, pairs_per_token=160.0)
    assert (flat.tokens, flat.end_T) == (39, None)
    assert pack(ids, mask, 6, pairs_per_token=170.0).tokens == 34
    # Six times the same completion: 9 tokens, whose 81 pairs are fewer than the flat row's.
    ids[:, 4:] = ids[0, 4:]
    assert pack(ids, mask, 6, pairs_per_token=0.1).tokens == 9


@pytest.mark.parametrize("window", [None, 2])
def test_masks_of_nested_rows_equal_the_rule_pair_by_pair(window):
    ids, mask = make_batch([4] * 4 + [3] * 3, [3, 3, 2, 3, 3, 3, 3], 4, 3)
    ids[:, 4:] %= 2
    layout = pack(ids, mask, 3, pairs_per_token=ALWAYS)
    assert layout.end_T is not None and layout.num_singles == 2
    place = layout.position_ids[0]
    expected = torch.zeros(layout.tokens, layout.tokens, dtype=torch.bool)
    for query in range(layout.tokens):
        expected[query, seen_from(layout, query)] = True
    expected &= True if window is None else place[:, None] - place < window
    for start, length in zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True):
        part = slice(start, start + length)
        call = SimpleNamespace(layout=layout, window=window, query=torch.zeros(1))
        assert torch.equal(attention.tree_mask(call, start, length)[0, 0] == 0, expected[part, part])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_nested_rows_equal_stock(name, implementation):
    model = build(name)
    if not model._supports_sdpa and implementation == "sdpa":
        pytest.skip(f"{name} has no SDPA")
    model.set_attn_implementation(implementation)
    ids, mask = awkward_batch()
    ids[:, PROMPT:] = 3 + ids[:, PROMPT:] % 3  # words over three letters, a whole repeated one among them
    ids[5, PROMPT:] = ids[4, PROMPT:]
    sharing = prepared(model, compared=True)
    sharing._models["policy"].pairs_per_token = ALWAYS
    figures = assert_equals_stock(model, sharing, (ids, mask), nested=True)
    assert figures["layers_tree"] == 1.0 and figures["tokens_fraction"] < 0.3
