"""A user's own functions by import path: `my_rewards.py:has_unit` or `my_package.rewards:has_unit`."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from ...errors import UserError, did_you_mean, mistyped_path

_SPELLING = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")


def is_import_path(text: str) -> bool:
    """Whether `text` is spelled `FILE.py:NAME` or `MODULE:NAME`."""
    return _SPELLING.fullmatch(text) is not None


def load_function(text: str) -> Callable:
    """The function that `text` names. Files are relative to the working directory, so every rank finds the same one.

    Raises:
        UserError: there is no such file, module or function; an exception of the file's import is the cause.
    """
    name, _, attribute = text.rpartition(":")
    if name.endswith(".py") and not Path(name).is_file():
        raise UserError(f"{text}: there is no such file{mistyped_path(name)}")
    path = Path(name).resolve() if name.endswith(".py") else None
    folder = os.getcwd() if path is None else str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end, so that its neighbours can be imported but hide no library
    try:
        # By its own name, as `import` in a neighbouring file would import it, so that functions can be pickled and
        # their source is found.
        module = importlib.import_module(name if path is None else path.stem)
    except (Exception, SystemExit) as error:  # any exception of the user's file gets the file's name
        raise UserError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    if path is not None and Path(getattr(module, "__file__", None) or "").resolve() != path:
        raise UserError(f"{name}: there is another module {path.stem!r}; give the file another name")
    function = getattr(module, attribute, None)
    if function is None:
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UserError(f"{name} has no function {attribute!r}{did_you_mean(attribute, functions)}")
    if not callable(function):
        raise UserError(f"{attribute!r} in {name} is no function: it is of type {type(function).__name__}")
    return function
