"""A user's own functions by import path: `my_rewards.py:has_unit` or `my_package.rewards:has_unit`."""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from ..errors import UserError, did_you_mean, mistyped_path

_SPELLING = re.compile(r"(?P<module>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


class OwnCodeError(UserError):
    """An import path that leads to no function; names the nearest one."""


def is_import_path(text: str) -> bool:
    """Whether `text` is spelled `FILE.py:NAME` or `MODULE:NAME`."""
    return _SPELLING.fullmatch(text) is not None


def load_function(text: str) -> Callable:
    """The function that `text` names. Files are relative to the working directory, so every rank finds the same.

    Raises:
        OwnCodeError: no such file, module or function; what the file raises when it is imported is the cause.
    """
    match = _SPELLING.fullmatch(text)
    if match is None:
        raise OwnCodeError(f"{text!r} is not an import path; write my_file.py:function or my_package.module:function")
    module = _module(match["module"])
    function = getattr(module, match["name"], None)
    if not callable(function):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        hint = did_you_mean(match["name"], own) or f"; it has {', '.join(own) or 'none'}"
        raise OwnCodeError(f"{text!r}: {match['module']} has no function {match['name']!r}{hint}")
    return function


def _module(name: str) -> ModuleType:
    path = Path(name)
    if path.suffix == ".py" and path.is_dir():
        raise OwnCodeError(f"{name} is a folder; name a file of Python")
    if path.suffix == ".py" and not path.is_file():
        raise OwnCodeError(f"{name}: no such file here{mistyped_path(name)}")
    try:
        return _of_file(path) if path.suffix == ".py" else _of_package(name)
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever the user's own lines raise: here it only gets the file's name beside it
        raise OwnCodeError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _of_file(path: Path) -> ModuleType:
    # By its own name, as `import` beside it would give it, so that functions can be pickled and their source is found.
    known = sys.modules.get(path.stem)
    if known is not None:
        if getattr(known, "__file__", None) and Path(known.__file__).resolve() == path.resolve():
            return known
        raise ImportError(f"a module {path.stem!r} is imported already; give the file another name")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end: what it imports from beside itself, nothing of the libraries
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module


def _of_package(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return importlib.import_module(name)
