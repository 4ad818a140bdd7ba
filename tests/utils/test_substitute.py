"""A method that gets a substitute as its `self`, compared with the same method of the original."""

import copy
import functools

import pytest

from trl_fsdp_qlora.utils.substitute import Substitute


class Base:
    def report(self):
        self.calls += 1
        return self.name, self.shout(), type(self).__name__, self.__class__.__name__


class Middle(Base):
    def report(self):
        return super().report()


class Trainer(Middle):
    def __init__(self):
        self.name = "original"
        self.calls = 0

    def shout(self):
        return self.name.upper()

    def report(self):
        substitute = Substitute(self, name="substitute")
        return super(Trainer, substitute).report()


def test_only_the_function_that_gets_it_finds_the_other_value():
    trainer = Trainer()
    before = dict(vars(trainer))
    # `Middle` finds the next class by a `super()` without arguments; `shout` runs on the original.
    assert trainer.report() == ("substitute", "ORIGINAL", "Substitute", "Trainer")
    assert vars(trainer) == before | {"calls": 1}  # what is set is set on the original


def test_it_is_an_instance_of_the_originals_class():
    substitute = Substitute(Substitute(Trainer(), name="one"), name="two", calls=5)
    assert isinstance(substitute, Base)
    assert substitute.__class__ is Trainer
    assert (substitute.name, substitute.calls, substitute.shout()) == ("two", 5, "ORIGINAL")


def test_what_is_set_under_a_substituted_name_does_not_reach_the_original():
    trainer = Trainer()
    substitute = Substitute(trainer, calls=5)
    Base.report(substitute)
    substitute.further = 1
    assert (substitute.calls, trainer.calls, trainer.further) == (6, 0, 1)


def test_a_method_in_place_of_another_is_called_without_the_object():
    trainer = Trainer()
    shout = functools.partial(str.lower, "QUIET")
    assert Base.report(Substitute(trainer, shout=shout))[1] == "quiet"


def test_a_copy_has_the_same_original_and_values():
    trainer = Trainer()
    again = copy.copy(Substitute(trainer, name="substitute"))
    assert (again.name, again.calls, again.__class__) == ("substitute", 0, Trainer)


def test_a_name_that_the_original_lacks_is_an_error():
    with pytest.raises(AttributeError, match="missing"):
        Substitute(Trainer(), missing=1)
