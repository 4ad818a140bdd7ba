"""The accelerate configs of this package, by name, from a checkout or an installed wheel."""

from pathlib import Path

from ..errors import UserError, did_you_mean
from .shipped import shipped


def names() -> list[str]:
    """Names that [`accelerate_config`] takes."""
    return sorted(path.stem for path in shipped("accelerate_configs").glob("*.yaml"))


def accelerate_config(name: str) -> Path:
    """Path of the config `name`, for `accelerate launch --config_file`.

    Raises:
        UserError: there is none of that name; says which is called nearly so, and lists those there are.
    """
    if name not in names():
        raise UserError(
            f"no accelerate config named {name!r}{did_you_mean(name, names())}; there are {', '.join(names())}"
        )
    return shipped("accelerate_configs") / f"{name}.yaml"
