"""Folders and accelerate configs that come with the package, and the cache folder.

The folders are at the top of the repository, and inside an installed package.
"""

import os
from pathlib import Path

from ..errors import UserError, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]


def resource_folder(folder: str) -> Path:
    """The folder `recipes` or `accelerate_configs`; a wheel carries it as `trl_fsdp_qlora/_recipes` (setup.py)."""
    installed = _PACKAGE / f"_{folder}"
    return installed if installed.is_dir() else _PACKAGE.parent / folder


def cache_folder() -> Path:
    """`$TRL_FSDP_QLORA_CACHE`, or `trl_fsdp_qlora` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TRL_FSDP_QLORA_CACHE") or Path(base) / "trl_fsdp_qlora").expanduser()


def accelerate_config_names() -> list[str]:
    """Names that [`accelerate_config`] takes."""
    return sorted(path.stem for path in resource_folder("accelerate_configs").glob("*.yaml"))


def accelerate_config(name: str) -> Path:
    """Path of the config `name`, for `accelerate launch --config_file`.

    If there is none, a [`UserError`] names the nearest.
    """
    names = accelerate_config_names()
    if name not in names:
        hint = f"{did_you_mean(name, names)}; there are {', '.join(names)}"
        raise UserError(f"no accelerate config named {name!r}{hint}")
    return resource_folder("accelerate_configs") / f"{name}.yaml"
