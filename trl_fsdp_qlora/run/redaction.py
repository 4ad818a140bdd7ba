"""What may leave this machine of a value: no secret, and no path that only its owner has.

Secrets are known by the names of their fields, flags, variables and dictionary keys, and by what the tokens of
well-known services look like; they never enter what is written. What else a user puts into a text (a reward's name, a
prompt, a run's name) is the user's.
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
_CREDENTIALS = re.compile(r"(?<=://)[^\s/@]+@")  # of a URL
# The tokens of services, which begin with a prefix of their own; \b keeps `task-...` from being `sk-...`.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{16,}"  # OpenAI, Anthropic, OpenRouter
    r"|wandb_v\d_[A-Za-z0-9_-]{16,}"
    r"|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"  # GitHub, GitLab
    r"|xox[abeoprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}"  # Slack, AWS, Google
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,})"  # JSON web tokens
    r"|(?<=[Bb]earer )\S{8,}"
)
HIDDEN = "***"  # in the place of a token within a text


def is_secret_name(name: str) -> bool:
    """Whether a field, flag, variable or key called `name` holds a secret: `hub_token`, `--api-key`,
    `WANDB_API_KEY`.
    """
    return _SECRET.search(name.lower()) is not None


def _walk(value: Any, of_text: Callable[[str], str]) -> Any:
    """A copy of `value` with `None` for what a secret name holds, in dictionaries, lists and texts that are JSON of
    either.
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
        except ValueError:  # a text that only looks like JSON
            return of_text(value)
        kept = _walk(content, of_text)
        return value if kept == content else json.dumps(kept)
    return of_text(value)


def _text_without_secrets(text: str) -> str:
    return _TOKEN.sub(HIDDEN, _CREDENTIALS.sub("", text))


def without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config as they may be written: `None` for a token, so that the login of whoever loads it
    serves.
    """
    return _walk(fields, _text_without_secrets)


def portable(value: Any) -> Any:
    """What may be published of a value: no secrets; paths relative to the working directory, or their last part."""
    return _walk(value, _portable_text)


def _portable_text(text: str) -> str:
    text = _text_without_secrets(text)
    if not os.path.isabs(text) and not text.startswith("~"):
        return text
    inside = Path(text).is_relative_to(Path.cwd()) and Path(text) != Path.cwd()
    return str(Path(text).relative_to(Path.cwd())) if inside else Path(text).name


def command_line(words: Sequence[str]) -> str:
    """`words` as one line for a shell, as it may be published: without flags that hold a secret, in whose place a
    login serves.
    """
    kept, hides_next = [], False
    for word in words:
        name, equals, value = word.partition("=")
        is_flag = name.startswith("--")
        is_assignment = bool(equals) and name.isidentifier()  # HF_TOKEN=... before or behind a command
        is_secret = is_secret_name(name) if is_flag or is_assignment else hides_next
        hides_next = is_flag and is_secret and not equals
        if not is_secret:
            kept.append(f"{name}={portable(value)}" if equals and (is_flag or is_assignment) else portable(word))
    return shlex.join(kept)
