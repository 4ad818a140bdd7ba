"""The accelerate configs of this package, by name, from a checkout or an installed wheel."""

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent.parent / "accelerate_configs"


def _all() -> dict[str, Path]:
    if _CHECKOUT.is_dir():
        return {path.stem: path for path in sorted(_CHECKOUT.glob("*.yaml"))}
    try:
        installed = files("trl-fsdp-qlora") or []
    except PackageNotFoundError:
        installed = []
    paths = [Path(item.locate()).resolve() for item in installed if item.match("*/accelerate_configs/*.yaml")]
    return {path.stem: path for path in sorted(paths)}


def accelerate_config(name: str) -> Path:
    """Path of the config `name`, for `accelerate launch --config_file`.

    Raises:
        ValueError: there is none of that name; lists those there are.
    """
    known = _all()
    if name not in known:
        raise ValueError(f"no accelerate config named {name!r}; there are {', '.join(known) or 'none installed'}")
    return known[name]


def names() -> list[str]:
    """Names that [`accelerate_config`] takes."""
    return list(_all())
