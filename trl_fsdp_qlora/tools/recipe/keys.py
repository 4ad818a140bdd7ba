"""Options of a command and keys of its YAML file: what an unknown one is called here, or which one was meant.

A command asks before it imports torch, with the names in `options.json`, which `python docs/config_reference.py`
writes from the parsers. The parser of a recipe asks again, with the names of its own fields.
"""

import difflib
import json
from collections.abc import Collection, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypedDict

import yaml

from ...errors import UserError, mistyped_path
from .other_names import OTHER_NAMES

OPTIONS = Path(__file__).with_name("options.json")
# Of the libraries whose fields are in `options.json`: another version may have others.
LIBRARIES = ("trl", "transformers")
_SAME_WORD = 0.75  # similarity of two spellings of a word


class ConfigError(UserError):
    """A recipe file or command line that cannot be used; the message has the key, the reason and the line to write."""


_Generated = TypedDict(
    "_Generated", {"versions": dict[str, str], "commands": dict[str, list[str]], "every trainer": list[str]}
)


@cache
def _generated() -> _Generated:
    text = OPTIONS.read_text(encoding="utf-8")
    return json.loads(text)


def is_current() -> bool:
    """Whether `options.json` was written with the versions of TRL and transformers that are installed here.

    Their patch releases add no fields.
    """
    written = _generated()["versions"]
    for library in LIBRARIES:
        try:
            installed = version(library)
        except PackageNotFoundError:
            return False
        if _minor(installed) != _minor(written[library]):
            return False
    return True


def _minor(release: str) -> list[str]:
    parts = release.split(".")
    return parts[:2]


def known_names(*commands: str) -> set[str] | None:
    """Names of options that any of `commands` takes, without dashes.

    It is `None` if the list was written for other versions of TRL or transformers.
    """
    generated = _generated()
    if not is_current():
        return None
    names = {"config", "help"}
    for command in commands:
        of_command = generated["commands"][command]
        names.update(of_command)
        if "num_train_epochs" in of_command:  # it trains
            names.update(generated["every trainer"])
    return names


def spellings(names: Collection[str]) -> set[str]:
    """The options of a command line that mean the fields `names`."""
    options = set()
    for name in names:
        options.add(f"--{name}")
        options.add(f"--no_{name}")
    with_dashes = {option.replace("_", "-") for option in options}
    return options | with_dashes


def check_options(words: Sequence[str], known: Collection[str]) -> None:
    """Refuse options that are not in `known`, all at once; a [`ConfigError`] has what was meant."""
    unknown = []
    for word in words:
        option, _, _ = word.partition("=")
        if option.startswith("--") and option not in known:
            unknown.append(option)
    _refuse(unknown, known)


def check_keys(config: Collection[str], known: Collection[str], path: str | Path) -> None:
    """Refuse keys of the file at `path` that are not in `known`, all at once; a [`ConfigError`] has what was meant."""
    unknown = [key for key in config if key not in known]
    _refuse(unknown, known, f"{path}: ")


def _refuse(unknown: Sequence[object], known: Collection[str], lead: str = "") -> None:
    """Raise a [`ConfigError`] with what was meant by each unknown key; a YAML's key may be a number, for example."""
    if not unknown:
        return
    faults = []
    for key in unknown:
        meant = _meant(str(key), known)
        faults.append(f"unknown key {key!r}; {meant}")
    raise ConfigError(lead + ", ".join(faults))


def _meant(key: str, known: Collection[str]) -> str:
    """What a user who wrote `key` wants to know."""
    bare = _bare(key)
    if bare in OTHER_NAMES:
        return OTHER_NAMES[bare]
    likeness = {name: _likeness(bare, _bare(name)) for name in known}
    best = max(likeness.values(), default=0.0)
    if not best:
        return "no field is called so; --help all lists the fields"
    nearest = sorted(name for name, value in likeness.items() if value == best)
    # Of the spellings of an option the one that is most like the user's.
    (meant,) = difflib.get_close_matches(key, nearest, n=1, cutoff=0.0)
    return f"did you mean {meant!r}?"


def _bare(option: str) -> str:
    """An option as the field that it sets."""
    name = option.lstrip("-")
    return name.replace("-", "_")


def _likeness(name: str, known: str) -> float:
    """How alike two names are, from 0 to 1; 0 if they cannot mean the same.

    A typo changes letters within a word, or leaves out what is between words. Another word is another meaning:
    `max_prompt_length` is no `max_completion_length`.
    """
    if name.replace("_", "") == known.replace("_", ""):
        return 1.0
    words = name.split("_")
    known_words = known.split("_")
    if len(words) != len(known_words):
        return 0.0
    worst = 1.0
    for word, known_word in zip(words, known_words, strict=True):
        matcher = difflib.SequenceMatcher(None, word, known_word)
        worst = min(worst, matcher.ratio())
    return worst if worst >= _SAME_WORD else 0.0


class _Loader(yaml.SafeLoader):
    """YAML in which no key is there twice: the last one would win silently."""

    def construct_mapping(self, node, deep=False):
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            name = key.value
            if not isinstance(name, str) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"the key {name!r} is in lines {lines[name]} and {line}; remove one of them")
            lines[name] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, option: str = "--config") -> dict[str, Any]:
    """The mapping in a YAML file, which `option` names on the command line.

    Raises:
        ConfigError: there is no such file, it is no YAML (with the line), a key is there twice, or it is no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        config = yaml.load(text, _Loader)
    except OSError as error:
        hint = mistyped_path(path)
        raise ConfigError(f"{option} {path}: {error.strerror}{hint}") from None
    except ConfigError as error:
        raise ConfigError(f"{option} {path}: {error}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{option} {path}: no YAML: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{option} {path} must hold `key: value` lines")
    return config
