"""No secret in what a run leaves behind or prints, and no path of one person's machine in what is published.

A value is a secret by the name of its field (`hub_token`, `WANDB_API_KEY`, `--password`), by how it looks (`hf_…`,
`sk-…`, `Bearer …`, `scheme://user:password@host`), or because the environment holds it under such a name. Names that
only sound alike are not: `token_selection`, `max_new_tokens`, `eos_token`.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REDACTED = "REDACTED"  # a plain word: means the same to Markdown, YAML, a shell and inside a URL

_LAST_WORDS = {"token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "authorization"}
_KEYS = {"api", "access", "secret", "private", "auth", "encryption", "signing", "account", "service", "license"}
# Tokens of a vocabulary or of a count.
_VOCABULARY = {"eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "boi", "eoi"}
_VOCABULARY |= {"stop", "special", "first", "last", "next", "new", "per"}
_MIN_KNOWN = 8  # characters; a shorter value of the environment would blot out ordinary text

# Each needs a digit or capital after its prefix where ordinary names begin alike (`hf_transfer`, `sk-learn`).
_MIXED = r"(?=[\w-]*[A-Z0-9])"
_LOOKS_SECRET = re.compile(
    "|".join(
        (
            rf"(?<![A-Za-z0-9])(?:hf|api_org)_{_MIXED}[A-Za-z0-9]{{8,}}",
            rf"(?<![A-Za-z0-9])sk-{_MIXED}[\w-]{{12,}}",
            r"(?<![A-Za-z0-9])(?:gh[pousr]_|github_pat_|glpat-|xox[abeprs]-)[\w-]{10,}",
            r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
            r"(?<![A-Za-z0-9])AIza[\w-]{30,}",
            r"(?<![A-Za-z0-9])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[^-]|-(?!----END))*(?:-----END [A-Z ]*PRIVATE KEY-----)?",
        )
    )
)
_URL_CREDENTIALS = re.compile(r"(?<![\w+.-])([a-zA-Z][\w+.-]{1,30}://)[^\s/\"'<>`?#]+@")
_SCHEME = re.compile(r"(?i)\b(bearer|basic)(\s+)(?=[^\s\"'`]*[\d=])[\w.~+/=-]{8,}")
_NAMED = re.compile(
    r"(?<![\w-])(?P<name>[\w-]{0,60}(?i:token|secret|passw(?:or)?d|passphrase|credentials?|authorization|key))"
    r"(?P<quote>[\"']?)(?P<sep>\s{0,3}[:=]\s{0,3}[\"']?)"
    r"(?P<value>[^\s\"',;&`{}\[\]]+)"
)
_ABSOLUTE_PATH = re.compile(r"(?<![\w.~:/<>*])(?:file://)?(?:~\w*)?(?:/[\w.@+~=,-]+){2,}/?")


def is_secret_name(name: str) -> bool:
    """Whether a field, flag, header or environment variable called `name` holds a secret."""
    words = (
        re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-")).lower().replace("-", "_").replace(".", "_").split("_")
    )
    words = [word for word in words if word]
    if not words:
        return False
    before, last = words[-2] if len(words) > 1 else "", words[-1]
    if last in ("tokens", "secrets", "passwords", "keys"):
        return last != "tokens" and (last != "keys" or before in _KEYS)
    if last in _LAST_WORDS:
        return before not in _VOCABULARY
    return last in ("apikey", "secretkey", "accesskey") or (last == "key" and before in _KEYS)


def _is_random_key(name: str, value: str) -> bool:
    # `--openai_key`, `GPG_KEY`: any key at all, where the value is as long and mixed as keys are.
    last = re.split(r"[_.-]", name.lower())[-1]
    letters, digits = any(map(str.isalpha, value)), any(map(str.isdigit, value))
    return last == "key" and len(value) >= 16 and letters and digits and not re.search(r"[\s/]", value)


def _holds_secret(name: str, value: Any) -> bool:
    if not isinstance(value, str) or not value:
        return False
    return is_secret_name(name) or _is_random_key(name, value)


def secret_values(fields: Mapping[str, Any]) -> set[str]:
    """The values in `fields` (an environment, the attributes of a config) that are secrets by their names."""
    found = {value for name, value in fields.items() if _holds_secret(name, value)}
    return {value for value in found if len(value) >= _MIN_KNOWN and value != REDACTED}


def redact(text: str, known: Iterable[str] = ()) -> str:
    """`text` without what looks like a secret, what is assigned to a secret name, `known` and the environment's own.

    Args:
        text: anything: a log line, a card, a URL, a command.
        known: further values to take out wherever they stand.
    """
    for value in sorted({*known, *secret_values(os.environ)}, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    text = _URL_CREDENTIALS.sub(rf"\1{REDACTED}@", text)
    text = _SCHEME.sub(rf"\1\2{REDACTED}", text)
    text = _LOOKS_SECRET.sub(REDACTED, text)
    return _NAMED.sub(_redact_named, text)


def _redact_named(match: re.Match) -> str:
    value = match["value"]
    ordinary = len(value) < 4 or re.fullmatch(r"[\d.,%-]+|[Nn]one|[Nn]ull|[Tt]rue|[Ff]alse", value)
    # "Authorization: Bearer REDACTED" is done already; what a shell fills in is no secret.
    done = value.lower() in ("bearer", "basic") or value.startswith(("$", REDACTED, "<"))
    if ordinary or done or not _holds_secret(match["name"], value):
        return match.group()
    return f"{match['name']}{match['quote']}{match['sep']}{REDACTED}"


def clean(value: Any, known: Iterable[str] = ()) -> Any:
    """`value` (plain values in dicts, lists and tuples) redacted by field and by pattern; other objects as they are."""
    if isinstance(value, str):
        return redact(value, known)
    if isinstance(value, dict):
        return {
            key: REDACTED if isinstance(key, str) and _holds_secret(key, item) else clean(item, known)
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(clean(item, known) for item in value)
    return value


def without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a config as they may be pickled: no token is no token, so the login of whoever loads it serves."""
    return {name: None if _holds_secret(name, value) else clean(value) for name, value in fields.items()}


