"""replaced: a value is another one in its block, and what was there before is there afterwards."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from trl_fsdp_qlora.utils.replaced import replaced


class Base:
    shared = "class"

    @staticmethod
    def static(x):
        return x

    @classmethod
    def made(cls):
        return cls

    def method(self):
        return "method"


class Derived(Base):
    pass


class WithProperty:
    def __init__(self):
        self._number = 1

    @property
    def number(self):
        return self._number

    @number.setter
    def number(self, value):
        self._number = value


class WithSlots:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 1


class Forwarding:
    """Like PEFT's models: what it lacks is looked up in another object."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_an_instance_inherits_again_after_the_block():
    thing = Derived()
    with replaced(thing, shared="block", method=lambda: "block"):
        assert (thing.shared, thing.method()) == ("block", "block")
    assert vars(thing) == {}
    assert (thing.shared, thing.method()) == ("class", "method")


def test_an_instance_gets_its_own_value_back():
    thing = Base()
    thing.shared = "instance"
    with replaced(thing, shared=None):
        assert thing.shared is None
    assert vars(thing) == {"shared": "instance"}


def test_a_class_keeps_its_kinds_of_methods_and_inherits_again():
    before = dict(vars(Base))
    with replaced(Base, static=None, made=None, method=None, shared=None):
        assert Derived.static is None
    assert dict(vars(Base)) == before
    with replaced(Derived, made=None, shared="derived"):
        assert (Base.shared, Derived.shared) == ("class", "derived")
    assert not {"made", "shared"} & vars(Derived).keys()
    assert (Base.static(3), Derived.made()) == (3, Derived)


def test_properties_slots_and_submodules_are_set_back():
    for thing in (WithProperty(), WithSlots()):
        with replaced(thing, number=2):
            assert thing.number == 2
        assert thing.number == 1
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    first = block[0]
    with replaced(block, **{"0": nn.Identity()}):
        assert isinstance(block[0], nn.Identity)
    assert block[0] is first
    assert list(block._modules) == ["0", "1"]
    bias = first.bias
    with replaced(first, bias=nn.Parameter(torch.ones(2))):
        assert first.bias.sum() == 2
    assert dict(first.named_parameters())["bias"] is bias


def test_an_object_that_forwards_its_lookups_forwards_again():
    thing = Forwarding(Base())
    with replaced(thing, method=lambda: "block"):
        assert thing.method() == "block"
    assert vars(thing).keys() == {"inner"}
    assert thing.method() == "method"


def test_values_are_restored_after_exceptions_and_nested_blocks():
    module = sys.modules["pathlib"]
    with pytest.raises(ValueError), replaced(module, Path=1):
        with replaced(module, Path=2):
            assert module.Path == 2
        assert module.Path == 1
        raise ValueError
    assert module.Path is Path


def test_a_missing_name_replaces_nothing():
    thing = Base()
    with pytest.raises(AttributeError, match="missing"), replaced(thing, shared="block", missing=1):
        raise AssertionError("the block has run")
    assert vars(thing) == {}
