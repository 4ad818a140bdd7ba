"""`share_prompts(model)`: fused calls compared with stock TRL's, for rows of any kind and models in any wrapper."""

import copy
import logging
from contextlib import contextmanager

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.neftune import activate_neftune
from trl.trainer.utils import add_fused_lm_head

from tests.tiny import lora
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing import PrefixSharingError, row
from trl_fsdp_qlora.prefix_sharing import sharing as sharing_module
from trl_fsdp_qlora.prefix_sharing.attention import cascade, two_part
from trl_fsdp_qlora.prefix_sharing.recurrent.known_layers import recurrent_layers
from trl_fsdp_qlora.prefix_sharing.sharing import SharingOptions, install_sharing
from trl_fsdp_qlora.prefix_sharing.status import PassType

from .calls import (
    FIELDS,
    assert_equal_outputs,
    assert_shares,
    awkward,
    call,
    groups,
    make_batch,
    padded,
    random_tokens,
)
from .helpers import (
    FAMILIES,
    VOCABULARY,
    build,
    closed,
    counting_levels,
    counting_padded_forwards,
    with_stock_head,
)


def test_a_filled_up_completion_costs_no_call_of_a_layer(monkeypatch):
    """The last completion was longer than the others by what fills the row up, and was computed in a call of its own:
    Qwen3.5 launched 1.6 times as many kernels as stock.
    """
    draw = torch.Generator().manual_seed(0)
    prompt = random_tokens(12, draw)
    rows = [(torch.cat([prompt, random_tokens(9, draw)]), [*range(12, 21)]) for _ in range(8)]
    sizes = {}
    for multiple in (1, 64):
        monkeypatch.setattr(row, "row_multiple", lambda device, multiple=multiple: multiple)
        model = with_stock_head(build(FAMILIES["qwen3_5"]))
        share_prompts(model)
        model.prompt_sharing.status.compared.add(PassType(False, False))
        sizes[multiple] = []
        for layer in recurrent_layers(model.prompt_sharing.base):
            original = layer.own_forward

            def own_forward(hidden_states, *args, original=original, seen=sizes[multiple], **kwargs):
                seen.append(hidden_states.shape[:2])
                return original(hidden_states, *args, **kwargs)

            layer.own_forward = own_forward
        with torch.no_grad():
            call(model, padded(rows, "right", draw))
        assert (model.prompt_sharing.figures.tokens % 64 == 0) == (multiple == 64)
    assert sizes[64] == sizes[1] and len(sizes[1]) >= 2


def test_the_router_loss_counts_no_token_that_fills_a_row_up(monkeypatch):
    monkeypatch.setattr(row, "row_multiple", lambda device: 64)
    model = with_stock_head(build("qwen3_moe"))
    model.config.router_aux_loss_coef = 0.5
    share_prompts(model)
    for make_rows in (groups, awkward):
        figures = assert_shares(model, make_batch(make_rows, "mixed"), may_run_padded=True, output_router_logits=True)
        assert figures.tokens > 0 and figures.tokens % 64 == 0


