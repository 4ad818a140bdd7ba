"""Recurrent layers on packed rows: what is shared and what is not; `test_equals_stock.py` has them beside stock's trainer."""

import numpy as np
import pytest
import torch

from trl_fsdp_qlora.prefix_sharing import PrefixSharing, PrefixSharingError
from trl_fsdp_qlora.prefix_sharing.recurrent import _SHORTEST, _TOKENS_PER_CALL, _similar
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

from .helpers import COMPLETION, RECURRENT, awkward_batch, build, make_batch, stock_log_probs, with_stock_head
from .test_equals_stock import KINDS


def shared_pass(name, batch, choice="auto", batch_size=None, **asked):
    """Log-probabilities and figures of a pass, and stock's."""
    model = with_stock_head(build(RECURRENT[name][0]))
    sharing = PrefixSharing(choice, temperature=0.9)
    sharing.prepare("policy", model)
    request = PassRequest(Kind.POLICY, model, **asked).on(*batch, COMPLETION, batch_size=batch_size)
    values, figures = sharing.log_probs(
        request, lambda request: (*stock_log_probs(model, request.input_ids, request.attention_mask), None)
    )
    assert sharing.active(), sharing.describe()
    return sharing, values[0], figures, stock_log_probs(model, *batch)[0]


@pytest.mark.parametrize("name", KINDS)
def test_selected_tokens_and_rows_cut_inside_groups(name):
    batch = awkward_batch()
    draw = torch.Generator().manual_seed(2)
    scored = (torch.rand(len(batch[0]), COMPLETION, generator=draw) < 0.4) & batch[1][:, -COMPLETION:].bool()
    _, ours, figures, stock = shared_pass(name, batch, scored_BC=scored, batch_size=3)
    assert figures["layers_recurrent"] >= 0.5
    torch.testing.assert_close(ours, torch.where(scored, stock, 0.0), atol=2e-5, rtol=1e-5)


def test_nested_rows_share_prompts_only():
    """T-SPMO's completions begin alike; a state is kept where a prompt ends, not at every token."""
    batch = make_batch([12] * 4, [9] * 4)
    batch[0][:, -COMPLETION:-2] = batch[0][0, -COMPLETION:-2]
    sharing, ours, figures, stock = shared_pass("qwen3_5", batch, nested=True)
    torch.testing.assert_close(ours, stock, atol=2e-5, rtol=1e-5)
    assert figures["tokens_fraction"] == (11 + 4 * 9) / batch[0].numel()
    assert "one level" in sharing.describe()


def test_one_token_completions():
    """One token behind a state would be a decoding step: kernels that write into the state and have no backward."""
    _, ours, figures, stock = shared_pass("falcon_h1", make_batch([12] * 4, [1] * 4))
    assert figures["layers_recurrent"] == 0.5
    torch.testing.assert_close(ours[:, :1], stock[:, :1], atol=2e-5, rtol=1e-5)


def test_a_named_backend_serves_the_attention_between():
    _, ours, figures, stock = shared_pass("qwen3_5", awkward_batch(), choice="two_part")
    assert figures["layers_two_part"] == figures["layers_recurrent"] == 0.5
    real = awkward_batch()[1][:, -COMPLETION:].bool()
    torch.testing.assert_close(ours[real], stock[real], atol=2e-5, rtol=1e-5)


def test_a_state_that_runs_on_is_caught(monkeypatch):
    """The recurrent layers of a packed row without their layout: the error that all of this is there to avoid."""
    monkeypatch.setattr("trl_fsdp_qlora.prefix_sharing.packed_model.install_recurrent", lambda model: None)
    with pytest.raises(PrefixSharingError, match="ran 1 times in a forward of 2"):
        shared_pass("qwen3_5", awkward_batch(), choice="cascade")


def test_generation_uses_the_layers_own_forward():
    model, prepared = (build(RECURRENT["qwen3_5"][0]) for _ in range(2))
    PrefixSharing().prepare("policy", prepared)
    ids, mask = awkward_batch()
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids[:, :14], attention_mask=mask[:, :14], **options)
    assert torch.equal(prepared.generate(ids[:, :14], attention_mask=mask[:, :14], **options), expected)


def test_completions_of_similar_length_are_called_together():
    draw = np.random.default_rng(0)
    for size in (0, 1, 5, 40):
        lengths = draw.integers(1, 600, size)
        batches = _similar(lengths)
        assert sorted(np.concatenate([*batches, np.zeros(0, int)])) == list(range(size))
        cost = sum(len(batch) * lengths[batch].max() + _TOKENS_PER_CALL for batch in batches)
        assert cost <= size * lengths.max(initial=_SHORTEST) + _TOKENS_PER_CALL
    assert [list(batch) for batch in _similar(np.array([500, 20, 490, 30]))] == [[0, 2], [1, 3]]
