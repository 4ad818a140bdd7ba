"""Comparing borrowed functions with the signatures they were written for."""

import functools
import inspect
from operator import attrgetter
from typing import Any


def misfits(owner: Any, expected: dict[str, str]) -> list[str]:
    """The differences of `owner` (a module, a class) from `expected`: dotted name -> its parameters in order."""
    problems = []
    for name, parameters in expected.items():
        try:
            function = inspect.unwrap(attrgetter(name)(owner))
        except AttributeError:
            problems.append(f"{name}: expected ({parameters}), found nothing")
            continue
        actual = " ".join(inspect.signature(function).parameters)
        if actual != parameters:
            problems.append(f"{name}: expected ({parameters}), found ({actual})")
    return problems


# Packages whose hooks and forwards leave what a model computes from a token as it is, so that they may come and go.
_LIBRARIES = {"accelerate", "deepspeed", "peft", "torch", "transformers", "trl", "trl_fsdp_qlora", "wandb"}


def is_of_library(function: Any) -> bool:
    """Whether a hook or a forward was written in one of the libraries below this package, and not by the user."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)  # of a bound method
    # Not its `__module__`, which `functools.wraps` copies.
    module = function.__globals__["__name__"] if inspect.isfunction(function) else type(function).__module__
    return module.partition(".")[0] in _LIBRARIES