class Rows(TorchDispatchMode):
    """While entered, the rows of each embedding's, product's and activation's output: what a layer allocates."""

    ASKING = (torch.ops.aten.embedding, torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.silu)

    def __init__(self):
        super().__init__()
        self.counts = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in self.ASKING:
            self.counts.append(out.numel() // out.shape[-1])
        return out


def test_an_allocator_is_asked_for_few_sizes(monkeypatch):
    """In ten steps with groups of random lengths: an allocator that keeps blocks by size finds them again."""
    model = with_stock_head(build("llama"))
    share_prompts(model)
    model.prompt_sharing.status.compared.add(PassType(False, False))
    by_multiple = {}
    for multiple in (1, 64):
        monkeypatch.setattr(row, "row_multiple", lambda device, multiple=multiple: multiple)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad(), Rows() as rows:
            for _ in range(10):
                prompt = random_tokens(100, draw)
                lengths = torch.randint(10, 30, (8,), generator=draw).tolist()
                batch = [torch.cat([prompt, random_tokens(length, draw)]) for length in lengths]
                call(model, padded([(row, [*range(100, len(row))]) for row in batch], "right", draw))
        by_multiple[multiple] = rows.counts
    assert len(by_multiple[1]) == len(by_multiple[64]) > 100
    assert all(count % 64 == 0 for count in by_multiple[64])
    different = {multiple: set(sizes) for multiple, sizes in by_multiple.items()}
    assert len(different[64]) <= 4 < 15 < len(different[1]), different


def test_the_tokens_that_are_computed():
    """Three levels: what all rows begin with, three prompts, nine completions without their last tokens."""
    model = with_stock_head(build("llama"))
    share_prompts(model)
    for side in ("right", "left", "mixed"):
        with counting_levels() as levels, torch.no_grad():
            call(model, make_batch(groups, side))
        figures = model.prompt_sharing.figures
        assert levels[-1] == [12, 4 + 5 + 6, 3 * (4 + 6 + 8)]
        assert (figures.tokens, figures.padded_tokens) == (81, 9 * 29)


@pytest.mark.parametrize("outputs", [("log_probs",), ("entropy",), FIELDS, ("log_sum_sq_probs", "is_top1")])
def test_every_field_that_was_asked_for(outputs):
    model = build("gemma2")  # with a softcap
    add_fused_lm_head(model, 0.7, outputs=outputs)
    share_prompts(model)
    assert_shares(model, make_batch(awkward, "mixed"))
    half = make_batch(awkward, "mixed")
    assert_shares(model, half, num_items_in_batch=torch.tensor(7.0))


def test_a_head_in_float32_equals_stock():
    model = build("llama").bfloat16()
    add_fused_lm_head(model, 0.9, cast_lm_head_to_fp32=True)
    share_prompts(model)
    batch = make_batch()
    ours = call(model, batch).log_probs
    assert model.prompt_sharing.figures.tokens and ours.dtype == torch.float32
    with closed(model.prompt_sharing):
        stock = call(model, batch).log_probs
    # Rounding of bfloat16 in what comes before the head.
    assert (ours - stock).abs().mean() < 0.1


@pytest.mark.parametrize("source", ["argument", "config"])
def test_the_router_loss(source):
    """It counts every token of the batch, so every token is computed."""
    model = with_stock_head(build("qwen3_moe"))
    model.config.router_aux_loss_coef = 0.5
    model.config.output_router_logits = source == "config"
    share_prompts(model)
    figures = assert_shares(
        model, make_batch(awkward, "mixed"), **({"output_router_logits": True} if source == "argument" else {})
    )
    assert figures.tokens > assert_shares(model, make_batch(groups)).tokens / 2
    output = call(model, make_batch(awkward), output_router_logits=True)
    assert output.aux_loss > 0


def test_no_labels_and_no_mask():
    model = with_stock_head(build("qwen3"))
    share_prompts(model)
    call(model, make_batch())
    batch = make_batch()
    batch["labels"][:] = -100
    output = call(model, batch)
    assert output.loss == 0 and not output.log_probs.any() and model.prompt_sharing.figures.tokens == 1
    output.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    model.zero_grad()
    whole = torch.randint(3, VOCABULARY, (4, 17))
    whole[:, :9] = whole[0, :9]
    figures = assert_shares(model, {"input_ids": whole, "labels": whole.clone()})
    assert figures.tokens == 9 + 4 * 7


def test_share_prompts_twice_and_off_and_on_again():
    model = with_stock_head(build("llama"))
    before = model.forward
    batch = make_batch()
    assert share_prompts(model) is model
    once = model.forward
    assert share_prompts(model).forward is once and once is not before
    call(model, batch)
    assert model.prompt_sharing.figures.tokens
    share_prompts(model, attention="off")
    assert model.forward == before and not hasattr(model, "prompt_sharing")
    with counting_padded_forwards(model) as calls:
        off = call(model, batch)
    assert len(calls) == 1
    share_prompts(model, attention="two_part")
    on = call(model, batch)
    assert set(model.prompt_sharing.figures.layer_calls) == {"two_part"}
    assert_equal_outputs(on, off, batch["labels"])
    with pytest.raises(PrefixSharingError, match="auto, off, cascade, two_part"):
        share_prompts(model, attention="fast")


def test_other_calls_are_the_models_own():
    model, plain = (build("qwen3_5") for _ in range(2))
    share_prompts(model)
    batch = make_batch(side="left")
    with counting_padded_forwards(model) as calls:
        ours = model(**batch)
    assert len(calls) == 1 and torch.equal(ours.logits, plain(**batch).logits)
    torch.testing.assert_close(ours.loss, plain(**batch).loss)
    prompts = {name: x[:, :16] for name, x in batch.items() if name != "labels"}
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(**prompts, **settings), plain.generate(**prompts, **settings))


