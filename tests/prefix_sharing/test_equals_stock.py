"""What a packed pass returns equals what the padded one does, gradients too: every family in each way to call a model.

Covers `prefix_sharing/status.py`, `prefix_sharing/recurrent/layers.py`.
"""

import pytest
import torch

from tests.tiny import these_first
from trl_fsdp_qlora import share_prompts, verify
from trl_fsdp_qlora.prefix_sharing import PrefixSharingError, row
from trl_fsdp_qlora.prefix_sharing.status import CannotPack, PassType

from .calls import NO_CACHE, assert_same, assert_shares, awkward, groups, make_batch, weighted, without_labels
from .helpers import (
    COMPLETION,
    COUNTING,
    FAMILIES,
    RECURRENT,
    SUPPORTED,
    assert_equals_stock,
    awkward_batch,
    build,
    completion_labels,
    counting_levels,
    one_pass,
    prepared,
    small,
    with_stock_head,
)
from .helpers import make_batch as make_batch_of_groups

# One recurrent model of each kind: gated delta rule, short convolution, state space model.
KINDS = ("qwen3_5", "lfm2", "falcon_h1")
# What "auto" computes each layer by.
LAYERS = {name: ["cascade"] * 2 for name in SUPPORTED} | {
    "qwen3_sliding": ["cascade", "two_part"],
    "gemma2": ["two_part"] * 2,
    "gemma3": ["two_part", "cascade"],
    "mistral_sliding": ["two_part"] * 2,
    "gpt_oss": ["two_part"] * 2,
    **{name: layers for name, (_, layers) in RECURRENT.items()},
}
BATCHES = [(make_rows, side) for make_rows in (groups, awkward) for side in ("right", "left", "mixed")]


def sees_columns(name: str) -> bool:
    """Whether the same tokens in other columns are another row to a model."""
    return name.removesuffix(" (images)") in COUNTING


def fused_calls(name, monkeypatch):
    """All fields that TRL's fused head returns, and gradients of the loss, log-probabilities and entropies."""
    model = share_prompts(with_stock_head(build(FAMILIES[name])))
    for make_rows, side in BATCHES:
        with counting_levels() as levels:
            figures = assert_shares(model, make_batch(make_rows, side))
        if make_rows is groups and (side == "right" or not sees_columns(name)):
            assert len(levels[-1]) >= 2, (side, figures)


def filled_up_rows(name, monkeypatch):
    """As on CUDA: the last leaf is longer, and nothing is read there."""
    monkeypatch.setattr(row, "row_multiple", lambda device: 64)
    model = share_prompts(with_stock_head(build(FAMILIES[name])))
    for make_rows in (groups, awkward):
        figures = assert_shares(model, make_batch(make_rows, "right"), may_run_padded=True)
        assert figures.tokens == 0 or figures.tokens % 64 == 0


def of_logits(batch, **arguments):
    """A function of a model for [`calls.assert_same`]."""
    mask_BL = batch["attention_mask"].bool()

    def run(model):
        values = model(**without_labels(batch), **arguments).logits
        return [values[mask_BL]], weighted(values, mask_BL)

    return run


def of_hidden_states(batch):
    """As [`of_logits`], of the backbone."""
    mask_BL = batch["attention_mask"].bool()

    def run(model):
        values = model.base_model(**without_labels(batch), **NO_CACHE).last_hidden_state
        return [values[mask_BL]], weighted(values, mask_BL)

    return run


def without_a_head(name, run_of):
    """Calls that return a value of each token."""
    model = share_prompts(build(FAMILIES[name]).train())
    for make_rows, side in BATCHES:
        batch = make_batch(make_rows, "right" if name in COUNTING else side)
        with counting_levels() as levels:
            assert_same(model, run_of(batch))
        # To some models rows in other columns are other rows, so there may be nothing to save.
        assert make_rows is awkward or len(levels[-1]) >= 2
        assert model.prompt_sharing.status.compared == {PassType(g, False, True) for g in (False, True)}


def hidden_states(name, monkeypatch):
    without_a_head(name, of_hidden_states)


