"""An unexpected exception as one line.

The line has the message, the place in the user's own file or config, a remedy, and the file with the traceback.
"""

import errno
import os
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path

from .redaction import portable
from .resources import resource_folder

TRACEBACK = "TRL_FSDP_QLORA_TRACEBACK"  # "1" prints tracebacks instead of lines
_LONGEST = 400  # characters of a message; some libraries print pages
_PACKAGE = Path(__file__).parents[1]
# Messages about a full disk that safetensors and torch raise without an `OSError`.
_FULL = re.compile(r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed|unexpected pos \d+ vs \d+")


def wants_traceback() -> bool:
    return os.environ.get(TRACEBACK) == "1"


def error_line(error: BaseException) -> str:
    """`message, place; remedy; the traceback is in FILE` of an exception, without a line break and without secrets."""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} …"
    summary = f"{type(error).__name__}: {message}" if message else type(error).__name__
    place = _place_in_users_code(error) or _place_in_settings(message)
    if place:
        summary = f"{summary}, {place}"
    return portable("; ".join(filter(None, [summary, _remedy(error), _keep_traceback(error)])))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    visited = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _place_in_users_code(error: BaseException) -> str:
    """`in rewards.py, line 3`: the innermost frame that is neither a library's nor this package's."""
    python = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    not_the_users = [Path(folder).resolve() for folder in (*python, _PACKAGE, resource_folder("recipes"))]
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno))
    for name, line in reversed(frames):
        path = Path(name).resolve()
        if name.startswith("<") or not path.is_file() or "site-packages" in path.parts:
            continue
        if any(path.is_relative_to(folder) for folder in not_the_users) or path == Path(sys.argv[0]).resolve():
            continue
        shortest = os.path.relpath(path) if path.is_relative_to(Path.cwd()) else path
        return f"in {shortest}, line {line}"
    return ""


def _settings() -> Iterator[tuple[str, str, str]]:
    """(name, value, place) of each setting: the command's words first, then the lines of its YAML file."""
    words = sys.argv[1:]
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            value = value or (words[i + 1] if i + 1 < len(words) else "")
            yield name.replace("-", "_"), value, f"--{name} of the command"
            if name == "config" and Path(value).is_file():
                text = Path(value).read_text(encoding="utf-8", errors="replace")
                for number, line in enumerate(text.splitlines(), start=1):
                    match = re.match(r"(\w+):\s*([^#]*)", line)
                    if match:
                        yield match[1], match[2].strip(), f"{match[1]} in {value}, line {number}"


def _place_in_settings(message: str) -> str:
    """The setting that a message is about.

    The message quotes the setting's value or has its name, which is no ordinary word.
    """
    for name, value, source in _settings():
        value = value.strip("'\"")
        has_name = "_" in name and re.search(rf"(?<![\w-]){re.escape(name)}(?!\w)", message)
        is_word = re.fullmatch(r"[A-Za-z][\w-]{2,}", value) and value.lower() not in ("true", "false", "none", "auto")
        if has_name or (is_word and re.search(rf"(?:['\"`]|: ){re.escape(value)}(?:['\"`.]|$)", message)):
            return f"see {source}"
    return ""


def _remedy(error: BaseException) -> str:
    """A remedy for the kinds of error that everybody meets once."""
    for each in _causes(error):
        is_full = isinstance(each, OSError) and each.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_full or _FULL.search(str(each)):
            return "the disk is full: free some space or set another output_dir; --resume_from_checkpoint auto goes on"
        if type(each).__name__ == "OutOfMemoryError":
            return (
                "lower per_device_train_batch_size or max_completion_length; `trl-fsdp-qlora plan` counts each "
                "phase, docs/out_of_memory.md has more"
            )
        if isinstance(each, MemoryError):
            return "this machine's memory is full: `trl-fsdp-qlora plan` counts what a run takes"
        if re.search("Connection closed by peer|remote process exited", str(each)):
            return "another process of this run ended first, for the reason in its own line"
        if isinstance(each, ModuleNotFoundError) and each.name:
            return f"pip install {each.name.partition('.')[0]}, if that is the package's name"
    return ""


def _keep_traceback(error: BaseException) -> str:
    """Write the traceback into a file that only this user can read, and return a line with its path."""
    text = portable("".join(traceback.format_exception(error)))
    try:
        number, path = tempfile.mkstemp(prefix="trl-fsdp-qlora-error-", suffix=".txt")
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:  # no space for the traceback either
        print(text, file=sys.stderr, flush=True)
        return "the traceback is above, since no file could be written"
    return f"the traceback is in {path} ({TRACEBACK}=1 prints it)"
