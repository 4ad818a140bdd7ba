"""Dropout is read off the modules: what attention draws keeps a model padded, what else draws is said."""

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import PrefixSharing
from trl_fsdp_qlora.prefix_sharing.dropout import attention_reason, draws, other_dropout, without_dropout

from .helpers import (
    SUPPORTED,
    VOCABULARY,
    assert_equal_gradients,
    awkward_batch,
    build,
    loss_inputs,
    losses_of,
    make_trainer,
    one_pass,
    prepared,
)

TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
BERT = {**TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# Dropout as each class has it by default.
DRAWING = {
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4)),
    "gpt_bigcode": lambda: tf.GPTBigCodeForCausalLM(tf.GPTBigCodeConfig(**TOKENS, n_embd=32, n_layer=2, n_head=4)),
    "bert": lambda: tf.BertLMHeadModel(tf.BertConfig(**BERT, is_decoder=True)),
    "ernie": lambda: tf.ErnieForCausalLM(tf.ErnieConfig(**BERT, is_decoder=True)),
    "roc_bert": lambda: tf.RoCBertForCausalLM(tf.RoCBertConfig(**BERT, is_decoder=True)),
    "opt, layerdrop": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            **TOKENS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            word_embed_proj_dim=32,
            layerdrop=0.3,
        )
    ),
    "llama": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**build(SUPPORTED["llama"]).config.to_dict() | {"attention_dropout": 0.1})
    ),
}


@pytest.mark.parametrize("name", DRAWING)
def test_attention_dropout_is_found_whatever_it_is_called(name):
    reason = attention_reason(DRAWING[name]())
    assert ("layerdrop=0.3" if "layerdrop" in name else "attention dropout") in reason
    packed = PrefixSharing()
    packed.prepare("policy", DRAWING[name]())
    assert not packed.active()


def test_a_model_with_default_dropout_trains_as_in_stock(tmp_path):
    inputs, results = loss_inputs(*awkward_batch()), []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainer = make_trainer(cls, DRAWING["gpt2"](), tmp_path, skip_zero_advantage=False)
        torch.manual_seed(1)  # the same masks
        results += losses_of([trainer], inputs)
    assert results[0][0] == results[1][0]
    assert_equal_gradients(results[1][1], results[0][1], tolerance=1e-6)


def test_dropout_set_after_the_model_was_prepared_falls_back_at_the_first_pass():
    model = build(SUPPORTED["llama"])
    sharing = prepared(model)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    one_pass(model, sharing)
    assert "attention_dropout=0.1" in sharing.describe()


def test_other_dropout_is_named():
    model = build(SUPPORTED["llama"])
    assert draws(model) == [] and other_dropout(model) is None
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.05))
    assert attention_reason(model) is None
    assert "lora_dropout 0.05" in other_dropout(model)
    opt = DRAWING["opt, layerdrop"]()
    assert "dropout 0.1" in other_dropout(opt) and "layerdrop 0.3" in other_dropout(opt)


def test_without_dropout_draws_nothing_and_restores():
    model = DRAWING["gpt2"]().train()
    before = [(draw.name, draw.value) for draw in draws(model)]
    ids = torch.arange(3, 12).unsqueeze(0)
    with torch.no_grad(), without_dropout(model):
        assert torch.equal(model(ids).logits, model(ids).logits) and model.training
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, model(ids).logits)
    assert [(draw.name, draw.value) for draw in draws(model)] == before and before
