"""What is mistyped is answered with the nearest name that there is."""

import difflib
from collections.abc import Iterable
from pathlib import Path


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that is most like `name`.

    Args:
        cutoff: how alike they have to be, from 0 (not at all) to 1 (the same).
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def nearest_path(path: str | Path, cutoff: float = 0.6) -> str | None:
    """The path of what lies beside a `path` that does not exist, and is called nearly like it."""
    path = Path(path)
    if path.exists() or not path.parent.is_dir():
        return None
    there = {other.name for other in path.parent.iterdir()} - {path.name}  # it may be a link to nowhere
    near = nearest(path.name, there, cutoff)
    return None if near is None else str(path.parent / near)


def did_you_mean(near: str | None, otherwise: str = "") -> str:
    """The end of an error that names what is `near`; `otherwise` where nothing is."""
    return otherwise if near is None else f"; did you mean {near!r}?"
