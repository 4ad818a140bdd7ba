"""What may be written of a value: no token, no password, no login; for others, no path of this machine."""

import re
import shlex
from collections.abc import Callable, Sequence
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


def without_tokens(text: str) -> str:
    """`text` with `***` in place of tokens and logins."""
    return _TOKEN.sub("***", text)


def text_for_others(text: str) -> str:
    """`text` without tokens; of each absolute path in it the last part is left."""
    return _PATH.sub(r"\1", without_tokens(text))


def without_secrets(value: Any, text_of: Callable[[str], str] = without_tokens) -> Any:
    """A copy of `value` as it may be written: `None` for what has a secret name, and `text_of` each text."""
    if isinstance(value, dict):
        return {k: None if is_secret_name(str(k)) else without_secrets(x, text_of) for k, x in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(without_secrets(x, text_of) for x in value)
    return text_of(value) if isinstance(value, str) else value


def portable(value: Any) -> Any:
    """`value` as it may be published: without secrets, and the last part of a path of this machine."""
    return without_secrets(value, lambda text: without_tokens(Path(text).name if text[:1] in ("/", "~") else text))


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
