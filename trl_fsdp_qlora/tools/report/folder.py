"""What the folder of a run holds, apart from its completions: curves, facts, accuracy, warnings.

Only JSON and the YAML head of a card are read, so a folder from elsewhere runs no code. A file that is missing or
cannot be read becomes a note.
"""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...trainers.methods import METHODS
from ...utils.plain import counted
from ...utils.redaction import text_for_others
from ...utils.stats import format_accuracy, wilson_interval

LARGEST_FILE = 200 * 2**20  # bytes; a larger JSON file is not read
_LONGEST_HEAD = 2**16  # characters of a card that are read; its head is at their beginning
_TITLES = {method.command: method.title for method in METHODS} | {
    "sft": "SFT",
    "distillation": "Distillation",
    "sdft": "SDFT",
}  # by tag of a card


@dataclass
class Run:
    """A run as it is shown: its texts have no secrets and no paths of this machine.

    Attributes:
        name: the folder's name.
        facts: what was trained, on what and by which command, as `{label: text}`.
        history: the logged metrics, finite numbers only; each dictionary has a `step`.
        accuracy: `{"before" or "after": {"correct": ..., "n": ..., ...}}` on held-out problems.
        startup: the start-up block; empty if none was kept.
        warnings: what the run warned of, and what its metrics show.
        notes: what is missing or cannot be read.
        reward_weights: by reward function; empty if they are not known.
    """

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)
    startup: str = ""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reward_weights: dict[str, float] = field(default_factory=dict)

    def accuracy_texts(self) -> list[str]:
        """The accuracy before and after training, as far as they were measured."""
        return [f"{100 * each['correct'] / each['n']:.1f}%" for each in self.accuracy.values()]

    def interval_text(self) -> str:
        """The intervals of [`accuracy_texts`] in words."""
        bounds = [wilson_interval(each["correct"], each["n"]) for each in self.accuracy.values()]
        numbers = dict.fromkeys(f"{int(each['n']):,}" for each in self.accuracy.values())
        ranges = " and ".join(f"{100 * low:.1f} to {100 * high:.1f}%" for low, high in bounds)
        return f"95% interval{'s' if len(bounds) > 1 else ''} {ranges}, n = {' and '.join(numbers)}"

    @property
    def last_step(self) -> int:
        return int(self.history[-1]["step"]) if self.history else 0


def read_run(folder: Path) -> Run:
    """What `folder` holds. No content of a file makes it raise an error."""
    run = Run(folder.resolve().name)
    record = _json_file(folder / "metrics.json", run.notes)
    state = _newest_state(folder, run.notes)
    logged = max(_dictionaries(record.get("history")), _dictionaries(state.get("log_history")), key=_last_step)
    if not logged:
        run.notes.append("There are no curves: neither a trainer_state.json nor a metrics.json has logged metrics.")
    run.warnings = [text_for_others(text) for text in _texts(record.get("warnings"))]
    run.history = _finite(logged, run.warnings)
    for when in ("before", "after"):
        measured = _measured(record, when)
        if measured is not None:
            run.accuracy[when] = measured
    run.startup = text_for_others("\n".join(_texts([record.get("startup")])))
    weights = record.get("reward_weights")
    if isinstance(weights, dict):
        run.reward_weights = {name: value for name, value in weights.items() if _is_number(value)}
    facts = {**_of_files(folder, run.notes), **_of_record(record), **_of_state(state, run)}
    run.facts = {label: text_for_others(str(value)) for label, value in facts.items() if value not in (None, "")}
    return run


def _is_number(value: Any) -> bool:
    """Whether it is a number of JSON that a float can hold; integers there have any number of digits."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)


def _is_count(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1e15


def _measured(record: dict[str, Any], when: str) -> dict[str, Any] | None:
    """The accuracy that was measured before or after training: `correct` of `n` problems."""
    measured = record.get(when)
    if not isinstance(measured, dict):
        return None
    correct, n = measured.get("correct"), measured.get("n")
    return measured if _is_count(correct) and _is_count(n) and 0 <= correct <= n and n > 0 else None


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str) and each] if isinstance(value, list) else []


def _dictionaries(value: Any) -> list[dict]:
    entries = value if isinstance(value, list) else []
    return [each for each in entries if isinstance(each, dict) and _is_count(each.get("step"))]


def _last_step(history: list[dict]) -> float:
    return max((entry["step"] for entry in history), default=-1)


def _json_file(path: Path, notes: list[str]) -> dict[str, Any]:
    """The dictionary in a JSON file; empty if there is none, with a note if it cannot be read."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it is larger than {LARGEST_FILE // 2**20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, and a dictionary was expected")
    except (OSError, ValueError, RecursionError) as error:  # JSON and UTF-8 that do not decode are value errors
        notes.append(f"{path.name} cannot be read: {text_for_others(str(error))}")
        return {}
    return content


