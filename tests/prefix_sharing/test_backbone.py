"""Calls without TRL's fused head: for logits, a loss, classes, or the backbone's last hidden states."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers as tf
from peft import PrefixTuningConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.tiny import lora
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing import packed_model, row
from trl_fsdp_qlora.prefix_sharing import sharing as sharing_module
from trl_fsdp_qlora.prefix_sharing.attention import cascade
from trl_fsdp_qlora.prefix_sharing.sharing import causal_language_model

from .calls import NO_CACHE, assert_same, awkward, groups, make_batch, padded, weighted, without_labels
from .helpers import (
    FAMILIES,
    assert_equal_gradients,
    build,
    closed,
    counting_padded_forwards,
    gradients,
    small,
    with_stock_head,
)


@pytest.mark.parametrize("has_mask", [True, False])
def test_only_the_kept_positions_are_put_into_their_places(has_mask, monkeypatch):
    """The model's forward passes their number to its backbone, by its mask if it has one."""
    model = share_prompts(build("qwen3").train())
    batch = make_batch(groups, "left") if has_mask else {"input_ids": make_batch(groups, "right")["input_ids"]}
    width = batch["input_ids"].shape[1]
    results = []
    scatter = row.PackedRow.scatter
    monkeypatch.setattr(row.PackedRow, "scatter", lambda self, x: results.append(self.results[1]) or scatter(self, x))
    for kept in (5, 1, 0, 2 * width):
        mask_BK = batch.get("attention_mask", torch.ones(1, width)).bool()[:, -kept:].expand(9, -1)

        def run(model, kept=kept, mask_BK=mask_BK):
            values = model(**without_labels(batch), **NO_CACHE, logits_to_keep=kept).logits
            return [values[mask_BK]], weighted(values, mask_BK)

        model(**without_labels(batch), **NO_CACHE)  # compared
        results.clear()
        assert_same(model, run)
        assert results == [min(kept, width) or width if has_mask else width]


def kept_logits(kept, mask_BL):
    """A function of a model that makes logits of the last `kept` positions, and a number to run backward from."""

    def run(model, batch):
        values = model(**without_labels(batch), **NO_CACHE, logits_to_keep=kept).logits
        return [values[mask_BL[:, -kept:]]], weighted(values, mask_BL[:, -kept:])

    return run


def test_a_hook_of_the_backbone_gets_all_states_in_their_places():
    model = share_prompts(build("qwen3").train())
    batch = make_batch(groups, "left")
    shapes = []
    model.base_model.register_forward_hook(lambda module, given, output: shapes.append(output[0].shape[:2]))
    for kept in (0, 5):
        shapes.clear()
        run = kept_logits(kept, batch["attention_mask"].bool())
        assert_same(model, lambda model, run=run: run(model, batch))
        assert batch["input_ids"].shape == shapes[0] == shapes[-1]


def test_all_but_the_first_positions_may_be_kept():
    """A negative number of `logits_to_keep`, which transformers uses unchanged in a slice."""
    model = share_prompts(build("qwen3").train())
    batch = make_batch(groups, "left")
    run = kept_logits(-3, batch["attention_mask"].bool())
    assert_same(model, lambda model: run(model, batch))


