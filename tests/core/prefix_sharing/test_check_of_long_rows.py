"""Long rows are cut before they are compared with stock's: the faults that whole rows show are found in cut ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trl_fsdp_qlora.prefix_sharing import check
from trl_fsdp_qlora.prefix_sharing.attention import cascade, two_part
from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.check import compared_tokens, shortened
from trl_fsdp_qlora.prefix_sharing.recurrent import level_by_level
from trl_fsdp_qlora.prefix_sharing.sharing import PrefixSharingError
from trl_fsdp_qlora.prefix_sharing.wrapped_forward import Instructions

from .helpers import (
    VOCABULARY,
    build,
    completion_labels,
    every_level_made,
    make_batch,
    one_pass,
    prepared,
    read_batch,
    small,
)
from .test_images import pictured

PROMPT, COMPLETION, MOST = 70, 50, 24
# Two groups, whose prompts begin in different columns, and a prompt that is no longer than a compared row.
LENGTHS = [70, 70, 64, 64, 5, 5], [50, 40, 50, 9, 50, 30]


@pytest.fixture
def short(monkeypatch):
    """Rows of few tokens count as long ones."""
    monkeypatch.setattr(check, "MOST_TOKENS", MOST)
    monkeypatch.setattr(check, "BEHIND_WINDOW", 16)


def long_batch():
    """Groups with a common beginning, in different columns."""
    ids, mask = make_batch(*LENGTHS, prompt=PROMPT, completion=COMPLETION)
    ids[2:4, PROMPT - 64 : PROMPT - 54] = ids[0, :10]
    return ids, mask


def read(ids, mask, labels):
    return Batch(ids, mask, labels), read_batch(ids, mask, labels)


def run(model, sharing):
    """A pass over long rows; the sizes of its forwards before the pass itself."""
    sizes = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    with every_level_made():
        one_pass(model, sharing, long_batch(), completion=COMPLETION)
    return sizes[:-1]


def test_what_is_kept_of_long_rows(short):
    ids, mask = long_batch()
    labels = completion_labels(ids, mask, COMPLETION)
    batch, sequences = read(ids, mask, labels)
    cut = shortened(batch, sequences, window=0)
    few = read_batch(cut.input_ids, cut.attention_mask, cut.labels)
    for row, (prompt, completion) in enumerate(zip(*LENGTHS, strict=True)):
        whole = sequences.tokens_BL[row, : prompt + completion]
        behind = min(completion, MOST // 2)
        wanted = whole[: prompt + behind]
        if prompt > MOST // 2:
            wanted = np.concatenate([whole[: MOST // 4], whole[prompt - MOST // 4 : prompt + behind]])
        assert few.tokens_BL[row, : few.lengths_B[row]].tolist() == wanted.tolist()
        assert few.scored_BL[row].sum() == behind and few.scored_BL[row, few.lengths_B[row] - 1]
    offsets = few.offsets_B
    assert offsets[0] == offsets[1] < offsets[2] == offsets[3] < offsets[4] == offsets[5]
    assert cut.input_ids.shape[1] <= MOST + 2
    # A completion of a few tokens leaves more to the prompt, and a short prompt more to the completion.
    for part, wanted in ((slice(2, 4), (MOST // 2, MOST // 2)), (slice(4, 6), (5, MOST - 5)), (slice(3, 4), (15, 9))):
        rows = np.arange(6)[part].repeat(2 if part.stop - part.start == 1 else 1)
        few = shortened(batch.rows(rows), sequences.rows(rows), window=0)
        is_label = few.labels[0] != -100
        assert (int(few.attention_mask[0].sum()) - int(is_label.sum()), int(is_label.sum())) == wanted
    assert shortened(batch, sequences, window=119).input_ids is ids  # 16 tokens behind the window are the whole row
    assert compared_tokens(119, 119) == MOST and compared_tokens(120, 60) == 76


def test_rows_without_labels_are_cut_where_they_part(short):
    """Pairs of a reward model: a prompt and two answers."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (4, 100), generator=draw)
    ids[:, :60] = ids[0, :60]
    ids[2:, 60:80] = ids[2, 60:80]
    batch = Batch(ids, None, None)
    sequences = replace(read_batch(ids, None, None), needs_all=True)
    few = shortened(batch, sequences, window=0).input_ids
    assert few.shape == (4, MOST) and len(few.unique(dim=0)) == 4
    assert torch.equal(few[2, :12], few[3, :12]) and torch.equal(few[:, :6], ids[:, :6])


