"""A recipe's arguments, from a YAML file and the command line."""

import argparse
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from ..run.config_fields import option, spelled
from ..run.nearest import did_you_mean, nearest, nearest_path

DEBUG_ERRORS = "--debug_errors"
_NUMBERS = {"int": "whole number", "float": "number"}


class ConfigError(ValueError):
    """A recipe file or command line that cannot be used; names the key, the reason and what to write."""


@dataclass
class ScriptArguments:
    """Data, rewards and accuracy of a recipe; everything else is the trainer's config. `--help` has a line for each."""

    dataset: str = option(
        MISSING,
        "Hub id, local file (.jsonl, .json, .csv, .parquet) or folder, generators with their settings: "
        "'reasoning_gym:chain_sum(max_terms=3)', 'addition' or 'multiplication', or a function of your own that returns "
        "rows: my_data.py:load.",
    )
    dataset_config: str | None = option(None, "Configuration name of a Hub dataset.")
    dataset_split: str = option(
        "train", "Split to train on, or several as one: `train+test`, of which `held_out` takes its part."
    )
    eval_dataset: str | None = option(None, "Where the held-out problems come from; `dataset` where it is not set.")
    eval_split: str = option("test", "Split of the held-out problems.")
    held_out: int = option(0, "Take this many problems out of `dataset_split` instead of reading `eval_split`.")
    validation: int = option(
        0, "Take this many of the training problems out, to choose settings by: nothing trains on them."
    )
    accuracy_on: str = option(
        "test",
        "Measure on 'test', the held-out problems, or on 'validation', those that `validation` took out.",
        choices=["test", "validation"],
    )
    eval_problems: int | None = option(None, "Measure on at most this many held-out problems.")
    system_prompt: str | None = option(None, "Put before every question.")
    prompt_template: str = option("{question}", "How a question becomes a prompt; must hold {question}.")
    chat: bool = option(True, "Let the tokenizer's chat template frame the prompt.")
    rewards: list[str] = field(
        default_factory=lambda: ["exact_answer"],
        metadata={
            "help": "Names of rewards, see trl_fsdp_qlora.recipe.rewards.REWARDS, or your own: my_rewards.py:has_unit."
        },
    )
    answer_format: str = option(
        "auto",
        "Where a completion's final answer stands: auto, hash, tags, boxed, last_number, first_line, or verl's.",
    )
    accuracy_steps: int = option(
        0, "Measure held-out accuracy every so many optimizer steps; 0 for before and after only."
    )
    accuracy_samples: int = option(0, "k of pass@k and majority@k after training; 0 for greedy decoding only.")
    accuracy_batch_size: int = option(64, "Completions per batch of the accuracy measurement, per rank.")
    skip_accuracy: bool = option(False, "Train only; measure nothing.")
    max_train_seconds: float | None = option(
        None, "Stop after the optimizer step in which training has taken so many seconds, without what is measured."
    )
    license: str | None = option(None, "SPDX id for the adapter's card.")
    data_license: str | None = option(None, "SPDX id of the training data, for the card.")
    require_fit: bool = option(
        False, "Stop before anything is loaded where the plan does not fit; else it is a warning."
    )


class _Parser(TrlParser):
    """TRL's parser, whose errors are exceptions instead of two pages of usage."""

    def error(self, message: str):
        # argparse names both spellings of an option: argument --max_steps/--max-steps: ...
        raise ConfigError(f"command line: {re.sub(r'^argument |(?<=[a-z])/--[a-z-]+', '', message)}")


