"""Models and batches that cannot be packed exactly run padded, and the log has the reason.

Covers `prefix_sharing/dropout.py`.
"""

import functools
import logging
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing import PrefixSharingError
from trl_fsdp_qlora.prefix_sharing import sharing as sharing_module
from trl_fsdp_qlora.prefix_sharing.batch import Batch
from trl_fsdp_qlora.prefix_sharing.dropout import attention_reason, draws, without_dropout
from trl_fsdp_qlora.prefix_sharing.facts import position_limit
from trl_fsdp_qlora.prefix_sharing.status import CannotPack, Scope

from .helpers import (
    COMPLETION,
    MULTIMODAL,
    SUPPORTED,
    UNSUPPORTED,
    assert_equal_gradients,
    assert_equals_stock,
    awkward_batch,
    build,
    closed,
    completion_labels,
    gradients,
    one_pass,
    prepared,
    small,
    stock_log_probs,
    with_stock_head,
)


@pytest.mark.parametrize("name", [*UNSUPPORTED, "gpt2"])
def test_unsupported_models_run_padded_and_the_reason_is_logged(name, caplog):
    """GPT-2 has dropout of attention's weights, and draws the masks that it draws in stock."""
    ids, mask = awkward_batch()
    results = []
    with caplog.at_level(logging.WARNING, logger=sharing_module.__name__):
        for shares in (False, True):
            model = with_stock_head(build((UNSUPPORTED | DRAWING)[name])).train()
            if shares:
                share_prompts(model)
            torch.manual_seed(1)
            log_probs, _ = stock_log_probs(model, ids, mask)
            log_probs.sum().backward()
            results.append((log_probs, gradients(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert_equal_gradients(results[1][1], results[0][1], tolerance=1e-6)
    lines = [record.getMessage() for record in caplog.records if record.name == sharing_module.__name__]
    assert len(lines) == 1 and not model.prompt_sharing.status.packs


@pytest.mark.parametrize("name", [*UNSUPPORTED, "mistral_sliding"])
def test_a_named_backend_refuses_a_model_that_cannot_be_packed(name):
    model = build((SUPPORTED | UNSUPPORTED)[name])
    with pytest.raises(PrefixSharingError):
        one_pass(model, prepared(model, "cascade"))


def test_layers_that_do_not_run_are_counted():
    model = build("llama")

    def without_the_row(forward, *args, attention_mask, **kwargs):
        return forward(*args, attention_mask=None, **kwargs)

    for layer in model.model.layers:
        layer.self_attn.forward = functools.partial(without_the_row, layer.self_attn.forward)
    sharing = prepared(model)
    ours = one_pass(model, sharing)
    ids, mask = awkward_batch()
    assert not sharing.status.packs and torch.equal(ours.logps_BC, stock_log_probs(model, ids, mask)[0])
    with pytest.raises(CannotPack):  # before anything is compared
        prepared(model, compared=True).packed_model.run_alone(Batch(ids, mask, completion_labels(ids, mask)))


def test_the_comparison_ignores_dropout_and_restores_modes():
    model = build("llama")
    mlp = model.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Dropout(0.5))
    model.train()
    model.model.layers[1].eval()
    sharing = prepared(model)
    one_pass(model, sharing)
    assert sharing.status.packs
    assert model.training and model.model.layers[0].training and not model.model.layers[1].training


def hole():
    ids, mask = awkward_batch()
    mask[0, -COMPLETION + 2] = 0
    return build("llama"), (ids, mask)


def longrope(switch=16):
    """Padding decides which rotary table stock uses."""
    config = build("phi3").config.to_dict() | {"original_max_position_embeddings": switch}
    config = tf.Phi3Config(**config)
    table = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4, "rope_type": "longrope"}
    config.rope_parameters = table | {"original_max_position_embeddings": switch}
    return build(lambda: tf.Phi3ForCausalLM(config)), awkward_batch()


@pytest.mark.parametrize("make", [hole, longrope])
def test_batches_that_cannot_be_packed_run_padded(make, caplog):
    model, batch = make()
    sharing = prepared(model)
    ours = one_pass(model, sharing, batch)
    assert not ours.figures.tokens and ours.padded_forwards == 1
    with closed(sharing):
        assert torch.equal(ours.logps_BC, stock_log_probs(model, *batch)[0])
    assert [record.name for record in caplog.records] == [sharing_module.__name__]
    assert sharing.status.packs  # the next batch is packed again


def test_rotary_tables_that_depend_on_the_longest_position():
    assert_equals_stock(longrope(switch=40)[0])
    default = {"rope_type": "default"}
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    config = tf.LlamaConfig(max_position_embeddings=64)
    for rope, limit in (
        ({"sliding_attention": default, "full_attention": dynamic}, 64),
        ({"full_attention": dynamic | {"original_max_position_embeddings": 16}}, 16),
        ({"full_attention": default}, float("inf")),
    ):
        config.rope_parameters = rope
        assert position_limit(SimpleNamespace(config=config, modules=list)) == limit


def test_images_of_an_unknown_class_run_as_stock(caplog):
    """And one without images is packed."""
    model = build(MULTIMODAL["gemma3"])
    ids, mask = awkward_batch()
    model.config.image_token_id = 60
    sharing = prepared(model, compared=True)
    ids %= 60
    first = mask.argmax(1)
    rows = first < 14 - 4
    ids = ids[rows]
    mask = mask[rows]
    first = first[rows]
    labels = completion_labels(ids, mask)
    text = {"input_ids": ids, "attention_mask": mask, "labels": labels, "mm_token_type_ids": ids * 0}
    with_images = {**text, "input_ids": ids.clone(), "pixel_values": torch.rand(len(ids), 3, 16, 16)}
    for row, column in enumerate(first.tolist()):
        with_images["input_ids"][row, column : column + 4] = 60
    del with_images["mm_token_type_ids"]
    with_images["token_type_ids"] = (with_images["input_ids"] == 60).long()
    for arguments, reason in ((text, None), (with_images, "no image of this kind")):
        sharing.status.reasons[Scope.IMAGES] = reason
        ours = model(**arguments, fused_lm_head=True).log_probs
        assert bool(sharing.figures.tokens) == (reason is None)
        if reason is not None:
            assert reason in caplog.text
        with closed(sharing):
            torch.testing.assert_close(ours, model(**arguments, fused_lm_head=True).log_probs, atol=2e-5, rtol=1e-5)


def test_score_mask_cuts_work_and_zeros_the_rest():
    ids, _ = awkward_batch()
    scored_BC = torch.zeros(len(ids), COMPLETION, dtype=torch.bool)
    scored_BC[0, [0, 4]] = True
    scored_BC[2, 8] = True  # behind the completion's end: not a token
    figures = assert_equals_stock(build("qwen3"), scored_BC=scored_BC)
    # One completion is left, up to the token before its last scored one: 14 prompt tokens and 4 of the completion.
    assert (figures.tokens, figures.padded_tokens) == (18, ids.numel())


def test_nothing_to_score_still_reaches_every_parameter():
    model = build("qwen3")
    ours = one_pass(model, prepared(model), scored_BC=torch.zeros(10, COMPLETION, dtype=torch.bool))
    assert ours.figures.tokens == 1 and ours.logps_BC.abs().sum() == 0
    ours.logps_BC.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())


