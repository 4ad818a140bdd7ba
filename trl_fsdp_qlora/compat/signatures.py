"""Parameters of borrowed functions: compared with those they were written for, and read behind a patch."""

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from operator import attrgetter


def misfits(owner: object, expected: dict[str, str]) -> list[str]:
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


def constructor_parameters(cls: type) -> list[str]:
    """Names of the parameters of `cls.__init__`, in order, without `self`.

    Trackers and profilers put a wrapper of `(self, *args, **kwargs)` in its place. The names are then those in the
    source of the class.
    """
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]  # of the class, not of an instance
    if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()):
        return list(parameters)[1:]
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    definition = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    methods = {node.name: node for node in definition.body if isinstance(node, ast.FunctionDef)}
    return [argument.arg for argument in methods["__init__"].args.args][1:]


# Packages whose hooks and forwards leave what a model computes from a token as it is, so that they may come and go.
_LIBRARIES = {"accelerate", "deepspeed", "peft", "torch", "transformers", "trl", "trl_fsdp_qlora", "wandb"}


def is_of_library(function: Callable) -> bool:
    """Whether a hook or a forward was written in one of the libraries below this package, and not by the user."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)  # of a bound method
    # Not its `__module__`, which `functools.wraps` copies.
    module = function.__globals__["__name__"] if inspect.isfunction(function) else type(function).__module__
    return module.partition(".")[0] in _LIBRARIES
