"""Keys of a recipe's YAML file and options of its command line: unknown ones are refused with the nearest known one.

Nothing here imports torch, TRL or transformers, so a command can answer a typo before it imports them.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..errors import UserError, did_you_mean, mistyped_path
from .other_tools import TRL, VERL, in_our_words, tool_of, verl_words


class ConfigError(UserError):
    """A recipe file or command line that cannot be used; the message has the key, the reason and the line to write."""


class UnknownKeys(ConfigError):
    """Several keys that no field has; the message has a line for each."""

    keeps_lines = True


def check_options(words: Sequence[str], known: Collection[str]) -> None:
    """Refuse options that are not in `known`.

    A [`ConfigError`] names the nearest option, or this package's option for one of `trl grpo`'s or verl's.
    """
    settings = verl_words(words)
    _refuse({name: in_our_words(name, value, known, VERL) for name, value in settings.items()}, known, tool=VERL)
    translations = {}
    for i, word in enumerate(words):
        option, _, value = word.partition("=")
        if word.startswith("--") and option not in known:
            following = words[i + 1] if i + 1 < len(words) else ""
            value = value or ("" if following.startswith("--") else following)
            key = option.removeprefix("--").replace("-", "_")
            translations[option] = in_our_words(key, value, known, TRL)
    _refuse(translations, known)


def check_keys(config: Mapping[str, Any], known: Collection[str], path: str | Path) -> None:
    """Refuse keys of the file at `path` that are not in `known`, all at once.

    A [`ConfigError`] names the nearest keys, or this package's keys for those of a config of another tool.
    """
    tool = tool_of(config)
    translations = {
        key: in_our_words(str(key), value, known, tool) for key, value in config.items() if key not in known
    }
    _refuse(translations, known, f"{path}: ", tool)


def _refuse(translations: Mapping[Any, list[str]], known: Collection[str], lead: str = "", tool: str = TRL) -> None:
    """Raise an error with the lines of `translations`, by key, and one for each key that has none."""
    if not translations:
        return
    nearest = {*known} - {"help", "--help"}
    translated = [line for lines in translations.values() for line in lines]
    unknown = [
        f"unknown key {key!r}{did_you_mean(str(key), nearest, 0.5)}"
        for key, lines in translations.items()
        if not lines
    ]
    if translated:
        head = f"{lead}keys of {tool}, in our words (docs/coming_from.md):"
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
