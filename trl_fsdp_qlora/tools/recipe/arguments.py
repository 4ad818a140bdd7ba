"""A recipe's arguments, from a YAML file and the command line."""

import inspect
import itertools
import os
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

import yaml
from transformers.hf_argparser import string_to_bool
from trl import TrlParser

from ...trainers.config_fields import option, spelled
from ...trainers.starting.input_checks import mistakes
from ..data.answers import ANSWER_FORMATS
from ..run.one_line import OneLineParser, plain_message, pop_options
from .keys import ConfigError, check_keys, check_options, read_yaml


@dataclass
class ScriptArguments:
    """Data, rewards and accuracy of a recipe; everything else is the trainer's config.

    `--help` has a line for each field.
    """

    dataset: str = option(
        MISSING,
        "Hub id, local file (.jsonl, .json, .csv, .parquet) or folder, 'addition', a generator with its settings: "
        "'reasoning_gym:chain_sum(max_terms=3)', or a function of your own that returns rows: my_data.py:load.",
    )
    dataset_config: str | None = option(None, "Configuration name of a Hub dataset.")
    dataset_split: str = option("train", "Split to train on, or several as one: `train+test`.")
    question_column: str | None = option(None, "Column of the questions, if it has none of the known names.")
    answer_column: str | None = option(
        None, "Column of the right answers; see `question_column`. With rewards of your own there may be none."
    )
    eval_dataset: str | None = option(None, "Source of the held-out problems; by default `dataset`.")
    eval_split: str = option("test", "Split of the held-out problems.")
    held_out: int = option(0, "Take this many problems out of `dataset_split` instead of reading `eval_split`.")
    eval_problems: int | None = option(None, "Measure on a fixed sample of at most this many held-out problems.")
    system_prompt: str | None = option(None, "Put before every question.")
    prompt_template: str = option("{question}", "How a question becomes a prompt; must hold {question}.")
    chat: bool = option(True, "Let the tokenizer's chat template frame the prompt.")
    rewards: list[str] = field(
        default_factory=lambda: ["exact_answer"],
        metadata={"help": "Names of trl_fsdp_qlora.tools.data.rewards.REWARDS, or your own: my_rewards.py:has_unit."},
    )
    answer_format: str = option(
        "auto",
        "Place of a completion's final answer: auto, hash, tags, boxed, last_number or first_line.",
        choices=list(ANSWER_FORMATS),
    )
    environment: str | None = option(
        None,
        "An environment whose methods are tools, by import path: examples/agents/calculator.py:Calculator; "
        "docs/agents.md.",
    )
    tools: list[str] = field(
        default_factory=list,
        metadata={"help": "Functions that the model may call, by import path: my_tools.py:multiply."},
    )
    tool_format: str | None = option(
        None,
        "A function by import path that gets the tokenizer and returns it with a chat template that knows tools, for "
        "a model whose own does not.",
    )
    accuracy_steps: int = option(0, "Measure accuracy every so many optimizer steps; 0 for before and after only.")
    accuracy_samples: int = option(0, "k of pass@k after training; 0 for greedy decoding only.")
    accuracy_batch_size: int = option(64, "Completions per batch of the accuracy measurement, per rank.")
    accuracy_function: str | None = option(
        None,
        "A function that decides what is right in place of the answer, by import path: my_rewards.py:passes. It gets "
        "a reward's `prompts`, `completions` and columns, and an answer is right if its value is at least 1.",
    )
    skip_accuracy: bool = option(False, "Train only; measure nothing.")
    license: str | None = option(None, "SPDX id for the adapter's card.")
    data_license: str | None = option(None, "SPDX id of the training data, for the card.")
    require_fit: bool = option(False, "Stop before anything is loaded if the plan does not fit; otherwise warn.")


# The least value of each number of a script's arguments, and what is meant.
_LEAST = {
    "eval_problems": (1, "it is a number of problems; skip_accuracy: true measures none"),
    "held_out": (0, "it is a number of problems; 0 takes none out"),
    "sft_problems": (1, "it is a number of problems"),
    "accuracy_steps": (0, "it is a number of steps; 0 measures before and after only"),
    "accuracy_samples": (0, "it is the k of pass@k; 0 measures greedy decoding only"),
    "accuracy_batch_size": (1, "it is a number of completions"),
}

# How YAML spells truth values.
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class _Parser(OneLineParser, TrlParser):
    """TRL's parser, except that errors are exceptions instead of two pages of usage.

    A field of words takes a truth value for `on` or `off`, as it does in a YAML file.
    """

    def _get_value(self, action, word):
        value = super()._get_value(action, word)
        if action.choices is None or value in action.choices:
            return value
        meant = spelled(_TRUTH.get(word.lower(), word), action.choices)
        return meant if isinstance(meant, str) else value

    def error(self, message: str):
        raise ConfigError(plain_message(message))


Words = Sequence[str] | None
Defaults = Mapping[str, object] | None


