"""The folders that stand at the top of the repository, where a reader looks for them, and inside an installed package."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(folder: str) -> Path:
    """Where `recipes` or `accelerate_configs` is: a wheel carries it as `trl_fsdp_qlora/_recipes` (setup.py)."""
    installed = _PACKAGE / f"_{folder}"
    return installed if installed.is_dir() else _PACKAGE.parent / folder
