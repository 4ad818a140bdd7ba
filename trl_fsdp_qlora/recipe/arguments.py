"""A recipe's arguments, from a YAML file and the command line."""

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser


class ConfigError(ValueError):
    """A recipe file or command line that cannot be used; names the key and the nearest known one."""


def option(default: Any, help: str) -> Any:
    """A dataclass field with the text that `--help` prints."""
    return field(default=default, metadata={"help": help})


@dataclass
class ScriptArguments:
    """Data, rewards and accuracy of a recipe; everything else is the trainer's config. `--help` has a line for each."""

    dataset: str = field(
        metadata={"help": "Hub id, local .json/.jsonl file, folder of <split>.jsonl, 'addition' or 'multiplication'."}
    )
    dataset_config: str | None = option(None, "Configuration name of a Hub dataset.")
    dataset_split: str = option("train", "Split to train on.")
    eval_dataset: str | None = option(None, "Where the held-out problems come from; `dataset` where it is not set.")
    eval_split: str = option("test", "Split of the held-out problems.")
    held_out: int = option(0, "Take this many problems out of `dataset` instead of reading another split.")
    eval_problems: int | None = option(None, "Measure on at most this many held-out problems.")
    system_prompt: str | None = option(None, "Put before every question.")
    prompt_template: str = option("{question}", "How a question becomes a prompt; must hold {question}.")
    chat: bool = option(True, "Let the tokenizer's chat template frame the prompt.")
    rewards: list[str] = field(
        default_factory=lambda: ["exact_answer"],
        metadata={"help": "Names of rewards, see trl_fsdp_qlora.recipe.rewards.REWARDS."},
    )
    answer_format: str = option(
        "auto", "Where a completion's final answer stands: auto, hash, tags, boxed or last_number."
    )
    accuracy_steps: int = option(
        0, "Measure held-out accuracy every so many optimizer steps; 0 for before and after only."
    )
    accuracy_samples: int = option(0, "k of pass@k and majority@k after training; 0 for greedy decoding only.")
    accuracy_batch_size: int = option(64, "Completions per batch of the accuracy measurement, per rank.")
    skip_accuracy: bool = option(False, "Train only; measure nothing.")
    license: str | None = option(None, "SPDX id for the adapter's card.")


def parse_recipe(dataclass_types: Sequence[type], argv: Sequence[str] | None = None) -> tuple:
    """Instances of `dataclass_types` from `--config FILE.yaml` and the command line, which wins.

    Raises:
        ConfigError: the file is missing or no mapping, or holds a key that none of the types has.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = TrlParser(tuple(dataclass_types))
    if "--config" in argv:
        _check_keys(argv[argv.index("--config") + 1], {action.dest for action in parser._actions} - {"help"})
    unknown = [arg for arg in argv if arg.startswith("--") and arg != "--config"]
    options = {option for action in parser._actions for option in action.option_strings}
    for arg in unknown:
        _check_key(arg.split("=")[0], options, "command line")
    return parser.parse_args_and_config(argv)


def _check_key(key: str, known: set[str], where: str) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{where}: unknown key {key!r}{hint}")


def _check_keys(path: str, known: set[str]) -> None:
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--config {path} must hold `key: value` lines")
    for key in config:
        _check_key(key, known | {"env"}, path)
