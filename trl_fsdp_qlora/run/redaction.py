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
    return {name: None if is_secret_name(name) else _without_login(value) for name, value in fields.items()}


def _without_login(value: Any) -> Any:
    return _CREDENTIALS.sub("", value) if isinstance(value, str) else value


def portable(value: Any) -> Any:
    """What may be published of a value: paths relative to the working directory, or their last part; URLs without a login."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [portable(item) for item in value]
    if not isinstance(value, str) or not (os.path.isabs(value) or value.startswith("~")):
        return _without_login(value)
    inside = Path(value).is_relative_to(Path.cwd()) and Path(value) != Path.cwd()
    return str(Path(value).relative_to(Path.cwd())) if inside else Path(value).name


def command_line(words: Sequence[str]) -> str:
    """`words` as one line for a shell, as it may be published.

    The value of a secret flag becomes a shell variable, `--hub_token "$HUB_TOKEN"`, so the line runs where that is set.
    """
    line, flag = [], ""  # the secret flag whose value comes next
    for word in words:
        name, equals, value = word.partition("=")
        variable = f'"${re.sub(r"[^A-Z0-9]+", "_", (flag or name).strip("-").upper())}"'
        if flag and not word.startswith("--"):
            line.append(variable)
        elif equals and re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", name):
            line.append(f"{name}={variable if is_secret_name(name) else shlex.quote(portable(value))}")
        else:
            line.append(shlex.quote(portable(word)))
        flag = word if word.startswith("--") and not equals and is_secret_name(word) else ""
    return " ".join(line)