# --- dropout: with that of attention a model runs padded, other dropout is logged ---

BERT = {"attention_probs_dropout_prob": 0.1}
# Dropout under the names that each class has for it.
DRAWING = {
    "gpt2": small("GPT2", "LMHeadModel", attn_pdrop=0.1),
    "gpt_bigcode": small("GPTBigCode", attn_pdrop=0.1),
    "bert": small("Bert", "LMHeadModel", **BERT),
    "ernie": small("Ernie", **BERT),
    "roc_bert": small("RoCBert", **BERT),
    "opt, layerdrop": small("OPT", dropout=0.1, layerdrop=0.3),
    "llama": small("Llama", attention_dropout=0.1),
}


@pytest.mark.parametrize("name", DRAWING)
def test_attention_dropout_is_found_under_each_of_its_names(name):
    assert attention_reason(DRAWING[name]()) is not None
    assert not prepared(DRAWING[name]()).status.packs


def test_dropout_of_an_adapter_is_allowed():
    model = build("llama")
    assert draws(model) == []
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.05))
    assert draws(model) and attention_reason(model) is None


def test_without_dropout_draws_nothing_and_restores():
    model = DRAWING["gpt2"]().train()
    before = [(name, value) for name, _, _, value in draws(model)]
    ids = torch.arange(3, 12).unsqueeze(0)
    with torch.no_grad(), without_dropout(model):
        assert torch.equal(model(ids).logits, model(ids).logits) and model.training
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)
    assert [(name, value) for name, _, _, value in draws(model)] == before and before