def _newest_state(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The trainer's state with the most steps: of the folder itself, or of its newest checkpoint with a whole one."""
    state = _json_file(folder / "trainer_state.json", notes)
    steps = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*")}
    checkpoints = sorted((path for path in steps if steps[path]), key=lambda path: int(steps[path][1]), reverse=True)
    for path in checkpoints:
        of_checkpoint = _json_file(path / "trainer_state.json", notes)
        if of_checkpoint:
            histories = [_dictionaries(each.get("log_history")) for each in (state, of_checkpoint)]
            return state if _last_step(histories[0]) >= _last_step(histories[1]) else of_checkpoint
    return state


def _finite(logged: list[dict], warnings: list[str]) -> list[dict[str, float]]:
    """The numbers of a log in the order of steps; a warning names metrics that were NaN or infinite."""
    history = []
    lost: Counter[str] = Counter()
    for entry in sorted(logged, key=lambda entry: entry["step"]):
        numbers = {str(name): value for name, value in entry.items() if _is_number(value)}
        lost.update(name for name, value in numbers.items() if not math.isfinite(value))
        history.append({name: value for name, value in numbers.items() if math.isfinite(value)})
    warnings += [f"{name} was not finite in {counted(times, 'logged step')}" for name, times in lost.items()]
    return history


def _of_files(folder: Path, notes: list[str]) -> dict[str, Any]:
    """Facts from the card's head and from PEFT's and transformers' configs."""
    head = _card_head(folder / "README.md", notes)
    tags = [tag for tag in _texts(head.get("tags")) if tag in _TITLES]
    facts: dict[str, Any] = {
        "method": _TITLES[tags[-1]] if tags else None,
        "model": head.get("base_model") if isinstance(head.get("base_model"), str) else None,
        "data": ", ".join(_texts(head.get("datasets"))),
    }
    adapter = _json_file(folder / "adapter_config.json", notes)
    if adapter:
        facts["model"] = facts["model"] or adapter.get("base_model_name_or_path")
        rank = f", r={adapter['r']}, alpha={adapter.get('lora_alpha')}" if _is_number(adapter.get("r")) else ""
        facts["adapter"] = f"{adapter.get('peft_type', 'adapter')}{rank}"
    architectures = _texts(_json_file(folder / "config.json", notes).get("architectures"))
    facts["class"] = ", ".join(architectures)
    return facts


class _NoAliases(yaml.SafeLoader):
    """Reads no aliases: nested ones make a few lines endless."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("its head has aliases")
        return super().compose_node(parent, index)


def _card_head(path: Path, notes: list[str]) -> dict[str, Any]:
    """The YAML between the first two lines of three hyphens of a model card."""
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8") as file:
            head = re.match(r"---\n(.*?)\n---", file.read(_LONGEST_HEAD), re.DOTALL)
        content = yaml.load(head[1], _NoAliases) if head else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {text_for_others(' '.join(str(error).split()))}")
        return {}
    return content if isinstance(content, dict) else {}


def _of_record(record: dict[str, Any]) -> dict[str, Any]:
    """Facts from the `metrics.json` of a recipe."""
    facts = {"model": record.get("model"), "data": record.get("dataset"), "command": record.get("command")}
    settings = record.get("settings")
    if isinstance(settings, dict):
        facts["rewards"] = ", ".join(_texts(settings.get("rewards")))
    for label in ("hardware", "software", "seed", "processes"):
        facts[label] = record.get(label)
    for when in ("before", "after"):
        measured = _measured(record, when)
        if measured is not None:
            facts[f"accuracy {when}"] = format_accuracy(int(measured["correct"]), int(measured["n"]))
    seconds = record.get("train_seconds")
    facts["training"] = f"{seconds:,.0f} s" if _is_count(seconds) else None
    return {label: value for label, value in facts.items() if value not in (None, "")}


def _of_state(state: dict[str, Any], run: Run) -> dict[str, Any]:
    """Facts from the trainer's state."""
    of = f" of {state['max_steps']:,}" if _is_count(state.get("max_steps")) and state["max_steps"] > 0 else ""
    tokens = state.get("num_input_tokens_seen")
    return {
        "steps": f"{run.last_step:,}{of}" if run.history else None,
        "input tokens": f"{tokens:,}" if _is_count(tokens) and tokens else None,
    }