def parse_recipe(types: Sequence[type], argv: Words = None, defaults: Defaults = None) -> tuple:
    """Instances of the dataclasses `types` from `--config FILE.yaml` and the command line.

    [`recipe_fields`] reads the two.

    Raises:
        ConfigError: as in [`recipe_fields`], or one of the types refuses a value.
    """
    namespace = recipe_fields(types, argv, defaults)
    lines = mistakes(namespace)  # before a config computes with them
    if lines:
        raise ConfigError(lines[0])
    values = vars(namespace)
    for name, (least, reason) in _LEAST.items():
        if values.get(name) is not None and values[name] < least:
            raise ConfigError(f"{name}={values[name]} can only be a mistake: {reason}")
    try:
        return tuple(_instance(cls, values) for cls in types)
    except (ValueError, ImportError) as error:  # raised by the types' own checks
        hint = " In the recipe: use_cpu: true and bf16: false." if "bf16/gpu" in str(error) else ""
        raise ConfigError(f"{error}{hint}") from error


def _instance(cls: type, values: Mapping[str, object]) -> object:
    """An instance of the dataclass `cls`, with the fields that its `__init__` takes from `values`."""
    names = [item.name for item in fields(cls) if item.init]
    return cls(**{name: values[name] for name in names})


def recipe_fields(types: Sequence[type], argv: Words = None, defaults: Defaults = None) -> Namespace:
    """Every field of the dataclasses `types`, from `--config FILE.yaml` and the command line; no instance is made.

    The command line wins. A value of the file is read as the same text on the command line would be, so `1e-5`, `no`
    and `3.0` mean the same in both. Values that no word can express (null, a mapping, a list for a field that takes
    one word) are taken as TRL takes them. The file's `env` goes into the environment.

    Args:
        argv: the command line; the process's own by default.
        defaults: by field, the values that file and command line override; fields that none of the types has are
            ignored.

    Raises:
        ConfigError: the file cannot be read or is no mapping; an option is unknown; a field refuses its value.
    """
    parser = _Parser(tuple(types))
    parser.add_argument("--config", help="YAML file with values for the options.")
    words = list(sys.argv[1:] if argv is None else argv)
    options = set()
    for action in parser._actions:
        options.update(action.option_strings)
    check_options(words, options)
    named_file, _ = pop_options(words, ("--config",))
    path = named_file.get("--config")
    if not {"-h", "--help"}.isdisjoint(words):
        _print_help(parser, types, "all" in words)
        sys.exit(0)
    parser.set_defaults_with_config(**defaults or {})
    words_of_file = [] if path is None else _words_of_file(path, parser)
    # The last value of an option counts, so the command line comes behind the file.
    namespace, rest = parser.parse_known_args([*words_of_file, *words])
    if rest:
        text = " ".join(rest)
        raise ConfigError(f"{text!r} belongs to no option")
    return namespace


def _print_help(parser: _Parser, types: Sequence[type], lists_all: bool) -> None:
    """Print the options that this package adds, or all of them with TRL's and transformers'."""
    ours = {"config", "help"}
    bases = itertools.chain.from_iterable(cls.__mro__ for cls in types)
    for base in bases:
        library, _, _ = base.__module__.partition(".")
        if library not in ("trl", "transformers"):
            ours.update(inspect.get_annotations(base))
    hidden = [] if lists_all else [action for action in parser._actions if action.dest not in ours]
    for action in hidden:
        action.help = SUPPRESS
    parser.usage = "%(prog)s [--config FILE.yaml] [--FIELD VALUE ...]"
    parser.print_help()
    if hidden:
        count = len({action.dest for action in hidden})
        print(f"\n{count} further fields are those of TRL's config and ModelConfig: --help all lists them.")


def _words_of_file(path: str, parser: _Parser) -> list[str]:
    """The words of a command line that mean what the YAML file at `path` has.

    Values that no word can express become defaults of `parser`, and the file's `env` goes into the environment.
    """
    values = read_yaml(path)
    environment = values.pop("env", None) or {}
    for name, value in environment.items():
        os.environ[str(name)] = str(value)
    # Every scalar as it is written, because YAML itself takes `no` for False and `1e-5` for a text.
    file_text = Path(path).read_text(encoding="utf-8-sig")
    texts = yaml.load(file_text, yaml.BaseLoader)
    # Reversed, so that a switch's action with a value counts, not its --no_ twin.
    actions = {action.dest: action for action in reversed(parser._actions)}
    check_keys(values, actions, path)
    words = []
    inexpressible = {}
    for key, value in values.items():
        option = f"--{key}"
        action = actions[key]
        text = texts[key]
        if value is None or isinstance(value, dict):
            inexpressible[key] = value
        elif isinstance(value, list):
            if action.nargs == "+":
                words += [option, *text]
            else:
                inexpressible[key] = value
        elif isinstance(value, bool) and action.type is string_to_bool:  # which knows neither `on` nor `off`
            truth = "true" if value else "false"
            words.append(f"{option}={truth}")
        else:
            words.append(f"{option}={text}")
    parser.set_defaults_with_config(**inexpressible)
    return words
