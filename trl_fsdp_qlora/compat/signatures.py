"""Whether a function has the signature that it was borrowed with, and whose code it is."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
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
    return module_of(function).partition(".")[0] in _LIBRARIES


def module_of(function: Any) -> str:
    """The module whose source has a function; not its `__module__`, which `functools.wraps` copies."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)  # of a bound method
    return getattr(function, "__globals__", {}).get("__name__", type(function).__module__)


def users_code(owner: Any, names: Iterable[str]) -> str | None:
    """The first method among `names` that the user wrote or wrapped, as `Class.method`; `None` if there is none.

    Looks at the object itself and at each of its classes, because methods call each other by `super()`: a subclass, a
    mixin, a patch of an object, of a class of this package, or of a class of TRL's.
    """
    for name in names:
        for holder in (owner, *type(owner).__mro__):
            function = vars(holder).get(name)
            if function is not None and not all(map(is_of_library, _wrapped_functions(function))):
                owning_class = holder if isinstance(holder, type) else type(holder)
                return f"{owning_class.__qualname__}.{name}"
    return None


def _wrapped_functions(function: Any) -> Iterator[Any]:
    """A function, and those that it wraps: a decorator of a library's may be around the user's function."""
    while function is not None:
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        # `contextlib` has decorators for functions of any origin; what they wrap decides.
        if module_of(function) != "contextlib":
            yield function
        function = getattr(function, "__wrapped__", None)


def named_arguments(method: Callable, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a method's call, without `self`, by the names that they have in the method.

    Trackers and profilers put wrappers on classes that take any arguments, often without `functools.wraps`. The names
    then are those of the function that such a wrapper calls.

    Args:
        method: of a class or bound.
        args, kwargs: without `self`.
    """
    function = getattr(method, "__func__", method)
    while _takes_anything(function):
        uses = inspect.getclosurevars(inspect.unwrap(function))
        called = [x for x in {**uses.globals, **uses.nonlocals}.values() if inspect.isroutine(x)]
        if not called:
            break
        inner = next((x for x in called if x.__name__ == method.__name__), called[0])
        function = getattr(inner, "__func__", inner)
    if not inspect.isroutine(function):  # an object in a method's place gets no `self`
        return dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    _, *named = inspect.signature(function).bind(None, *args, **kwargs).arguments.items()
    return dict(named)


def _takes_anything(function: Callable) -> bool:
    """Whether a function has no names for its arguments."""
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_POSITIONAL in kinds and inspect.isfunction(inspect.unwrap(function))