def logits(name, monkeypatch):
    without_a_head(name, lambda batch: of_logits(batch, **NO_CACHE))


def logits_of_filled_up_rows(name, monkeypatch):
    monkeypatch.setattr(row, "row_multiple", lambda device: 64)
    model = share_prompts(build(FAMILIES[name]).train())
    assert assert_same(model, of_logits(make_batch(groups, "mixed"))).tokens % 64 == 0


def each_backend(name, monkeypatch):
    """What "auto" computes each layer by, and each backend that is named and computes some layer otherwise."""
    model = build(name)
    kinds = LAYERS[name]
    sharing = prepared(model, compared=True)
    figures = assert_equals_stock(model, sharing).metrics("pass")
    assert {kind: kinds.count(kind) / len(kinds) for kind in kinds} == {
        key.removeprefix("pass/layers_"): value for key, value in figures.items() if "/layers_" in key
    }
    with torch.no_grad():
        automatic = one_pass(model, sharing).logps_BC
    for backend in ("cascade", "two_part"):
        prepared(model, backend, compared=True)
        if backend == "cascade" and "two_part" in kinds:
            with pytest.raises(CannotPack):
                one_pass(model, sharing)
        elif {*kinds} <= {backend, "recurrent"}:  # the same computation
            with torch.no_grad():
                named = one_pass(model, sharing)
            assert named.figures.tokens and torch.equal(named.logps_BC, automatic)
        else:
            assert_equals_stock(model, sharing)


def verified(name, monkeypatch):
    """The comparison with stock finds no difference in any batch, for scores and for hidden states."""
    model = share_prompts(build(FAMILIES[name]).train())
    for make_rows, side in BATCHES:
        batch = make_batch(make_rows, "right" if name in COUNTING else side)
        assert verify(model, batch) == [] and verify(model, without_labels(batch) | NO_CACHE) == []


# One of each kind: attention alone, capped, with sinks, recurrences, positions of the model's own, a class that sees.
FAST = ("llama", "gemma2", "gpt_oss", "qwen3_5", "mamba2", "opt", "gemma3 (images)")
BUT_OPT = [name for name in FAMILIES if name != "opt"]  # its forward calls the decoder inside of its backbone
# An equality -> the models that have it, and those of them that `make test` runs.
EQUALITIES = {
    fused_calls: (FAMILIES, FAST),
    filled_up_rows: (FAST, ("llama", "gemma2", "qwen3_5", "mamba2")),
    hidden_states: (FAMILIES, FAST),
    # Logits are the model's own product of hidden states.
    logits: (BUT_OPT, ("gemma2", "qwen3_5", "gemma3 (images)")),
    logits_of_filled_up_rows: (("llama", "qwen3_5"), ("llama", "qwen3_5")),
    each_backend: (LAYERS, LAYERS),
    verified: (BUT_OPT, ()),  # test_verify.py has one batch
}
CASES = [(equality, name) for equality, (models, _) in EQUALITIES.items() for name in models]
OFTEN = [(equality, name) for equality, (_, often) in EQUALITIES.items() for name in often]


@pytest.mark.parametrize(("equality", "name"), these_first(CASES, *OFTEN))
def test_equal(equality, name, monkeypatch):
    equality(name, monkeypatch)


