"""Keys of a recipe's YAML file and options of its command line: unknown ones are refused with the nearest known one.

Nothing here imports torch, TRL or transformers, so a command can answer a typo before it imports them.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError, did_you_mean, mistyped_path
from .trl_keys import in_our_words

_NEAR = 0.75  # similarity of a name that is worth a guess


class ConfigError(UserError):
    """A recipe file or command line that cannot be used; the message has the key, the reason and the line to write."""


class UnknownKeys(ConfigError):
    """Several keys that no field has; the message has a line for each."""

    keeps_lines = True


def check_options(words: Sequence[str], known: Collection[str]) -> None:
    """Refuse options that are not in `known`.

    A [`ConfigError`] names the nearest option, or this package's option for one of TRL's.
    """
    unknown = {}
    for i, word in enumerate(words):
        option, is_assigned, value = word.partition("=")
        if not word.startswith("--") or option in known:
            continue
        values = [value] if is_assigned else list(takewhile(_is_value, words[i + 1 :]))
        unknown[option] = in_our_words(_key(option), values[0] if len(values) == 1 else values)
    _refuse(unknown, known)


def _is_value(word: str) -> bool:
    return not word.startswith("--")


def _key(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def check_keys(config: Mapping[str, Any], known: Collection[str], path: str | Path) -> None:
    """Refuse keys of the file at `path` that are not in `known`, all at once.

    A [`ConfigError`] names the nearest keys, or this package's keys for those of TRL's configs.
    """
    unknown = {key: in_our_words(str(key), value) for key, value in config.items() if key not in known}
    _refuse(unknown, known, f"{path}: ")


def _refuse(lines: Mapping[Any, str | None], known: Collection[str], lead: str = "") -> None:
    """Raise an error with a line for each unknown key: that of the table in `lines`, or the nearest known key."""
    if not lines:
        return
    nearest = {*known} - {"help", "--help"}
    translated = [line for line in lines.values() if line is not None]
    unknown = [
        f"unknown key {key!r}{did_you_mean(str(key), nearest, _NEAR)}" for key, line in lines.items() if line is None
    ]
    if translated:
        head = f"{lead}keys of TRL that have another name here, or none (docs/coming_from.md):"
        raise UnknownKeys("\n  ".join([head, *translated, *unknown]))
    if len(unknown) > 1:
        raise UnknownKeys("\n  ".join([f"{lead}{len(unknown)} keys that no field has", *unknown]))
    raise ConfigError(f"{lead}{unknown[0]}")


def read_yaml(path: str | Path, option: str = "--config") -> dict[str, Any]:
    """The mapping in a YAML file, which `option` names on the command line.

    Raises:
        ConfigError: there is no such file, it is no YAML (with the line), or it is no mapping.
    """
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}{mistyped_path(path)}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{option} {path}: no YAML: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{option} {path} must hold `key: value` lines")
    return config
