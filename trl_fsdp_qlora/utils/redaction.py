"""The part of a value that may leave this machine: no secret, and no path that only its owner has.

Secrets are found by the names of their fields, flags, variables and dictionary keys, and by the form of the tokens
that a training meets; they are never written. Any other text of a user (a reward's name, a prompt, a run's name) is
left as it is.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_SECRET = re.compile(
    r"(?:^|(?<!eos|bos|pad|unk|sep|cls)[_.-])(?:token|secret|password|passwd|passphrase|credentials)$"
    r"|(?:api|access|secret|private|auth)[_.-]?key$|^(?:proxy[_.-])?authorization$"
)
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")  # in a URL
# Tokens of Hugging Face, OpenAI and its like, GitHub, W&B; \b keeps `task-...` from being read as `sk-...`.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|wandb_v\d_[\w-]{16,})"
)
# An absolute path of two or more parts inside a text; the parts of a URL or of a relative path are none.
_PATH = re.compile(
    r"(?<![\w./\\:~-])(?:~|(?:/|[A-Za-z]:\\)[^\s/\\:'\"<>|()\[\],;]+)(?:[/\\][^\s/\\:'\"<>|()\[\],;]+)+"
)


def is_secret_name(name: str) -> bool:
    """Whether a field, flag, variable or key called `name` holds a secret.

    Examples are `hub_token`, `--api-key` and `WANDB_API_KEY`.
    """
    return _SECRET.search(name.lower()) is not None


def _walk(value: Any, of_text: Callable[[str], str]) -> Any:
    """A copy of `value` with `None` for each value under a secret name.

    It goes through dictionaries, lists and texts that are JSON of either.
    """
    if isinstance(value, dict):
        secret = {key: isinstance(key, str) and is_secret_name(key) for key in value}
        return {key: None if secret[key] else _walk(item, of_text) for key, item in value.items()}
    if type(value) in (list, tuple, set, frozenset):  # no named tuple, whose constructor takes its fields one by one
        return type(value)(_walk(item, of_text) for item in value)
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("{", "["):
        try:
            content = json.loads(value)
        except ValueError:  # the text only looks like JSON
            return of_text(value)
        cleaned = _walk(content, of_text)
        return value if cleaned == content else json.dumps(cleaned)
    return of_text(value)


def without_tokens(text: str) -> str:
    """`text` with `***` in the place of services' tokens, and without logins in URLs."""
    return _TOKEN.sub("***", _CREDENTIALS.sub("", text))


def without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config as they may be written.

    A token becomes `None`, so the reader's own login is used.
    """
    return _walk(fields, without_tokens)


def portable(value: Any) -> Any:
    """The part of a value that may be published.

    It has no secrets, and its paths are relative to the working directory, or their last part.
    """
    return _walk(value, _portable_text)


def _portable_text(text: str) -> str:
    text = without_tokens(text)
    if not os.path.isabs(text) and not text.startswith("~"):
        return text
    inside = Path(text).is_relative_to(Path.cwd()) and Path(text) != Path.cwd()
    return str(Path(text).relative_to(Path.cwd())) if inside else Path(text).name


def text_for_others(text: str) -> str:
    """`text` without the forms of secrets; of each absolute path in it the last part is left."""
    return _PATH.sub(lambda path: re.split(r"[/\\\\]", path[0])[-1], without_tokens(text))


def command_line(words: Sequence[str]) -> str:
    """`words` as one line for a shell, as it may be published.

    Flags that hold a secret are left out; a login replaces them.
    """
    published = []
    hides_next = False
    for word in words:
        name, equals, value = word.partition("=")
        is_flag = name.startswith("--")
        is_assignment = bool(equals) and name.isidentifier()  # HF_TOKEN=... before or after a command
        is_secret = is_secret_name(name) if is_flag or is_assignment else hides_next
        hides_next = is_flag and is_secret and not equals
        if is_secret:
            continue
        has_value = equals and (is_flag or is_assignment)
        published.append(f"{name}={portable(value)}" if has_value else portable(word))
    return shlex.join(published)
