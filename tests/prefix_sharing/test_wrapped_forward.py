"""A wrapped forward answers fused calls, inside of what came later; others run the forward that the model had."""

import copy
import inspect

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from trl_fsdp_qlora.compat.trl import fused_head
from trl_fsdp_qlora.prefix_sharing.packed_model import head_of
from trl_fsdp_qlora.prefix_sharing.sharing import SharingOptions, install_sharing
from trl_fsdp_qlora.prefix_sharing.wrapped_forward import WrappedForward

from .helpers import awkward_batch, build, closed, completion_labels, with_stock_head

NO_CACHE = {"use_cache": False}


def labelled() -> dict[str, torch.Tensor]:
    ids, mask = awkward_batch()
    return {"input_ids": ids, "attention_mask": mask, "labels": completion_labels(ids, mask)}


def unlabelled() -> dict[str, torch.Tensor]:
    ids, mask = awkward_batch()
    return {"input_ids": ids, "attention_mask": mask}


def test_a_model_without_a_head_gets_trls_until_it_is_taken_off():
    model = build("llama")
    before = dict(vars(model))
    wrapped = WrappedForward(model)
    wrapped.put_on(0.9, ("log_probs", "entropy"))
    head = fused_head(wrapped.stock_forward)
    assert wrapped.is_on and head is not None and head.temperature == 0.9
    wrapped.take_off()
    assert vars(model) == before and head_of(model) is None


def test_a_model_with_trls_head_keeps_it():
    model = with_stock_head(build("llama"))
    head = model.forward
    wrapped = WrappedForward(model)
    wrapped.put_on(0.1, ("log_probs",))
    assert wrapped.stock_forward is head and model.forward is not head
    wrapped.take_off()
    assert model.forward is head


def test_sharing_twice_wraps_once():
    model = build("llama")
    install_sharing(model, SharingOptions())
    ours = model.forward
    install_sharing(model, SharingOptions(temperature=0.1))
    assert model.forward is ours


def test_the_forward_has_the_signature_of_the_models_class():
    """`generate` validates its arguments by it, and the Trainer leaves out columns that it does not name."""
    model = build("llama")
    install_sharing(model, SharingOptions())
    assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(model))


def test_both_ways_of_a_fused_call_equal_trls_head():
    expected = with_stock_head(build("llama"))(**labelled(), fused_lm_head=True)
    model = with_stock_head(build("llama"))
    sharing = install_sharing(model, SharingOptions())
    packed = model(**labelled(), fused_lm_head=True)
    assert sharing.figures.tokens
    with closed(sharing):
        as_stock = model(**labelled(), fused_lm_head=True)
    for name in ("log_probs", "entropy", "loss"):
        # Rounding of float32 in sums of other shapes.
        torch.testing.assert_close(getattr(packed, name), getattr(expected, name), atol=2e-5, rtol=1e-5)
        assert torch.equal(getattr(as_stock, name), getattr(expected, name))


@pytest.mark.parametrize("kept", [0, 4])
def test_a_call_for_logits_runs_the_forward_below(kept):
    expected = build("llama")(**unlabelled(), **NO_CACHE, logits_to_keep=kept).logits
    model = build("llama")
    install_sharing(model, SharingOptions())
    logits = model(**unlabelled(), **NO_CACHE, logits_to_keep=kept).logits
    is_token = unlabelled()["attention_mask"][:, -kept:].bool()
    torch.testing.assert_close(logits[is_token], expected[is_token], atol=2e-5, rtol=1e-5)


def test_a_head_that_trl_adds_later_is_wrapped_in_the_next_pass():
    model = build("llama")
    sharing = install_sharing(model, SharingOptions(temperature=0.5))
    add_fused_lm_head(model, 0.9, outputs=("log_probs", "entropy"))
    stock = with_stock_head(build("llama"), 0.9)
    expected = stock(**labelled(), fused_lm_head=True).log_probs
    for _ in range(2):
        log_probs = model(**labelled(), fused_lm_head=True).log_probs
        torch.testing.assert_close(log_probs, expected, atol=2e-5, rtol=1e-5)
    assert sharing.figures.tokens and fused_head(sharing.wrapped_forward.stock_forward).temperature == 0.9


def test_a_copy_of_a_model_calls_its_own_forward():
    """TRL's head alone would call the first model's."""
    model = build("llama")
    install_sharing(model, SharingOptions())
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.embed_tokens.weight.mul_(2.0)
    plain = build("llama")
    plain.load_state_dict(changed.state_dict())
    expected = plain(**unlabelled(), **NO_CACHE).logits
    is_token = unlabelled()["attention_mask"].bool()
    logits = changed(**unlabelled(), **NO_CACHE).logits
    torch.testing.assert_close(logits[is_token], expected[is_token], atol=2e-5, rtol=1e-5)


def test_a_forward_that_outlives_its_sharing_is_trls():
    model = with_stock_head(build("llama"))
    expected = model(**labelled(), fused_lm_head=True).log_probs
    sharing = install_sharing(model, SharingOptions())
    ours = model.forward
    model.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    sharing.remove()
    assert torch.equal(model(**labelled(), fused_lm_head=True).log_probs, expected)