class WithValues(tf.Qwen3ForCausalLM):
    """A forward of the user's own, which makes more of the last hidden states than logits of the kept ones."""

    def forward(self, input_ids, attention_mask=None, logits_to_keep=0, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        logits = self.lm_head(hidden[:, slice(-logits_to_keep, None)])
        return CausalLMOutputWithPast(logits=logits, hidden_states=hidden.sum(-1))


def test_a_users_forward_gets_all_states_in_their_places():
    model = WithValues(build("qwen3").config)
    model.load_state_dict(build("qwen3").state_dict())
    model = share_prompts(model.train())
    batch = make_batch(groups, "left")
    mask_BL = batch["attention_mask"].bool()

    def values(model, kept):
        output = model(**without_labels(batch), **NO_CACHE, logits_to_keep=kept)
        values_BL = output.hidden_states
        return [output.logits[mask_BL[:, -kept:]], values_BL[mask_BL]], weighted(values_BL, mask_BL)

    for kept in (0, 5):
        assert_same(model, functools.partial(values, kept=kept))


def test_threads_do_not_get_each_others_kept_positions():
    model = share_prompts(build("llama").train())
    batch = without_labels(make_batch(groups, "left")) | NO_CACHE
    with torch.no_grad():
        wanted = model(**batch).logits
        with ThreadPoolExecutor(4) as pool:
            kept = [1 + number % 7 for number in range(40)]
            found = list(pool.map(lambda n: torch.no_grad()(model)(**batch, logits_to_keep=n).logits, kept))
    for n, logits in zip(kept, found, strict=True):
        torch.testing.assert_close(logits, wanted[:, -n:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_models_own_loss_and_logits_to_keep(adapter):
    """The head is the model's own, so its loss is; only the positions that are kept are projected."""
    model = build("gemma2").train()
    model = share_prompts(get_peft_model(model, lora()) if adapter else model)
    batch = make_batch(groups, "left")

    def own_loss(model):
        output = model(**batch)
        return [output.loss], output.loss

    def kept(model):
        values = model(**without_labels(batch), logits_to_keep=5).logits
        assert values.shape[1] == 5
        return [values], weighted(values, batch["attention_mask"][:, -5:])

    def kept_in_the_backbone(model):
        """As TRL's DistillationTrainer calls it, which keeps all positions."""
        values = causal_language_model(model).base_model(**without_labels(batch), **NO_CACHE, logits_to_keep=5)
        values = values.last_hidden_state
        mask_BL = batch["attention_mask"].bool()
        return [values[mask_BL]], weighted(values, mask_BL)

    for run in (own_loss, kept, kept_in_the_backbone):
        assert_same(model, run)


def test_no_position_without_a_token_has_a_value():
    model = share_prompts(build("qwen3").train())
    batch = without_labels(make_batch(groups, "mixed"))
    hidden = model.base_model(**batch).last_hidden_state
    is_token = batch["attention_mask"].bool()
    assert not hidden[~is_token].any() and hidden[is_token].any(-1).all()


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3Text", "GptOss"])
def test_a_classifier(family):
    """RewardTrainer's model: a class for each row, from its last token that is no padding."""
    draw = torch.Generator().manual_seed(0)
    batch = without_labels(padded(groups(draw), "right", draw))
    batch["input_ids"].masked_fill_(batch["attention_mask"] == 0, 0)  # the classifier looks for padding here
    config = build({"Qwen3": "qwen3", "Gemma3Text": "gemma3", "GptOss": "gpt_oss"}[family]).config
    config.num_labels = 1
    config.pad_token_id = 0
    torch.manual_seed(0)
    model = share_prompts(getattr(tf, f"{family}ForSequenceClassification")(config).train())

    def run(model):
        values = model(**batch, **NO_CACHE).logits
        return [values], values.pow(2).sum()

    figures = assert_same(model, run)
    assert figures.tokens < 0.4 * figures.padded_tokens


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_routers_loss(family):
    """CPO and ORPO ask for it; transformers computes it from the router logits of every token."""
    model = build(family).train()
    model.config.router_aux_loss_coef = 0.5
    share_prompts(model)
    batch = make_batch(awkward, "mixed")

    def run(model):
        output = model(**batch, output_router_logits=True)
        return [output.loss, output.aux_loss], output.loss

    assert_same(model, run)


def test_a_fused_call_that_runs_as_stock_packs_nothing():
    """TRL's fused head calls the backbone itself."""
    model = share_prompts(with_stock_head(build("llama")).train())
    batch = make_batch()
    wanted = with_stock_head(build("llama"))(**batch, fused_lm_head=True).log_probs
    with closed(model.prompt_sharing):
        assert torch.equal(model(**batch, fused_lm_head=True).log_probs, wanted)
    batch["attention_mask"][0, 1] = 0  # a hole, so the batch cannot be packed
    with counting_padded_forwards(model) as calls:
        model(**batch, fused_lm_head=True)
    assert len(calls) == 1 and not model.prompt_sharing.status.compared


@pytest.mark.parametrize("has_mask", [True, False])
def test_a_later_wrapper_may_take_the_models_own_arguments_alone(has_mask):
    """Packed passes, the comparison with stock and passes as in stock TRL call it."""
    batch = make_batch(groups, "right")
    of_tokens = batch["input_ids"]
    if not has_mask:
        batch["labels"][batch["attention_mask"] == 0] = -100
        batch["attention_mask"] = None
    wanted = with_stock_head(build("llama"))(**batch, fused_lm_head=True).log_probs
    model = share_prompts(with_stock_head(build("llama")).train())
    ours = model.model.forward
    masks = []

    def wrapper(input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, use_cache=None):
        masks.append(attention_mask)
        return ours(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )

    model.model.forward = wrapper
    torch.testing.assert_close(model(**batch, fused_lm_head=True).log_probs, wanted, atol=2e-5, rtol=1e-5)
    assert model.prompt_sharing.status.packs and model.prompt_sharing.figures.tokens
    masks.clear()
    with closed(model.prompt_sharing):
        assert torch.equal(model(**batch, fused_lm_head=True).log_probs, wanted)
    assert len(masks) == 1
    del batch["input_ids"]
    batch["inputs_embeds"] = model.model.embed_tokens(of_tokens)
    assert torch.equal(model(**batch, fused_lm_head=True).log_probs, wanted)
    assert len(masks) == 2


def of_generation():
    return {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def lines_of_sharing(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == sharing_module.__name__]


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_is_the_models_own(use_cache, caplog):
    model, plain = (build("qwen3_5") for _ in range(2))
    share_prompts(model)
    batch = without_labels(make_batch(side="left"))
    model.train()
    ours = model.generate(**batch, **of_generation(), use_cache=use_cache)
    assert torch.equal(ours, plain.generate(**batch, **of_generation(), use_cache=use_cache))
    assert not model.prompt_sharing.status.compared and lines_of_sharing(caplog) == []


REFUSED = {
    "all hidden states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
    "a cache": {"use_cache": True},
    "a tuple": {"return_dict": False},
    "positions": {"position_ids": torch.arange(29).expand(9, -1)},
    "a mask of pairs": {"attention_mask": torch.ones(9, 1, 29, 29, dtype=torch.bool)},
    "lengths": {"cu_seq_lens_q": torch.tensor([0, 29])},
    "holes": {"attention_mask": torch.ones(9, 29).long().index_fill(1, torch.tensor([3]), 0)},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_call_that_asks_for_more_is_the_models_own(kind, caplog):
    changes = REFUSED[kind]
    model, plain = (build("llama").train() for _ in range(2))
    model.set_attn_implementation("eager")
    plain.set_attn_implementation("eager")
    share_prompts(model)
    batch = without_labels(make_batch()) | changes
    for _ in range(2):
        # A model makes its own tuple.
        ours, wanted = ((one.base_model if kind == "a tuple" else one)(**batch)[0] for one in (model, plain))
        assert torch.equal(ours, wanted)
    (line,) = lines_of_sharing(caplog)
    (argument,) = changes
    assert (argument in line or argument == "attention_mask") and not model.prompt_sharing.figures.tokens


def test_embeddings_of_the_callers_own_are_the_models_own(caplog):
    model, plain = (build("llama").train() for _ in range(2))
    share_prompts(model)
    embeddings = plain.get_input_embeddings()(make_batch()["input_ids"]).detach()
    assert torch.equal(model(inputs_embeds=embeddings).logits, plain(inputs_embeds=embeddings).logits)
    assert len(lines_of_sharing(caplog)) == 1 and not model.prompt_sharing.figures.tokens


def test_a_cache_that_a_call_returns_by_default_is_returned(caplog):
    """Outside of training a caller may decode with it; a trainer sets `config.use_cache=False` on its model."""
    batch = without_labels(make_batch(side="left"))
    model = share_prompts(build("llama"))
    with torch.no_grad():
        output = model(**batch)
    assert getattr(output, "cache", None) is not None or output.past_key_values is not None
    assert "config.use_cache=False" in caplog.text and not model.prompt_sharing.figures.tokens
    model.config.use_cache = False
    with torch.no_grad():
        packed = model(**batch)
    is_token = batch["attention_mask"].bool()
    torch.testing.assert_close(packed.logits[is_token], output.logits[is_token], atol=3e-5, rtol=1e-5)
    assert model.prompt_sharing.figures.tokens


def test_the_reason_why_a_model_cannot_be_packed_is_logged(caplog):
    batch = without_labels(make_batch())
    encoder = small("Bert", "ForSequenceClassification", is_decoder=False)
    model = share_prompts(build(encoder).train())
    plain = build(encoder).train()
    assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert len(lines_of_sharing(caplog)) == 1 and not model.prompt_sharing.status.packs
    caplog.clear()
    model, plain = (build("gemma3").train() for _ in range(2))
    for both_ways in (model, plain):
        both_ways.config.use_bidirectional_attention = True
    share_prompts(model)
    assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert len(lines_of_sharing(caplog)) == 1 and not model.prompt_sharing.status.packs
    caplog.clear()
    prompt = PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    model = share_prompts(get_peft_model(build("llama"), prompt))
    assert len(lines_of_sharing(caplog)) == 1 and not model.get_base_model().prompt_sharing.status.packs


def test_rows_without_anything_in_common_run_as_stock(monkeypatch):
    """Nothing is saved, so nothing is packed; and the host waits for the device once."""
    waits = []
    to_host = packed_model.to_host
    monkeypatch.setattr(packed_model, "to_host", lambda tensors: waits.append(1) or to_host(tensors))
    model, plain = (build("llama").train() for _ in range(2))
    share_prompts(model)
    ids = torch.arange(3, 3 + 40).view(4, 10)
    model(input_ids=ids)  # compared
    waits.clear()
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert len(waits) == 1 and not model.prompt_sharing.figures.tokens
    ids = ids[:1].expand(4, -1).contiguous()
    model(input_ids=ids)
    assert len(waits) == 2 and model.prompt_sharing.figures.tokens == 10


def test_a_difference_lets_calls_run_as_stock(monkeypatch):
    monkeypatch.setattr(cascade, "merge", lambda out, lse, ancestor_out, ancestor_lse: out)  # ancestors are not seen
    model, plain = (build("llama").train() for _ in range(2))
    share_prompts(model)
    batch = without_labels(make_batch())
    assert torch.equal(model(**batch).logits, plain(**batch).logits)
    assert not model.prompt_sharing.status.packs


def test_a_difference_in_gradients_alone_lets_calls_run_as_stock(monkeypatch):
    scatter = row.PackedRow.scatter

    def scaled(self, values_N):
        result = scatter(self, values_N)
        return result.detach() + 1.1 * (result - result.detach()) if values_N.ndim == 2 else result

    monkeypatch.setattr(row.PackedRow, "scatter", scaled)
    model = share_prompts(build("llama").train())
    batch = without_labels(make_batch())
    with torch.no_grad():
        model(**batch, **NO_CACHE)
    assert model.prompt_sharing.status.packs  # values are equal
    model(**batch, **NO_CACHE)
    assert not model.prompt_sharing.status.packs


def test_a_copy_calls_itself():
    """SDPO's teacher is a copy of its student."""
    model = share_prompts(build("llama").train())
    batch = without_labels(make_batch())
    before = model(**batch).logits
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.05)
    ours = copied(**batch).logits
    assert copied.prompt_sharing.figures.tokens and copied.prompt_sharing is not model.prompt_sharing
    share_prompts(copied, attention="off")
    is_token = batch["attention_mask"].bool()
    torch.testing.assert_close(ours[is_token], copied(**batch).logits[is_token], atol=3e-5, rtol=1e-5)
    assert (ours - before).abs().max() > 1e-3
    assert torch.equal(model(**batch).logits, before)


def test_a_checkpoint_around_a_call():
    """It sees only what the call itself saves, and not what the comparison of the first call saves."""
    model = share_prompts(build("llama").train())
    batch = without_labels(make_batch())
    mask_BL = batch["attention_mask"].bool()

    def run(model):
        return model.base_model(**batch, **NO_CACHE).last_hidden_state

    weighted(checkpoint(run, model, use_reentrant=False), mask_BL).backward()
    ours = gradients(model)
    assert model.prompt_sharing.status.packs and model.prompt_sharing.status.compared
    weighted(run(model), mask_BL).backward()
    assert_equal_gradients(ours, gradients(model), tolerance=1e-7)


def test_a_call_that_was_compared_is_read_once(monkeypatch):
    """Of a model that could see, too, although no call with images has been compared."""
    model = share_prompts(build(FAMILIES["gemma3 (images)"]).train())
    batch = without_labels(make_batch())
    model(**batch, **NO_CACHE)
    reads = []
    to_host = packed_model.to_host
    monkeypatch.setattr(packed_model, "to_host", lambda tensors: reads.append(tensors) or to_host(tensors))
    model(**batch, **NO_CACHE)
    assert len(reads) == 1 and model.prompt_sharing.figures.tokens
    with closed(model.prompt_sharing):
        model(**batch, **NO_CACHE)
    assert not model.prompt_sharing.figures.tokens  # it ran as in stock TRL


def test_off_gives_the_backbone_its_forward_back():
    model = build("llama").train()
    share_prompts(model)
    assert "forward" in vars(model.base_model)
    share_prompts(model, attention="off")
    assert "forward" not in vars(model.base_model) and not hasattr(model.base_model, "prompt_sharing")
    wrapped = lambda *args, **kwargs: type(model.base_model).forward(model.base_model, *args, **kwargs)  # noqa: E731
    model.base_model.forward = wrapped
    share_prompts(model)
    model(input_ids=torch.arange(3, 13).expand(4, -1))
    assert model.prompt_sharing.figures.tokens
    share_prompts(model, attention="off")
    assert model.base_model.forward is wrapped


@pytest.mark.exhaustive
def test_a_compiled_model_keeps_the_last_positions():
    """Its mask carries their number to the backbone, through code that was compiled."""
    torch._dynamo.reset()
    model = share_prompts(build("llama").train())
    compiled = torch.compile(model, backend="eager")
    for side, kept in (("right", 0), ("left", 7), ("right", 7)):
        batch = make_batch(groups, side)
        is_token = batch["attention_mask"].bool()[:, -kept:]
        with closed(model.prompt_sharing):
            stock = model(**without_labels(batch), **NO_CACHE, logits_to_keep=kept).logits
        ours = compiled(**without_labels(batch), **NO_CACHE, logits_to_keep=kept).logits
        assert model.prompt_sharing.figures.tokens
        torch.testing.assert_close(ours[is_token], stock[is_token], atol=3e-5, rtol=1e-5)
    torch._dynamo.reset()
