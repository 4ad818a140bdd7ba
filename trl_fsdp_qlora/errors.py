"""The errors whose text is all that a user needs, and hints for mistyped names.

Commands and recipes print a `UserError` as its text, and the traceback of any other error.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path


class UserError(ValueError):
    """An error that the user can fix: the text has the value, the reason and what to change."""


class PrefixSharingError(UserError):
    """The backend of prompt sharing that was chosen by name cannot be exact for this model or batch."""


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`"; did you mean 'x'?"` with the one of `known` that is most like `name`; an empty text if none is similar."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]!r}?" if near else ""


def mistyped_path(path: str | Path) -> str:
    """[`did_you_mean`] for a path that does not exist, among the files of its folder."""
    path = Path(path)
    if path.exists() or not path.parent.is_dir():
        return ""
    # The name and not the path: files of one folder begin alike. They end alike, too, so a guess has to be near.
    return did_you_mean(path.name, (file.name for file in path.parent.iterdir()), cutoff=0.75)
