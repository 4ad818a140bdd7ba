"""A wrapped backbone asks prompt sharing for its last hidden states; any other call runs as without the wrapper."""

from types import SimpleNamespace

import pytest
import torch

from trl_fsdp_qlora.prefix_sharing.row_mask import no_mask, with_options, with_row
from trl_fsdp_qlora.prefix_sharing.wrapped_backbone import WrappedBackbone

from .helpers import awkward_batch, build, completion_labels, pack


class Recording:
    """Answers every call of a backbone by its own forward, and keeps what was asked."""

    def __init__(self, returns_no_cache: bool = False):
        self.options = SimpleNamespace(returns_no_cache=returns_no_cache)
        self.compared = []
        self.answered = []

    def look_at_model(self) -> None:
        assert len(self.compared) == len(self.answered)

    def compare_with_stock(self, call) -> None:
        self.compared.append(call)

    def last_hidden_states(self, call, last_columns, from_padding):
        self.answered.append((call, last_columns, from_padding))
        return call.stock(**call.arguments)


def wrapped(model, **options) -> tuple[WrappedBackbone, Recording]:
    sharing = Recording(**options)
    backbone = WrappedBackbone(model)
    backbone.put_on(sharing)
    backbone.put_on(sharing)  # twice is once
    return backbone, sharing


def batch() -> dict[str, torch.Tensor]:
    ids, mask = awkward_batch()
    return {"input_ids": ids, "attention_mask": mask}


def test_calls_of_the_model_and_of_its_backbone_reach_sharing():
    model = build("llama")
    logits = model(**batch()).logits
    hidden = model.base_model(**batch()).last_hidden_state
    _, sharing = wrapped(model)
    assert torch.equal(model(**batch()).logits, logits)
    assert torch.equal(model.base_model(**batch()).last_hidden_state, hidden)
    ids, mask = batch().values()
    assert torch.equal(model.base_model(ids, mask).last_hidden_state, hidden)  # by position
    assert len(sharing.answered) == 3
    for call, last_columns, from_padding in sharing.answered:
        assert call.of_backbone and torch.equal(call.arguments["attention_mask"], mask)
        assert last_columns == 0 and from_padding is None


def test_options_of_the_models_forward_reach_sharing_without_the_mask_that_carried_them():
    model = build("llama")
    _, sharing = wrapped(model)
    loss = torch.tensor(False)
    model.base_model(**with_options(batch(), last_columns=5, from_padding=loss))
    ((call, last_columns, from_padding),) = sharing.answered
    assert (last_columns, from_padding) == (5, loss) and type(call.arguments["attention_mask"]) is torch.Tensor


def decoded(model) -> dict[str, object]:
    """The arguments of a step of generation behind the batch."""
    ids, mask = batch().values()
    ones = torch.ones_like(ids[:, :1])
    cache = model(**batch(), use_cache=True).past_key_values
    return {"input_ids": ones, "attention_mask": torch.cat([mask, ones], 1), "past_key_values": cache}


def packed(model) -> dict[str, object]:
    """The arguments of a packed row, of which a model without packed layers computes something else."""
    ids, mask = batch().values()
    packed_row = pack(ids, mask, completion_labels(ids, mask))
    mask_of_row = with_row(no_mask(torch.device("cpu")), packed_row)
    return {"input_ids": packed_row.input_ids, "attention_mask": mask_of_row}


def positioned(model) -> dict[str, object]:
    """The arguments of a step of generation without a cache."""
    return batch() | {"position_ids": torch.arange(batch()["input_ids"].shape[1])[None]}


@pytest.mark.parametrize("arguments_of", [decoded, packed, positioned])
@torch.no_grad()
def test_generation_and_packed_rows_run_the_backbones_own_forward(arguments_of):
    plain = build("llama")
    expected = plain.base_model(**arguments_of(plain)).last_hidden_state
    model = build("llama")
    arguments = arguments_of(model)
    _, sharing = wrapped(model)
    assert torch.equal(model.base_model(**arguments).last_hidden_state, expected)
    assert sharing.answered == [] == sharing.compared


def test_a_call_of_trls_head_runs_the_backbones_own_forward():
    expected = build("llama").base_model(**batch()).last_hidden_state
    model = build("llama")
    _, sharing = wrapped(model)
    hidden = model.base_model(**with_options(batch(), as_stock=True)).last_hidden_state
    assert torch.equal(hidden, expected) and sharing.answered == [] == sharing.compared


@pytest.mark.parametrize("asked", [None, True])
def test_a_reference_returns_no_cache_unless_a_call_asks_for_one(asked):
    model = build("llama")
    wrapped(model, returns_no_cache=True)
    output = model.base_model(**batch(), use_cache=asked)
    assert (output.past_key_values is None) == (asked is None)


def test_a_forward_from_before_runs_inside_and_is_given_back():
    model = build("llama")
    inside = []
    own_forward = model.base_model.forward

    def forward(*args, **kwargs):
        inside.append(kwargs["use_cache"])
        return own_forward(*args, **kwargs)

    model.base_model.forward = forward
    backbone, sharing = wrapped(model)
    model.base_model(**batch(), use_cache=False)
    assert inside == [False] and len(sharing.answered) == 1
    backbone.take_off()
    assert model.base_model.forward is forward and not backbone.is_on
    model.base_model(**batch(), use_cache=False)
    assert inside == [False, False] and len(sharing.answered) == 1


def test_a_wrapper_from_later_stays_and_runs_the_backbones_own_forward():
    model = build("llama")
    hidden = model.base_model(**batch()).last_hidden_state
    backbone, sharing = wrapped(model)
    ours = model.base_model.forward
    model.base_model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    later = model.base_model.forward
    backbone.take_off()
    assert model.base_model.forward is later
    assert torch.equal(model.base_model(**batch()).last_hidden_state, hidden) and sharing.answered == []