def portable(path: str) -> str:
    """What may be published of `path`: relative to the working directory if it lies there, otherwise its last part."""
    if not os.path.isabs(path) and not path.startswith("~"):
        return path
    inside = Path(path).is_relative_to(Path.cwd()) and Path(path) != Path.cwd()
    return str(Path(path).relative_to(Path.cwd())) if inside else Path(path).name


def portable_text(text: str) -> str:
    """`text` with every absolute path in it made [`portable`]; a lone `/x`, a URL and a fraction stay."""
    return _ABSOLUTE_PATH.sub(lambda match: portable(match.group().removeprefix("file://").rstrip("/")), text)


def command_line(words: Sequence[str]) -> str:
    """`words` as one line for a shell: quoted, without secrets, without the paths of one machine.

    The value of a secret flag becomes a shell variable, `--hub_token "$HUB_TOKEN"`, so the line runs where that is set.
    """
    line, secret_flag = [], None
    for word in words:
        name, equals, value = word.partition("=")
        if secret_flag is not None and not word.startswith("--"):
            line.append(_variable(secret_flag))
        elif equals and _holds_secret(name, value) and re.fullmatch(r"-{0,2}[A-Za-z][\w-]*", name):
            line.append(f"{name}={_variable(name)}")
        elif equals and re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", name):
            line.append(f"{name}={shlex.quote(_published(value))}")
        else:
            line.append(shlex.quote(_published(word)))
        secret_flag = word if word.startswith("--") and not equals and is_secret_name(word) else None
    return " ".join(line)


def _published(word: str) -> str:
    word = redact(word)
    return portable(word) if os.path.isabs(word) else portable_text(word)


def _variable(flag: str) -> str:
    return f'"${re.sub(r"[^A-Z0-9]+", "_", flag.strip("-").upper())}"'
