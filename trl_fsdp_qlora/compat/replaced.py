"""Temporary replacement of attributes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Set the attributes `values` of `owner` inside the block.

    At the end an attribute of `owner` itself is restored. One that was inherited from its class is deleted, so that
    the class's attribute is visible again.
    """
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):  # Ctrl-C may have come before it was set
                delattr(owner, name)
