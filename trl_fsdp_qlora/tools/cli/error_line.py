"""An unexpected exception as one line: its message, the place in the user's own file, a remedy, the traceback."""

import os
import re
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path

from ...utils.redaction import portable
from ...utils.resources import resource_folder

TRACEBACK = "TRL_FSDP_QLORA_TRACEBACK"  # "1" prints tracebacks instead of lines
_LONGEST = 400  # characters of a message; some libraries print pages
# Files below these folders are not the user's own.
_LIBRARIES = [*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), Path(__file__).parents[2]]
# What `Class: message` of an exception, or of one that it came from, matches -> the remedy. Of a full
# disk safetensors and torch have messages of their own.
_REMEDIES = {
    r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed|unexpected pos \d+ vs \d+": "the disk is "
    "full: free some space or set another output_dir; --resume_from_checkpoint auto goes on",
    r"^OutOfMemoryError": "lower per_device_train_batch_size; with one row, gradient_checkpointing_kwargs: {offload: "
    "true} keeps activations on the host; `trl-fsdp-qlora plan --solve` has the longest row that fits, "
    "docs/out_of_memory.md has more",
    # Torch's own allocator has no part in this error.
    r"CUDA error: out of memory": "the driver has no memory left, on the card or of pinned host memory, which "
    "offloaded activations take: `trl-fsdp-qlora plan` counts both",
    r"^MemoryError": "this machine's memory is full: `trl-fsdp-qlora plan` counts what a run takes",
    r"Connection closed by peer|remote process exited": "another process of this run ended first, for the reason in "
    "its own line",
    r"^ModuleNotFoundError: No module named '(\w+)": r"pip install \1, if that is the package's name",
}


def wants_traceback() -> bool:
    return os.environ.get(TRACEBACK) == "1"


def error_line(error: BaseException) -> str:
    """`message, place; remedy; the traceback is in FILE` of an exception, without a line break and without secrets."""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} …"
    summary = ": ".join(filter(None, [type(error).__name__, message])) + _place(error)
    return portable("; ".join(filter(None, [summary, _remedy(error), _keep_traceback(error)])))


def _place(error: BaseException) -> str:
    """`, in rewards.py, line 3`: the innermost frame in a file of the user's own."""
    others = [Path(folder).resolve() for folder in (*_LIBRARIES, resource_folder("recipes"))]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_file() and path != Path(sys.argv[0]).resolve() and not set(others) & set(path.parents):
            shortest = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
            return f", in {shortest}, line {frame.lineno}"
    return ""


def _remedy(error: BaseException | None) -> str:
    while error is not None:
        for pattern, remedy in _REMEDIES.items():
            match = re.search(pattern, f"{type(error).__name__}: {error}")
            if match:
                return match.expand(remedy)
        error = error.__cause__ or error.__context__
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
