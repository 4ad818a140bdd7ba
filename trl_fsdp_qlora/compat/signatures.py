"""Parameters of borrowed functions, as they were written for and behind a patch; and whose code a function is."""

import ast
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
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


def parameters_of(cls: type, method: str) -> list[str]:
    """Names of the parameters of a class's method, in order, without `self`.

    Trackers and profilers put a wrapper of `(self, *args, **kwargs)` in its place. The names are then those in the
    source of the class.
    """
    parameters = inspect.signature(getattr(cls, method)).parameters
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            return _parameters_in_source(cls, method)
    _, *names = parameters
    return names


@functools.cache
def _parameters_in_source(cls: type, method: str) -> list[str]:
    source = inspect.getsource(sys.modules[cls.__module__])
    classes = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            classes[node.name] = node
    methods = {}
    for node in classes[cls.__name__].body:
        if isinstance(node, ast.FunctionDef):
            methods[node.name] = node
    _, *arguments = methods[method].args.args
    return [argument.arg for argument in arguments]


# Packages whose hooks and forwards leave what a model computes from a token as it is, so that they may come and go.
_LIBRARIES = {"accelerate", "deepspeed", "peft", "torch", "transformers", "trl", "trl_fsdp_qlora", "wandb"}


def is_of_library(function: object) -> bool:
    """Whether a hook or a forward was written in one of the libraries below this package, and not by the user."""
    return module_of(function).partition(".")[0] in _LIBRARIES


def module_of(function: object) -> str:
    """The module whose source has a function; not its `__module__`, which `functools.wraps` copies."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)  # of a bound method
    names_of_module = getattr(function, "__globals__", {})
    return names_of_module.get("__name__", type(function).__module__)


def users_code(owner: object, names: Iterable[str]) -> str | None:
    """The first method among `names` that the user wrote or wrapped, as `Class.method`; `None` if there is none.

    Looks at the object itself and at each of its classes, because methods call each other by `super()`: a subclass, a
    mixin, a patch of an object, of a class of this package, or of a class of TRL's.
    """
    for name in names:
        for holder in (owner, *type(owner).__mro__):
            function = vars(holder).get(name)
            if all(map(is_of_library, _wrapped_functions(function))):
                continue
            owning_class = holder if isinstance(holder, type) else type(holder)
            return f"{owning_class.__qualname__}.{name}"
    return None


def _wrapped_functions(function: object) -> Iterator[object]:
    """A function, and those that it wraps: a decorator of a library's may be around the user's function."""
    while function is not None:
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        # `contextlib` has decorators for functions of any origin; what they wrap decides.
        if module_of(function) != "contextlib":
            yield function
        function = getattr(function, "__wrapped__", None)