def parse_recipe(dataclass_types: Sequence[type], argv: Sequence[str] | None = None) -> tuple:
    """Instances of `dataclass_types` from `--config FILE.yaml` and the command line, which wins.

    Raises:
        ConfigError: the file cannot be read or is no mapping; a key that none of the types has; a value of the wrong
            type; values that one of the types refuses.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(tuple(dataclass_types))
    parser.add_argument(DEBUG_ERRORS, action="store_true", help="Show the traceback of an error.")
    path, argv = _take_config(argv)
    options = {option for action in parser._actions for option in action.option_strings}
    for arg in argv:
        if arg.startswith("--"):
            check_key(arg.split("=")[0], options, "command line")
    if path is not None:
        _set_defaults(parser, path)
    try:
        *parsed, rest = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    except ConfigError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError) as error:  # of a type's own checks
        hint = " In the recipe: use_cpu: true and bf16: false." if "bf16/gpu" in str(error) else ""
        raise ConfigError(f"{error}{hint}") from error
    if rest:
        raise ConfigError(f"command line: {' '.join(rest)!r} belongs to no option")
    return tuple(parsed[: len(dataclass_types)])


def _take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    path, rest, waiting = None, [], False
    for arg in argv:
        if waiting or arg.startswith("--config="):
            if path is not None:
                raise ConfigError("command line: --config is given twice; put the values of both into one file")
            path, waiting = arg if waiting else arg.removeprefix("--config="), False
        elif arg == "--config":
            waiting = True
        else:
            rest.append(arg)
    if waiting or path == "":
        raise ConfigError("command line: --config needs a file, e.g. --config my_recipe.yaml")
    return path, rest


def check_key(key: Any, known: Collection[str], where: str) -> None:
    """
    Raises:
        ConfigError: `key` is none of `known`; says where it stands, and names the nearest.
    """
    if key not in known:
        near = nearest(str(key), {*known} - {"--help"}, 0.5)
        raise ConfigError(f"{where}: unknown key {key!r}{did_you_mean(near)}")


def _set_defaults(parser: TrlParser, path: str) -> None:
    config = read_yaml(path)
    environment = config.pop("env", None) or {}
    if not isinstance(environment, dict):
        raise ConfigError(f"{path}: env={environment!r} must hold `NAME: value` lines")
    try:
        os.environ.update({str(key): str(value) for key, value in environment.items()})
    except ValueError as error:
        raise ConfigError(f"{path}: env={environment!r}: {error}") from None
    # Where an option and its `--no_` twin share a name, the first is the one that takes a value.
    actions = {action.dest: action for action in reversed(parser._actions)}
    known = set(actions) - {"help", DEBUG_ERRORS.removeprefix("--")}
    for key in config:
        check_key(key, known, path)
    parser.set_defaults_with_config(**{key: _typed(actions[key], value, path) for key, value in config.items()})


class _Twice(yaml.MarkedYAMLError):
    """A key that a mapping has twice."""


class _Loader(yaml.SafeLoader):
    """YAML's own takes the last of two values of a key, and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise _Twice(problem=f"{key.value!r} is there twice; leave one out", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, option: str = "--config") -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        option: that names it on the command line, for the errors.

    Raises:
        ConfigError: no such file, no YAML, no mapping; names the line.
    """
    try:
        config = yaml.load(Path(path).read_text(encoding="utf-8-sig"), _Loader)  # a safe one
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}{did_you_mean(nearest_path(path))}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {path}: it is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        kind = "" if isinstance(error, _Twice) else "no YAML: "
        raise ConfigError(f"{option} {path}{where}: {kind}{getattr(error, 'problem', None) or error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{option} {path} must hold `key: value` lines")
    return config


def _typed(action: argparse.Action, value: Any, path: str) -> Any:
    """A YAML value as the command line would have given it: argparse looks at the type of strings only."""
    if value is None:
        return value
    if action.nargs == "+":
        return [_scalar(action, item, path) for item in (value if isinstance(value, list) else [value])]
    return _scalar(action, value, path)


def _scalar(action: argparse.Action, value: Any, path: str) -> Any:
    kind = getattr(action.type, "__name__", "")  # TRL's own converters carry the name of what they convert to
    if kind in _NUMBERS and not isinstance(value, str):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (kind == "int" and value != int(value)):
            raise ConfigError(f"{path}: {action.dest}={value!r} is not a {_NUMBERS[kind]}")
        value = int(value) if kind == "int" else float(value)
    elif isinstance(value, str) and callable(action.type):
        try:
            value = action.type(value)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            named = f" is not a {_NUMBERS[kind]}" if kind in _NUMBERS else f": {error}"
            raise ConfigError(f"{path}: {action.dest}={value!r}{named}") from None
    elif kind == "string_to_bool" and not isinstance(value, bool):
        raise ConfigError(f"{path}: {action.dest}={value!r} is neither true nor false")
    elif kind == "str" and isinstance(value, (list, dict)):
        what = "words or texts, one per line or in [brackets]" if action.nargs == "+" else "one word or text"
        raise ConfigError(f"{path}: {action.dest}={value!r} must be {what}")
    elif kind == "str" and type(value) in (int, float, date):  # a folder or a layer that is called so
        value = str(value)
    if action.choices is not None:
        value = spelled(value, action.choices)
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"{path}: {action.dest}={value!r} is none of {', '.join(map(str, action.choices))}")
    return value