def test_what_does_not_ask_for_a_packed_row_is_untouched():
    """Padded passes, and generation by a decoder with windows; one with states is in test_sharing.py."""
    model, ours = (build("mistral_sliding") for _ in range(2))
    ids, mask = awkward_batch()
    prepared(ours)
    assert torch.equal(ours(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
    arguments = {"attention_mask": mask[:, :14], "max_new_tokens": 12, "do_sample": False}
    assert torch.equal(ours.generate(ids[:, :14], **arguments), model.generate(ids[:, :14], **arguments))


@pytest.mark.parametrize("name", ["qwen3", *KINDS])
def test_selected_tokens_and_rows_cut_inside_groups(name):
    """As an old policy's pass is cut, which stays within the tokens that stock holds at once."""
    batch = awkward_batch()
    model = build(name)
    draw = torch.Generator().manual_seed(2)
    scored = (torch.rand(len(batch[0]), COMPLETION, generator=draw) < 0.4) & batch[1][:, -COMPLETION:].bool()
    sharing = prepared(model, compared=True)
    seen = []
    budget = 2 * batch[0].shape[1]

    def look(_module, _args, arguments):
        seen.append(arguments["input_ids"].numel())

    model.base_model.register_forward_pre_hook(look, with_kwargs=True)
    assert_equals_stock(model, sharing, batch, scored_BC=scored, tokens_per_pass=budget)
    assert len(seen) > 2 and max(seen[1:]) <= budget


def test_recurrent_layers_branch_at_every_level():
    """T-SPMO's completions begin alike: a state continues from their parting; it is not kept at every token."""
    batch = make_batch_of_groups([12] * 4, [9] * 4)
    model = build("qwen3_5")
    batch[0][:, -COMPLETION:-2] = batch[0][0, -COMPLETION:-2]
    with counting_levels() as levels:
        figures = assert_equals_stock(model, prepared(model), batch)
    # What four rows have in common is their prompt and seven tokens; the last of the others is only ever a target.
    assert (figures.tokens, levels[-1]) == (12 + 7 + 4, [19, 4])
    # Prompts of two groups that begin alike, and completions of one of them that do: three levels.
    ids, mask = make_batch_of_groups([14] * 6, [9] * 6)
    ids[3:, 11:14] += 1
    ids[:3, 14:22] = ids[0, 14:22]
    ids[2, 20] += 1
    with counting_levels() as levels:
        figures = assert_equals_stock(model, prepared(model), (ids, mask))
    assert len(levels[-1]) >= 2 and set(figures.layer_calls) == {"recurrent", "cascade"}


def test_one_token_completions():
    """One token behind a state would be a decoding step: kernels that write into the state and have no backward."""
    model = build("falcon_h1")
    assert_equals_stock(model, batch=make_batch_of_groups([12] * 4, [1] * 4))
    # Behind the prompt each row computes one token and predicts another one.
    assert_equals_stock(model, batch=make_batch_of_groups([12] * 4, [2] * 4))


def test_a_state_that_runs_on_is_caught(monkeypatch):
    """The recurrent layers of a packed row without the row: the error that all of this is there to avoid."""
    monkeypatch.setattr("trl_fsdp_qlora.prefix_sharing.recurrent.layers.install", lambda model: None)
    model = build("qwen3_5")
    with pytest.raises(PrefixSharingError):
        one_pass(model, prepared(model, "cascade"))


# Lengths, groups and scored tokens all differ.
DIFFERENT = [
    ([14, 14, 9, 9, 9], [9, 4, 6, 6, 6]),
    ([8, 8, 8, 8], [3, 2, 7, 9]),
    ([12, 11, 11], [5, 9, 1]),
    ([7, 7, 6, 6, 5], [9, 9, 8, 2, 4]),
]


@pytest.mark.exhaustive  # torch compiles for ten seconds
def test_new_batches_are_not_compiled_anew():
    """A packed row's layout and the scoring of its tokens stay out of the graphs."""
    model = build(small("Llama", num_hidden_layers=1))  # a compiler takes seconds for each layer
    graphs = []
    counts = []
    sharing = prepared(model, compared=True)
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for lengths in DIFFERENT:
        ids, mask = make_batch_of_groups(*lengths)
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": completion_labels(ids, mask)}
        ours = compiled(**inputs, fused_lm_head=True).log_probs
        assert sharing.figures.layer_calls == ["cascade"]  # counted, also inside a compiled model
        torch.testing.assert_close(ours, model(**inputs, fused_lm_head=True).log_probs, atol=1e-5, rtol=1e-5)
        counts.append(len(graphs))
    torch._dynamo.reset()
    # The second batch shows which sizes change; from then on the graphs serve every batch.
    assert counts[0] and counts[2:] == [counts[2]] * len(counts[2:]), counts
