"""What may leave this machine of a value: no secret, and no path that only its owner has.

Secrets are known by the names of their fields, flags and variables, and never enter what is written. What a user puts into a
text (a reward's name, a prompt, a run's name) is the user's.
"""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SECRET = re.compile(
    r"(?:^|(?<!eos|bos|pad|unk|sep|cls)[_.-])(?:token|secret|password|passwd|passphrase|credentials)$"
    r"|(?:api|access|secret|private|auth)[_.-]key$"
)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")  # of a URL


def is_secret_name(name: str) -> bool:
    """Whether a field, flag or variable called `name` holds a secret: `hub_token`, `--api-key`, `WANDB_API_KEY`."""
    return _SECRET.search(name.lower()) is not None


def without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config as they may be written: `None` for a token, so that the login of whoever loads it serves."""
    kept = {name: None if is_secret_name(name) else value for name, value in fields.items()}
    return {name: _CREDENTIALS.sub("", value) if isinstance(value, str) else value for name, value in kept.items()}


def portable(value: Any) -> Any:
    """What may be published of a value: paths relative to the working directory, or their last part; URLs without a login."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item) for item in value]
    if not isinstance(value, str):
        return value
    if not os.path.isabs(value) and not value.startswith("~"):
        return _CREDENTIALS.sub("", value)
    inside = Path(value).is_relative_to(Path.cwd()) and Path(value) != Path.cwd()
    return str(Path(value).relative_to(Path.cwd())) if inside else Path(value).name


def command_line(words: Sequence[str]) -> str:
    """`words` as one line for a shell, as it may be published: without flags that hold a secret, in whose place a login serves."""
    kept, hides_next = [], False
    for word in words:
        name, equals, value = word.partition("=")
        is_flag = name.startswith("--")
        is_secret = is_secret_name(name) if is_flag else hides_next
        hides_next = is_flag and is_secret and not equals
        if not is_secret:
            kept.append(f"{name}={portable(value)}" if is_flag and equals else portable(word))
    return shlex.join(kept)
