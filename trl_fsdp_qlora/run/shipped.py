"""Folders: those at the top of the repository, which an installed package holds inside, and the cache."""

import os
from importlib.resources import files
from pathlib import Path

_PACKAGE = Path(
    str(files(__package__.partition(".")[0]))
).resolve()  # recipes are launched, so they are files on a disk


def shipped(folder: str) -> Path:
    """Where `recipes` or `accelerate_configs` is: a wheel carries it as `trl_fsdp_qlora/_recipes` (setup.py)."""
    installed = _PACKAGE / f"_{folder}"
    return installed if installed.is_dir() else _PACKAGE.parent / folder


def cache_folder() -> Path:
    """`$TRL_FSDP_QLORA_CACHE`, or `trl_fsdp_qlora` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TRL_FSDP_QLORA_CACHE") or Path(base) / "trl_fsdp_qlora").expanduser()
