"""Comparing borrowed functions with the signatures they were written for."""

import inspect
from operator import attrgetter
from typing import Any


def misfits(owner: Any, expected: dict[str, str]) -> list[str]:
    """The differences of `owner` (a module, a class) from `expected`: dotted name -> its parameters in order."""
    problems = []
    for name, parameters in expected.items():
        try:
            function = inspect.unwrap(attrgetter(name)(owner))
            actual = f"({' '.join(inspect.signature(function).parameters)})"
        except AttributeError:
            actual = "nothing"
        if actual != f"({parameters})":
            problems.append(f"{name}: expected ({parameters}), found {actual}")
    return problems