def test_a_model_without_trls_head_gets_one():
    model, reference = (build("llama") for _ in range(2))
    share_prompts(model, temperature=0.8, outputs=FIELDS)
    add_fused_lm_head(reference, 0.8, outputs=FIELDS)
    batch = make_batch(awkward, "mixed")
    assert_equal_outputs(call(model, batch), call(reference, batch), batch["labels"])
    assert model.prompt_sharing.figures.tokens


def test_a_head_that_a_trainer_adds_later_is_used():
    """A trainer that is made after `share_prompts` puts TRL's head on: what it asks for is what it gets."""
    model, reference = (build("llama") for _ in range(2))
    share_prompts(model)
    for one in (model, reference):
        add_fused_lm_head(one, 0.6, outputs=("log_probs", "is_top1"))
    batch = make_batch(awkward, "mixed")
    wanted = call(reference, batch)
    assert_equal_outputs(call(model, batch), wanted, batch["labels"])
    share_prompts(model)
    assert_equal_outputs(call(model, batch), wanted, batch["labels"])
    assert model.prompt_sharing.figures.tokens


@pytest.mark.parametrize("order", ["before", "after"])
def test_adapters(order):
    torch.manual_seed(0)
    model = build("qwen3")
    if order == "before":
        share_prompts(with_stock_head(model))
    model = get_peft_model(with_stock_head(model) if order == "after" else model, lora())
    if order == "after":
        share_prompts(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    figures = assert_shares(model, make_batch(awkward, "mixed"))
    with model.disable_adapter(), torch.no_grad():
        off = call(model, make_batch(awkward, "mixed"))
    sharing = model.get_base_model().prompt_sharing
    assert sharing.figures.tokens == figures.tokens
    with closed(sharing), model.disable_adapter(), torch.no_grad():
        stock = call(model, make_batch(awkward, "mixed"))
    assert_equal_outputs(off, stock, make_batch(awkward, "mixed")["labels"])


@pytest.fixture
def fresh_accelerator():
    """Another precision than that of the tests before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_mixed_precision_is_as_near_to_float32_as_stock(order):
    """Accelerate wraps the forward in autocast: the packed one runs inside of it, in either order."""
    batch = make_batch(awkward, "mixed")
    results = {}
    exact = call(with_stock_head(build("qwen3")), batch).log_probs
    for name in ("stock", "ours"):
        model = with_stock_head(build("qwen3"))
        if name == "ours" and order != "after":
            share_prompts(model)
        seen = []
        model.model.layers[0].mlp.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out.dtype))
        prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare_model(model)
        if name == "ours" and order != "before":
            share_prompts(prepared)
        output = call(prepared, batch)
        assert set(seen) == {torch.bfloat16}, seen
        assert output.log_probs.dtype == torch.float32
        results[name] = (output.log_probs - exact).abs().mean()
        if name == "ours":
            assert model.prompt_sharing.status.packs and model.prompt_sharing.figures.tokens
    assert 0 < results["ours"] <= 1.5 * results["stock"]


def positions(batch):
    return {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def shifted(batch):
    labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return {"shift_labels": labels.contiguous()}


UNKNOWN = {"position_ids": positions, "shift_labels": shifted, "inputs_embeds": None, "a mask of pairs": None}


@pytest.mark.parametrize("name", UNKNOWN)
def test_calls_with_unknown_arguments_run_as_stock(name, caplog):
    model = with_stock_head(build("llama"))
    reference = with_stock_head(build("llama"))
    share_prompts(model)
    batch = make_batch(awkward, "mixed")
    call(model, batch)
    if name == "inputs_embeds":
        arguments = {"inputs_embeds": reference.get_input_embeddings()(batch["input_ids"]).detach(), **batch}
        del arguments["input_ids"]
    elif name == "a mask of pairs":
        causal = torch.ones(29, 29).tril().bool()[: batch["input_ids"].shape[1], : batch["input_ids"].shape[1]]
        arguments = {**batch, "attention_mask": causal.expand(len(batch["input_ids"]), 1, *causal.shape)}
    else:
        arguments = {**batch, **UNKNOWN[name](batch)}
    with caplog.at_level(logging.WARNING), counting_forwards(model) as calls:
        outputs = [call(model, arguments) for _ in range(2)]
    assert len(calls) == 2 and not model.prompt_sharing.figures.tokens
    assert torch.equal(outputs[0].log_probs, call(reference, arguments).log_probs)
    assert len([record for record in caplog.records if record.name == sharing_module.__name__]) == 1
    if "input_ids" in arguments:  # which part of the argument belongs to a row is not known
        whole = call(model, {**arguments, "tokens_per_pass": 2 * batch["input_ids"].shape[1]})
        assert torch.equal(whole.log_probs, outputs[0].log_probs)
    share_prompts(model, attention="cascade")
    with pytest.raises(PrefixSharingError, match="prefix_sharing='auto'"):
        call(model, arguments)


@contextmanager
def counting_forwards(model):
    """A list that gets an entry for each forward of the backbone, with any arguments."""
    calls = []
    handle = model.base_model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def test_a_model_of_another_kind_is_left_alone(caplog):
    """Not transformers': there is no head to put on it, and nothing breaks."""
    model = torch.nn.Linear(2, 2)
    share_prompts(model)
    (message,) = caplog.messages
    assert "Linear" in message and model(torch.zeros(1, 2)).shape == (1, 2)
    with pytest.raises(PrefixSharingError, match="Linear"):
        share_prompts(torch.nn.Linear(2, 2), attention="cascade")


def test_the_first_pass_is_compared_and_a_wrong_one_is_not_taken(monkeypatch):
    model = with_stock_head(build("llama"))
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + 0.3 * x.roll(1, dims=1))  # it mixes neighbours in the row
    batch = make_batch(awkward, "right")
    expected = call(model, batch)
    share_prompts(model)
    assert torch.equal(call(model, batch).log_probs, expected.log_probs)
    assert not model.prompt_sharing.status.packs


