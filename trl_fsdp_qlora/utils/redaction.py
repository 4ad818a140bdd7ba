"""What may be written of a value: no token, no password, no login; for others, no path of this machine."""

import re
import shlex
from collections.abc import Sequence
from itertools import pairwise
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


def without_secrets(value: Any, with_paths: bool = True) -> Any:
    """A copy of `value` as it may be written: `None` for what has a secret name, `***` for tokens and logins in texts.

    Without paths the last part of each absolute path in a text is left.
    """
    if isinstance(value, dict):
        return {k: None if is_secret_name(str(k)) else without_secrets(x, with_paths) for k, x in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(without_secrets(x, with_paths) for x in value)
    if not isinstance(value, str):
        return value
    text = _TOKEN.sub("***", value)
    return text if with_paths else _PATH.sub(r"\1", text)


def portable(value: Any) -> Any:
    """`value` as it may be published: without secrets and paths of this machine."""
    return without_secrets(value, with_paths=False)


def command_line(words: Sequence[str]) -> str:
    """`words` as one line for a shell, as it may be published; flags that hold a secret are left out."""
    shown = [
        word
        for flag, word in pairwise(["", *words])  # a word, and the flag that may be before it
        if not is_secret_name(flag) and not is_secret_name(word.partition("=")[0])
    ]
    return shlex.join(portable(shown))
