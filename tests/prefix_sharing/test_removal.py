"""`share_prompts(model, attention="off")` takes everything back that was put on a model."""

import functools

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import get_peft_model

from tests.tiny import lora
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing.sharing import causal_language_model

from .helpers import MULTIMODAL, awkward_batch, build, stock_log_probs, with_stock_head


def contents(model) -> dict:
    """The attributes of every module and every config of a model, hooks included."""
    base = causal_language_model(model)
    found = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            found[name, attribute] = dict(value) if isinstance(value, dict) else value
    configs = [base.config, *(getattr(base.config, key) for key in base.config.sub_configs)]
    for number, config in enumerate(configs):
        for attribute, value in vars(config).items():
            found["config", number, attribute] = value
    return found


def assert_same(before: dict, after: dict) -> None:
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value is after[key] or value == after[key], key


def assert_same_names(expected: dict, actual: dict) -> None:
    """As [`assert_same`] for two models: they have the same attributes, of the same types, and hooks."""
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        assert type(value) is type(actual[key]), key
        if key[-1].endswith("hooks"):
            assert len(value) == len(actual[key]), key
        if isinstance(value, (str, bool, int, float)):
            assert value == actual[key], key


def packed_pass(model) -> torch.Tensor:
    """A pass of the model that shares prompts, with the gradients of it."""
    values, _ = stock_log_probs(model, *awkward_batch())
    values.sum().backward()
    model.zero_grad()
    assert causal_language_model(model).prompt_sharing.figures.tokens
    return values.detach()


def eager_tower(make):
    """Images are attended to by another implementation than text."""
    model = make()
    model.set_attn_implementation({"vision_config": "eager"})
    return model


MODELS = {
    "llama": functools.partial(build, "llama"),
    "recurrent": functools.partial(build, "qwen3_5"),
    "a tower of its own": functools.partial(eager_tower, functools.partial(build, MULTIMODAL["gemma3"])),
}


def in_mixed_precision(model):
    """The model as a trainer prepares it for bf16."""
    return Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)


WRAPPERS = {
    "nothing": lambda model: model,
    "mixed precision, no head": in_mixed_precision,
    "stock's head": with_stock_head,
    "PEFT": lambda model: get_peft_model(model, lora()),
    "mixed precision": lambda model: in_mixed_precision(with_stock_head(model)),
    "PEFT and mixed precision": lambda model: in_mixed_precision(get_peft_model(model, lora())),
}


@pytest.fixture(autouse=True)
def one_precision_per_test():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


# One of each model, one of each wrapper.
PAIRS = (
    ("llama", "nothing"),
    ("llama", "PEFT and mixed precision"),
    ("recurrent", "mixed precision, no head"),
    ("recurrent", "PEFT"),
    ("a tower of its own", "stock's head"),
    ("a tower of its own", "mixed precision"),
)


@pytest.mark.parametrize(("name", "wrapper"), PAIRS)
def test_a_model_after_off_equals_the_model_before_share_prompts(name, wrapper):
    """And the packed pass after another `share_prompts` equals the first one."""
    torch.manual_seed(0)
    model = WRAPPERS[wrapper](MODELS[name]()).train()
    before = contents(model)
    first = packed_pass(share_prompts(model))
    assert contents(model).keys() != before.keys()
    share_prompts(model, attention="off")
    assert_same(before, contents(model))
    assert torch.equal(packed_pass(share_prompts(model)), first)


LATER = {
    "PEFT": WRAPPERS["PEFT"],
    "mixed precision": in_mixed_precision,
    "PEFT and mixed precision": WRAPPERS["PEFT and mixed precision"],
}


@pytest.mark.parametrize(("name", "wrapper"), zip(MODELS, LATER, strict=True))
def test_a_model_wrapped_in_between_keeps_the_wrapper_alone(name, wrapper):
    torch.manual_seed(0)
    alone = LATER[wrapper](MODELS[name]()).train()
    torch.manual_seed(0)
    model = share_prompts(MODELS[name]().train())
    packed_pass(model)
    model = LATER[wrapper](model).train()
    first = packed_pass(model)
    share_prompts(model, attention="off")
    assert_same_names(contents(alone), contents(model))
    ids, mask = awkward_batch()
    with torch.no_grad():
        logits = [x(input_ids=ids, attention_mask=mask).logits for x in (alone, model)]
    assert logits[0].dtype == logits[1].dtype and torch.equal(*logits)
    assert torch.equal(packed_pass(share_prompts(model)), first)


def test_a_head_that_a_trainer_added_in_between_stays():
    model = with_stock_head(share_prompts(build("llama")))
    stock_log_probs(model, *awkward_batch())  # the pass after this one is packed
    packed_pass(model)
    head = with_stock_head(build("llama"))
    share_prompts(model, attention="off")
    assert not hasattr(model, "prompt_sharing") and not model.base_model._forward_pre_hooks
    batch = awkward_batch()
    assert torch.equal(stock_log_probs(model, *batch)[0], stock_log_probs(head, *batch)[0])
    assert torch.equal(model(batch[0]).logits, head(batch[0]).logits)


def test_off_alone_changes_nothing():
    model = build("qwen3_5")
    before = contents(model)
    share_prompts(model, attention="off")
    assert_same(before, contents(model))
