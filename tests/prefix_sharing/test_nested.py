"""Nested rows: every prefix of a group once, against a brute-force trie, a dense mask and the padded pass."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_fsdp_qlora.prefix_sharing import attention
from trl_fsdp_qlora.prefix_sharing.layout import pack

from .helpers import PROMPT, SUPPORTED, assert_equals_stock, awkward_batch, build, make_batch, prepared

ALWAYS = float("inf")


@st.composite
def batches(draw):
    """Groups whose completions are words over two letters, so that they share beginnings, ends and whole words."""
    prompt, completion = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    groups = draw(st.lists(st.tuples(st.integers(1, prompt), st.integers(1, 6)), min_size=1, max_size=4))
    prompt_lengths = [length for length, size in groups for _ in range(size)]
    completion_lengths = [draw(st.integers(0, completion)) for _ in prompt_lengths]
    ids, mask = make_batch(prompt_lengths, completion_lengths, prompt, completion, seed=draw(st.integers(0, 99)))
    ids[:, prompt:] %= 2
    score = torch.rand(len(ids), completion, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.5
    return ids, mask, completion, score


def histories(ids, mask, completion, score):
    """For every scored token the tokens in front of it, and the distinct prefixes that a forward needs, by group."""
    prompt = ids.shape[1] - completion
    scored = mask[:, prompt:].bool() & score
    group, previous, wanted, needed = 0, None, {}, set()
    for row in range(len(ids)):
        first = prompt - int(mask[row, :prompt].sum())
        head = tuple(ids[row, first:prompt].tolist())
        group += head != previous
        previous = head
        for token in scored[row].nonzero().flatten().tolist():
            text = ids[row, first : prompt + token].tolist()
            wanted[row * completion + token] = first, text
            needed |= {(group, tuple(text[: n + 1])) for n in range(len(text))}
    return wanted, needed


@settings(max_examples=200, deadline=None)
@given(batches())
def test_every_prediction_comes_from_its_own_history_and_no_prefix_stands_twice(batch):
    ids, mask, completion, score = batch
    layout = pack(ids, mask, completion, score, pairs_per_token=ALWAYS)
    flat = pack(ids, mask, completion, score)
    wanted, needed = histories(*batch)
    assert sorted(layout.scatter_index_N.tolist()) == sorted(wanted)
    assert layout.tokens == max(len(needed), 1) <= flat.tokens
    if layout.end_T is None:  # nothing in common behind the prompts: the flat row is as short
        assert layout.tokens == flat.tokens
        return
    for index, place in zip(layout.score_index_N.tolist(), layout.scatter_index_N.tolist(), strict=True):
        start = max(s for s in layout.starts.tolist() if s <= index)
        seen = [k for k in range(start, index + 1) if index < layout.end_T[k]]
        first, text = wanted[place]
        assert layout.input_ids[0, seen].tolist() == text
        assert layout.position_ids[0, seen].tolist() == list(range(first, first + len(text)))


@settings(max_examples=50, deadline=None)
@given(batches())
def test_whole_rows_count_every_valid_token_as_often_as_the_padded_batch(batch):
    ids, mask, completion, _ = batch
    layout = pack(ids, mask, completion, whole_rows=True, pairs_per_token=ALWAYS)
    counted = torch.zeros(200).index_add(0, layout.input_ids[0], layout.multiplicity_1T[0])
    expected = torch.zeros(200).index_add(0, ids[mask.bool()], torch.ones(int(mask.sum())))
    torch.testing.assert_close(counted, expected)


@pytest.mark.parametrize("window", [None, 2])
def test_masks_equal_the_rule_pair_by_pair(window):
    ids, mask = make_batch([4] * 4 + [3] * 3, [3, 3, 2, 3, 3, 3, 3], 4, 3)
    ids[:, 4:] %= 2
    layout = pack(ids, mask, 3, pairs_per_token=ALWAYS)
    assert layout.end_T is not None and layout.num_singles == 2
    group = torch.repeat_interleave(torch.arange(2), torch.from_numpy(layout.lengths)).tolist()
    place, end = layout.position_ids[0].tolist(), layout.end_T

    def sees(q, k):
        return group[q] == group[k] and k <= q < end[k] and (window is None or place[q] - place[k] < window)

    expected = torch.tensor([[sees(q, k) for k in range(layout.tokens)] for q in range(layout.tokens)])
    for start, length in zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True):
        part = slice(start, start + length)
        call = SimpleNamespace(layout=layout, window=window, query=torch.zeros(1))
        assert torch.equal(attention.tree_mask(call, start, length)[0, 0] == 0, expected[part, part])


def branching_batch():
    """The awkward batch with completions over three letters, a whole repeated one among them."""
    ids, mask = awkward_batch()
    ids[:, PROMPT:] = 3 + ids[:, PROMPT:] % 3
    ids[5, PROMPT:] = ids[4, PROMPT:]
    return ids, mask


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_log_probs_and_gradients_equal_stock(name, implementation):
    model = build(SUPPORTED[name])
    if not model._supports_sdpa and implementation == "sdpa":
        pytest.skip(f"{name} has no SDPA")
    model.set_attn_implementation(implementation)
    sharing = prepared(model, compared=True)
    sharing._models["policy"].pairs_per_token = ALWAYS
    figures = assert_equals_stock(model, sharing, branching_batch(), nested=True)
    assert figures["layers_tree"] == 1.0 and figures["tokens_fraction"] < 0.3


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
