"""Describe a reward function for the cache's key: the text of its code, and the values it was built with.

The text is that of the whole file which defines the function, since the file usually has the function's helpers, too.
Partials, methods, decorators, closures and defaults are followed, so the text of another file counts if a helper or a
class comes from that file.
"""

import functools
import inspect
import linecache
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from accelerate.logging import get_logger
from datasets.fingerprint import Hasher
from torch import nn

from .. import __version__
from .values import describe_model, digest

logger = get_logger(__name__)

_PACKAGE = __name__.partition(".")[0]
# Libraries that this package's own rewards grade with, in addition to its own code.
_GRADERS = ("math-verify", "reasoning-gym")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def describe_reward(function: Callable, name: str, version: str | None) -> dict | str:
    """A description that changes whenever the reward function called `name` changes.

    It is the user's `version` if there is one, the weights if the function is a model, and otherwise the code. Code
    and objects that cannot be read are named in one warning.
    """
    if isinstance(function, nn.Module):
        return describe_model(function)
    if version is not None:
        return {"version": version}
    unreadable: list[str] = []
    content = _content(function, unreadable, [])
    if unreadable:
        logger.warning(
            f"the source of the reward function {name} cannot be read ({', '.join(dict.fromkeys(unreadable))}), so "
            "V* from before a change of the function would be used after it: set value_reward_version, and change it "
            "with every change of the function"
        )
    return {"source": digest(content)}


def _content(value: Any, unreadable: list[str], within: list[Any]) -> Any:
    """`value` as lists and texts that are equal in two runs if, and only if, the value and its code are equal.

    Args:
        unreadable: a list to which the names of unreadable objects are added.
        within: the objects that `value` is part of; an object may contain itself.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if any(value is outer for outer in within):
        return "itself"
    content = functools.partial(_content, unreadable=unreadable, within=[*within, value])
    if type(value) in (list, tuple):
        return [content(item) for item in value]
    if type(value) in (set, frozenset):
        return sorted(map(digest, map(content, value)))
    if type(value) is dict:
        return sorted(([content(key), content(item)] for key, item in value.items()), key=digest)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, nn.Module):
        return describe_model(value)
    if isinstance(value, functools.partial):
        return [content(part) for part in (value.func, value.args, value.keywords)]
    if inspect.ismethod(value):
        return [content(value.__func__), content(value.__self__)]
    if inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        built_with = [cells, value.__defaults__, value.__kwdefaults__, vars(value)]
        return [value.__qualname__, _code(value, unreadable), content(built_with)]
    if inspect.isclass(value):
        return [[each.__qualname__, _code(each, unreadable)] for each in value.__mro__ if each is not object]
    if hasattr(value, "__wrapped__"):  # functools.cache
        return [type(value).__qualname__, content(value.__wrapped__)]
    if inspect.isroutine(value):  # of compiled code
        owner = getattr(value, "__self__", None)
        return [value.__qualname__, _code(value, unreadable), content(owner)]
    try:
        if _is_library(type(value).__module__):
            return Hasher.hash(value)
        # The parts into which pickle would split the object: its class, and its state, whether that is in `__dict__`,
        # in slots, or the items of a container.
        parts = value.__reduce_ex__(4)
        if not isinstance(parts, str):
            parts = [list(part) if hasattr(part, "__next__") else part for part in parts[1:]]
    except Exception:  # a lock, a connection; such objects have no common class
        unreadable.append(type(value).__qualname__)
        parts = None
    return [content(type(value)), content(parts)]


def _code(thing: Any, unreadable: list[str]) -> Any:
    """The code that defines a function or a class: its version if it is installed, and otherwise its text."""
    module = thing.__module__ or "builtins"
    top = module.partition(".")[0]
    if top == _PACKAGE:
        return [__version__, [_version(name) for name in _GRADERS], _folder_text(Path(inspect.getfile(thing)).parent)]
    try:
        file = inspect.getsourcefile(thing) or ""
        linecache.checkcache(file)
        text = "".join(linecache.getlines(file))
    except TypeError:  # compiled code
        text = ""
    if _is_library(module) and (text or not inspect.isfunction(thing)):
        return [module, [_version(name) for name in _distributions().get(top, [])]]
    if not text:
        unreadable.append(thing.__qualname__)
    return digest(text)


def _is_library(module: str) -> bool:
    """Whether the module of this name belongs to Python or to an installed package, and not to the user."""
    top = module.partition(".")[0]
    if top == "builtins" or top in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    installed = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return file is not None and any(Path(file).is_relative_to(folder) for folder in installed)


def _folder_text(folder: Path) -> str:
    return digest([path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))])


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


_distributions = functools.cache(metadata.packages_distributions)
