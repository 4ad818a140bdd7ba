"""What a text names on this machine: a user's own function by import path, or a file or folder.

An import path is spelled `my_rewards.py:has_unit` or `my_package.rewards:has_unit`.
"""

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
    path = None
    module_name = name
    folder = os.getcwd()
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"{text}: there is no such file{mistyped_path(name)}")
        # By its own name, as `import` in a neighbouring file would import it, so that functions can be pickled and
        # their source is found.
        path = Path(name).resolve()
        module_name = path.stem
        folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end, so that its neighbours can be imported but hide no library
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # any exception of the user's file gets the file's name
        raise UserError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    if path is not None:
        file = getattr(module, "__file__", None) or ""
        if Path(file).resolve() != path:
            raise UserError(f"{name}: there is another module {module_name!r}; give the file another name")
    function = getattr(module, attribute, None)
    if function is None:
        functions = []
        for function_name, value in vars(module).items():
            if callable(value) and not function_name.startswith("_"):
                functions.append(function_name)
        hint = did_you_mean(attribute, functions)
        raise UserError(f"{name} has no function {attribute!r}{hint}")
    if not callable(function):
        type_name = type(function).__name__
        raise UserError(f"{attribute!r} in {name} is no function: it is of type {type_name}")
    return function


# Suffixes of the files of rows that are read.
DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
# Suffixes of files that people name as their data, and that are not read.
_OTHER_FILES = (".txt", ".xlsx", ".arrow", ".zip", ".gz", ".zst", ".py")


def is_missing_path(source: str) -> bool:
    """Whether `source` can only be meant as a file or folder of this machine, and there is none.

    It ends like a file, begins like a path, has nearly the name of a file that is here, or its first folder is here.
    A model or a data set on the Hub is called `name` or `owner/name`.
    """
    path = Path(source)
    if path.exists():
        return False
    is_spelled_as_path = source.startswith((".", "/", "~", "runs/")) or len(path.parts) > 2
    if is_spelled_as_path or _ends_like_data(path):
        return True
    if len(path.parts) == 2:
        return Path(path.parts[0]).is_dir()
    return bool(path.suffix and mistyped_path(source))


def _ends_like_data(path: Path) -> bool:
    """Whether the suffix of `path` is one of a file of rows, or nearly (`.jsnl`); of versions (`1.5B`) none is."""
    suffixes = (*DATA_SUFFIXES, *_OTHER_FILES)
    return bool(did_you_mean(path.suffix.lower(), suffixes, cutoff=0.7))
