"""Long rows are cut before they are compared with stock's: the faults that whole rows show are found in cut ones."""

from dataclasses import replace

import pytest
import torch

from trl_fsdp_qlora.prefix_sharing import compared_rows
from trl_fsdp_qlora.prefix_sharing.attention import cascade, two_part
from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.compared_rows import compared_tokens, shortened
from trl_fsdp_qlora.prefix_sharing.recurrent import level_by_level
from trl_fsdp_qlora.prefix_sharing.sharing import PrefixSharingError

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
    monkeypatch.setattr(compared_rows, "MOST_TOKENS", MOST)
    monkeypatch.setattr(compared_rows, "BEHIND_WINDOW", 16)


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
    """The columns round the first label, in which completions begin."""
    ids, mask = long_batch()
    labels = completion_labels(ids, mask, COMPLETION)
    batch, sequences = read(ids, mask, labels)
    columns = slice(PROMPT - MOST // 2, PROMPT + MOST // 2)
    cut = shortened(batch, sequences, window=0)
    for part, whole in zip(cut.of_tokens().values(), (ids, mask, labels), strict=True):
        assert torch.equal(part, whole[:, columns])
    assert shortened(batch, sequences, window=119).input_ids is ids  # 16 tokens behind the window are the whole row
    assert compared_tokens(119, 119) == MOST and compared_tokens(120, 60) == 76
    # Rows that end with short completions are kept to their end; a row without a label there is left out.
    ends = slice(0, PROMPT + 4)
    rows = Batch(ids[:, ends], mask[:, ends], labels[:, ends])
    cut = shortened(rows, read_batch(*rows.of_tokens().values()), window=0)
    assert torch.equal(cut.input_ids, ids[:, PROMPT + 4 - MOST : PROMPT + 4])
    labels[0, :-1] = -100
    cut = shortened(batch, read_batch(ids, mask, labels), window=0)
    assert torch.equal(cut.input_ids, ids[1:, columns])


def test_rows_without_labels_are_cut_where_they_part(short):
    """Pairs of a reward model: a prompt and two answers."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (4, 100), generator=draw)
    ids[:, :60] = ids[0, :60]
    ids[2:, 60:80] = ids[2, 60:80]
    batch = Batch(ids, None, None)
    sequences = replace(read_batch(ids, None, None), needs_all=True)
    few = shortened(batch, sequences, window=0).input_ids
    assert torch.equal(few, ids[:, 60 - MOST // 2 : 60 + MOST // 2])


def test_an_image_is_not_cut(monkeypatch):
    monkeypatch.setattr(compared_rows, "MOST_TOKENS", 8)
    _, sharing, batch = pictured("qwen3_vl")
    sequences = sharing.packed_model.read(batch)
    assert shortened(batch, sequences, window=0) is batch


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
    assert sharing.status.packs and sharing.status.compared, sharing.describe()
    assert sizes.count((1, MOST)) >= compared_rows.ROWS_FP32  # padded, one by one


def without_window(attend):
    def planted(call):
        call.window = None
        return attend(call)

    return planted


def test_a_lost_window_is_found(short, monkeypatch):
    monkeypatch.setattr(two_part, "attend", without_window(two_part.attend))
    model = build("mistral_sliding")
    sharing = prepared(model, "two_part")
    with pytest.raises(PrefixSharingError):
        run(model, sharing)


def test_a_window_longer_than_compared_rows_is_found_lost(short, monkeypatch):
    """Rows continue behind the window, which is longer than the rows of other models."""
    monkeypatch.setattr(cascade, "attend", without_window(cascade.attend))
    monkeypatch.setattr(two_part, "attend", without_window(two_part.attend))
    for behind, found in ((16, True), (-30, False)):
        monkeypatch.setattr(compared_rows, "BEHIND_WINDOW", behind)
        model = build(small("Mistral", sliding_window=40))
        sharing = prepared(model)
        run(model, sharing)
        assert sharing.status.packs != found, sharing.describe()


def test_an_ancestor_that_is_not_seen_is_found(short, monkeypatch):
    monkeypatch.setattr(cascade, "merge", lambda out, lse, ancestor_out, ancestor_lse: out)
    model = build("llama")
    sharing = prepared(model)
    run(model, sharing)
    assert not sharing.status.packs


def test_a_wrong_gradient_is_found(short, monkeypatch):
    attend = cascade.attend

    def without_gradient_of_values(call):
        call.value = call.value.detach() if call.module.layer_idx == 1 else call.value
        return attend(call)

    monkeypatch.setattr(cascade, "attend", without_gradient_of_values)
    model = build("llama")
    sharing = prepared(model)
    with torch.no_grad():
        run(model, sharing)
    assert sharing.status.packs  # values are equal
    run(model, sharing)
    assert not sharing.status.packs


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
    assert not sharing.status.packs
