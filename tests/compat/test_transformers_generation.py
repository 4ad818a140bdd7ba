"""What decoding borrows of transformers' `generate`: whose code it would run, and which settings it sees."""

import types

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, GenerationMixin

from tests.tiny import tiny_model
from trl_fsdp_qlora.compat import transformers_generation as borrowed

METHODS = ("generate", "_sample")


def users_own(self, *args, **kwargs):
    raise AssertionError("it is not called here")


def test_the_installed_transformers_has_every_name():
    assert borrowed.MISFIT is None


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_a_users_own_is_named_at_each_of_its_places(name, monkeypatch):
    """Of a subclass, of an object, and of transformers' class; a model and one under PEFT are the libraries'."""
    model = tiny_model()
    assert borrowed.foreign_generation(model) is None
    assert borrowed.foreign_generation(get_peft_model(tiny_model(), LoraConfig())) is None
    cls = type(model)
    model.__class__ = type("Own", (cls,), {name: users_own})
    assert borrowed.foreign_generation(model) == f"Own.{name}"
    model.__class__ = cls
    setattr(model, name, types.MethodType(users_own, model))
    assert borrowed.foreign_generation(model) == f"{cls.__name__}.{name}"
    delattr(model, name)
    monkeypatch.setattr(GenerationMixin, name, users_own)
    assert borrowed.foreign_generation(model) == f"{cls.__name__}.{name}"


def test_gaps_of_a_config_are_the_models_as_in_generate():
    model = tiny_model()
    model.generation_config.top_k = 7
    config = borrowed.effective_config(model, GenerationConfig(max_new_tokens=3))
    assert (config.top_k, config.max_new_tokens) == (7, 3)
    assert borrowed.effective_config(model, GenerationConfig(top_k=9)).top_k == 9


def test_without_ranks_generate_does_not_synchronise():
    model = tiny_model()
    assert not borrowed.synced_by_default(model)
    cpu = torch.device("cpu")
    assert borrowed.unfinished(model, finished_here=False, synced_gpus=False, device=cpu)
    assert not borrowed.unfinished(model, finished_here=True, synced_gpus=False, device=cpu)
