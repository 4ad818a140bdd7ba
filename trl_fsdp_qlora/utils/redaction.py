"""What may be written of a value: no token, no password, no login; for others, no path that only its owner has."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Names of fields and flags that hold a secret, such as `hub_token` and `--api-key`; `eos_token` and its like do not.
_SECRET = re.compile(
    r"(?:^|(?<!eos|bos|pad|unk|sep|cls)[_.-])(?:token|secret|password)$|(?:api|access|secret|private)[_.-]?key$"
)
# Logins in URLs, and tokens of Hugging Face, OpenAI and its like, GitHub, W&B; `task-...` is not read as `sk-...`.
_TOKEN = re.compile(
    r"(?<=://)[^\s/@]+(?=@)|\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[oprsu]_\w{16,}|github_pat_\w{16,}|wandb_v\d_[\w-]{16,})"
)

_PATH = re.compile(r"(?<![\w./:~-])(?:~|/)[^\s'\"<>|()\[\],;:]*/([^\s/'\"<>|()\[\],;:]+)")  # absolute, within a text


def is_secret_name(name: str) -> bool:
    """Whether a field or flag called `name` holds a secret."""
    return _SECRET.search(name.lower()) is not None


def without_secrets(value: Any) -> Any:
    """A copy of `value` as it may be written: `None` for what has a secret name, and `***` for tokens in texts."""
    if isinstance(value, dict):
        return {k: None if is_secret_name(str(k)) else without_secrets(item) for k, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(without_secrets, value))
    return without_tokens(value) if isinstance(value, str) else value


def without_tokens(text: str) -> str:
    """`text` with `***` in place of tokens and logins."""
    return _TOKEN.sub("***", text)


def text_for_others(text: str) -> str:
    """`text` without tokens; of each absolute path in it the last part is left."""
    return _PATH.sub(r"\1", without_tokens(text))


def portable(value: Any) -> Any:
    """`value` as it may be published: without secrets, and paths relative to the working directory or their end."""
    value = without_secrets(value)
    if isinstance(value, dict):
        return {k: portable(item) for k, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(portable, value))
    if not isinstance(value, str) or not (os.path.isabs(value) or value.startswith("~")):
        return value
    inside = Path(value).is_relative_to(Path.cwd()) and Path(value) != Path.cwd()
    return str(Path(value).relative_to(Path.cwd())) if inside else Path(value).name


def command_line(words: Sequence[str]) -> str:
    """`words` as one line for a shell, as it may be published; flags that hold a secret are left out."""
    published = []
    hidden = False  # whether this word is the value of a secret flag
    for word in words:
        name, equals, value = word.partition("=")
        if not hidden and not is_secret_name(name):
            published.append(f"{name}={portable(value)}" if equals and name[:2] == "--" else portable(word))
        hidden = is_secret_name(name) and not equals
    return shlex.join(published)
