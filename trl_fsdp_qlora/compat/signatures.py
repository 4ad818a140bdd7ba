"""Comparing borrowed functions with the signatures they were written for."""

import inspect
from operator import attrgetter
from typing import Any


def misfits(where: Any, expected: dict[str, str]) -> list[str]:
    """The differences of `where` (a module, a class) from `expected`: dotted name -> its parameters in order."""
    problems = []
    for name, parameters in expected.items():
        try:
            found = f"({' '.join(inspect.signature(inspect.unwrap(attrgetter(name)(where))).parameters)})"
        except AttributeError:
            found = "nothing"
        if found != f"({parameters})":
            problems.append(f"{name}: expected ({parameters}), found {found}")
    return problems
