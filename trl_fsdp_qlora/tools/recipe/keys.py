"""Options of a command and keys of its YAML file: an unknown one is refused, with the nearest known one.

A command asks before it imports torch: [`refuse_unknown`] reads the names in the source files of config classes, those
of TRL and transformers that are installed here. The parser asks once more with the names of its own fields.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ...errors import UserError, did_you_mean, mistyped_path

_NEAR = 0.75  # similarity of a name that is worth a guess
# Where the fields of all recipes are written. A field of another command is refused later, by the command's parser.
_FILES = (
    "transformers/training_args.py", "trl/trainer/*_config.py", "trl/experimental/*/*_config.py",
    "trl_fsdp_qlora/trainers/*/config.py", "trl_fsdp_qlora/trainers/options.py",
    "trl_fsdp_qlora/tools/recipe/*.py",
)  # fmt: skip
# Commands without fields, and those whose options are other things: accelerate's, a list of findings.
_WITHOUT_FIELDS = ("merge", "small-base", "publish", "report")
_NOT_READ = ("launch", "doctor", "recipes", "config")


class ConfigError(UserError):
    """A recipe file or command line that cannot be used; the message has the key, the reason and the line to write."""


def refuse_unknown(command: str, sources: Sequence[Path], words: Sequence[str], config: str | None) -> None:
    """Refuse options in `words`, and keys of the YAML file `config`, that no command like `command` takes.

    `sources` are the files of the command and of its script.
    """
    if command in _NOT_READ:
        return
    paths = [*sources, *([] if command in _WITHOUT_FIELDS else _paths())]
    texts = [path.read_text(encoding="utf-8") for path in paths]
    keys = {"env", *(name for text in texts for name in re.findall(r"^    (\w+): \S", text, re.MULTILINE))}
    options = {"--config", "--help", *(name for text in texts for name in re.findall(r'"(--[\w-]+)"', text))}
    for name in keys:
        options |= {f"--{name}", f"--no_{name}", f"--{name.replace('_', '-')}", f"--no-{name.replace('_', '-')}"}
    check_options(words, options)
    if config is not None:
        check_keys(read_yaml(config), keys, config)


def _paths() -> Iterator[Path]:
    for pattern in _FILES:
        library, _, path = pattern.partition("/")
        spec = find_spec(library)  # imports nothing of it
        yield from Path(spec.submodule_search_locations[0]).glob(path)


def check_options(words: Sequence[str], known: Collection[str]) -> None:
    """Refuse options that are not in `known`; a [`ConfigError`] names the nearest ones."""
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    _refuse([option for option in options if option not in known], known)


def check_keys(config: Collection[str], known: Collection[str], path: str | Path) -> None:
    """Refuse keys of the file at `path` that are not in `known`, all at once, with the nearest ones."""
    _refuse([key for key in config if key not in known], known, f"{path}: ")


def _refuse(unknown: Sequence[Any], known: Collection[str], lead: str = "") -> None:
    faults = []
    for key in unknown:
        near = did_you_mean(str(key), {*known} - {"help", "--help"}, _NEAR)
        faults.append(f"unknown key {key!r}{near or '; docs/coming_from.md has what keys of TRL are called here'}")
    if faults:
        raise ConfigError(f"{lead}{', '.join(faults)}")


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