def test_an_image_is_not_cut(monkeypatch):
    monkeypatch.setattr(check, "MOST_TOKENS", 8)
    model, sharing, batch = pictured("qwen3_vl")
    sequences = sharing.packed_model.read(batch)
    last = sequences.spans_B2[:, 1]
    few = sharing.packed_model.read(shortened(batch, sequences, window=0))
    assert (few.lengths_B < sequences.lengths_B).any() and np.array_equal(few.spans_B2, sequences.spans_B2)
    for row in np.flatnonzero(last >= 0):
        kept = slice(0, min(last[row] + 2, sequences.lengths_B[row]))
        assert np.array_equal(few.tokens_BL[row, kept], sequences.tokens_BL[row, kept])
    with every_level_made():
        model(**batch.arguments(), sharing=Instructions(num_images=batch.num_images), fused_lm_head=True)
        sharing.compare_with_stock(model, batch)
    assert sharing.is_active and sharing.images.reason is None and (True, True) in sharing.checked


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_sliding", "mistral_sliding", "gemma3", "gpt_oss", "opt", "qwen3_5", "mamba2", "lfm3"]
)
def test_right_passes_are_found_equal(family, short):
    model = build(family)
    if family == "opt":
        model = build(
            lambda: type(model)(type(model.config)(**model.config.to_dict() | {"max_position_embeddings": 200}))
        )
    sharing = prepared(model)
    sizes = run(model, sharing)
    assert sharing.is_active and sharing.checked, sharing.describe()
    assert sizes and max(columns for rows, columns in sizes if rows > 1) <= MOST + 4


def without_window(attend):
    def planted(call):
        call.window = None
        return attend(call)

    return planted


def test_a_lost_window_is_found(short, monkeypatch):
    monkeypatch.setattr(two_part, "attend", without_window(two_part.attend))
    model = build("mistral_sliding")
    sharing = prepared(model, "two_part")
    with pytest.raises(PrefixSharingError, match="difference in log-probability"):
        run(model, sharing)


def test_a_window_longer_than_compared_rows_is_found_lost(short, monkeypatch):
    """Rows continue behind the window, which is longer than the rows of other models."""
    monkeypatch.setattr(cascade, "attend", without_window(cascade.attend))
    monkeypatch.setattr(two_part, "attend", without_window(two_part.attend))
    for behind, found in ((16, True), (-30, False)):
        monkeypatch.setattr(check, "BEHIND_WINDOW", behind)
        model = build(small("Mistral", sliding_window=40))
        sharing = prepared(model)
        run(model, sharing)
        assert sharing.is_active != found, sharing.describe()


def test_an_ancestor_that_is_not_seen_is_found(short, monkeypatch):
    monkeypatch.setattr(cascade, "merge", lambda out, lse, ancestor_out, ancestor_lse: out)
    model = build("llama")
    sharing = prepared(model)
    run(model, sharing)
    assert "difference in log-probability" in sharing.describe()


def test_a_wrong_gradient_is_found(short, monkeypatch):
    attend = cascade.attend

    def without_gradient_of_values(call):
        call.value = call.value.detach() if call.module.layer_idx == 1 else call.value
        return attend(call)

    monkeypatch.setattr(cascade, "attend", without_gradient_of_values)
    model = build("llama")
    sharing = prepared(model)
    run(model, sharing)
    assert "gradients differ" in sharing.describe()


def test_a_recurrent_state_that_is_lost_is_found(short, monkeypatch):
    """A completion that begins at zero, and not at its prompt's state."""
    states_of = level_by_level._states_of
    lost = {"recurrent": 0.0, "conv": 1.0}
    monkeypatch.setattr(
        level_by_level,
        "_states_of",
        lambda *states: {kind: lost[kind[0]] * state for kind, state in states_of(*states).items()},
    )
    model = build("qwen3_5")
    sharing = prepared(model)
    run(model, sharing)
    assert "difference in log-probability" in sharing.describe()
