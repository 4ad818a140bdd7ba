"""Attributes that are replaced for the length of a block."""

import pytest

from trl_fsdp_qlora.compat.replaced import replaced


class Owner:
    """Has an attribute of its class, one of its own, and a name that Ctrl-C interrupts before it is set."""

    inherited = "of the class"

    def __init__(self):
        self.own = "of the object"

    def __setattr__(self, name, value):
        if name == "interrupted":
            raise KeyboardInterrupt
        super().__setattr__(name, value)


def test_attributes_are_as_before_after_the_block():
    owner = Owner()
    with replaced(owner, inherited=1, own=2):
        assert (owner.inherited, owner.own) == (1, 2)
    assert vars(owner) == {"own": "of the object"}
    assert owner.inherited == "of the class"


def test_an_interrupt_while_attributes_are_set_stays_an_interrupt():
    owner = Owner()
    with pytest.raises(KeyboardInterrupt), replaced(owner, own=1, interrupted=2, inherited=3):
        pass
    assert vars(owner) == {"own": "of the object"}
