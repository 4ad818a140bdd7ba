"""A user's own functions by import path: `my_rewards.py:has_unit` or `my_package.rewards:has_unit`."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError, did_you_mean, mistyped_path

_SPELLING = re.compile(r"(?P<module>.+\.py|[A-Za-z_][\w.]*):(?P<name>[A-Za-z_]\w*)")


class ImportPathError(UserError):
    """An import path that leads to no function; names the nearest one."""


def is_import_path(text: str) -> bool:
    """Whether `text` is spelled `FILE.py:NAME` or `MODULE:NAME`."""
    return _SPELLING.fullmatch(text) is not None


def load_function(text: str) -> Callable:
    """The function that `text` names. Files are relative to the working directory, so every rank finds the same.

    Raises:
        ImportPathError: no such file, module or function; what the file raises when it is imported is the cause.
    """
    name, _, attribute = text.rpartition(":")
    path = Path(name) if name.endswith(".py") else None
    if path is not None and not path.is_file():
        raise ImportPathError(f"{name}: no such file here{mistyped_path(name)}")
    folder = os.getcwd() if path is None else str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end: what it imports from beside itself, nothing of the libraries
    try:
        # By its own name, as `import` beside it would give it, so that functions can be pickled and their source is found.
        module = importlib.import_module(name if path is None else path.stem)
    except (Exception, SystemExit) as error:  # whatever the user's own lines raise gets the file's name beside it
        raise ImportPathError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    if path is not None and Path(getattr(module, "__file__", None) or "").resolve() != path.resolve():
        raise ImportPathError(f"{name}: there is another module {path.stem!r}; give the file another name")
    function = getattr(module, attribute, None)
    if not callable(function):
        own = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        hint = did_you_mean(attribute, own) or f"; it has {', '.join(own) or 'none'}"
        raise ImportPathError(f"{text!r}: {name} has no function {attribute!r}{hint}")
    return function
