"""The folders that stand at the top of the repository, where a reader looks for them, and inside an installed package."""

from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(
    str(files(__package__.partition(".")[0]))
).resolve()  # recipes are launched, so they are files on a disk


def shipped(folder: str) -> Path:
    """Where `recipes` or `accelerate_configs` is: a wheel carries it as `trl_fsdp_qlora/_recipes` (setup.py)."""
    installed = _PACKAGE / f"_{folder}"
    return installed if installed.is_dir() else _PACKAGE.parent / folder