def test_a_backend_named_later_raises_like_one_named_first():
    """Passes had run as in stock TRL since `auto` found a difference, and a named backend was not used either."""
    model = with_stock_head(build("llama"))
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x + 0.3 * x.roll(1, dims=1))  # it mixes neighbours in the row
    batch = make_batch(awkward, "right")
    share_prompts(model)
    call(model, batch)
    assert not model.prompt_sharing.status.packs
    share_prompts(model, attention="cascade")
    for _ in range(2):  # a notebook's cell that runs again
        with pytest.raises(PrefixSharingError):
            call(model, batch)


def test_each_backend_is_compared(monkeypatch):
    """The verdict on `cascade`, which `auto` had used, served for `two_part` as well."""
    model = share_prompts(with_stock_head(build("llama")))
    batch = make_batch(awkward, "right")
    call(model, batch)
    assert model.prompt_sharing.figures.tokens
    attend = two_part.attend
    monkeypatch.setattr(two_part, "attend", lambda layer: 1.1 * attend(layer))
    share_prompts(model, attention="two_part")
    with pytest.raises(PrefixSharingError):
        call(model, batch)


def test_noise_on_the_embeddings_is_that_of_the_padded_rows():
    """NEFTune's noise gets smaller as rows get longer, and a packed row is longer. A trainer adds it when it begins to
    train, perhaps after an evaluation in which the packed row was found exact.
    """
    model = share_prompts(with_stock_head(build("llama")))
    sharing = model.prompt_sharing
    batch = make_batch()
    call(model.eval(), batch)
    assert sharing.figures.tokens > 0
    activate_neftune(model, 5.0)
    model.train()
    torch.manual_seed(0)
    ours = call(model, batch)
    with closed(sharing):
        torch.manual_seed(0)
        stock = call(model, batch)
    assert torch.equal(ours.log_probs, stock.log_probs) and not sharing.figures.tokens


def test_a_copy_of_a_model_calls_itself():
    """A copy (a reference model) calls itself, and not the model that it was copied from."""
    model = with_stock_head(build("llama"))
    share_prompts(model)
    batch = make_batch()
    call(model, batch)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.05)
    ours = call(copied, batch)
    install_sharing(copied, SharingOptions(attention="off"))
    assert_equal_outputs(ours, call(copied, batch), batch["labels"])
    assert (ours.log_probs - call(model, batch).log_probs).abs().max() > 1e-3


def test_rows_that_begin_alike_are_compared_in_any_order(monkeypatch):
    """In a batch of pairs, all chosen and then all rejected, the first and the last rows have nothing in common."""
    monkeypatch.setattr(cascade, "merge", lambda out, lse, ancestor_out, ancestor_lse: out)  # ancestors are not seen
    model = share_prompts(build("llama"))
    prompts = [torch.arange(3 + i, 23 + i) for i in range(0, 32, 4)]
    draw = torch.Generator().manual_seed(0)
    rows = [torch.cat([prompt, torch.randint(3, 60, (6,), generator=draw)]) for prompt in prompts * 2]
    ids = torch.stack(rows)
    labels = ids.clone()
    labels[:, :20] = -100
    model(input_ids=ids, labels=labels, fused_lm_head=True)
    assert not model.prompt_sharing.status.packs
