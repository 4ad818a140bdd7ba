"""What the folder of a run holds, apart from its completions: curves, facts, accuracy, warnings.

Only JSON is read, so a folder from elsewhere runs no code. Types and sizes are checked, because anyone may have
written the folder. A file that is missing or cannot be read becomes a note, and so does a value of another type.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...utils.plain import counted
from ...utils.redaction import command_line, portable
from ...utils.stats import wilson_interval

Item = TypeVar("Item")
Default = TypeVar("Default")
Value = TypeVar("Value")
Entry = dict[str, float]  # metrics that were logged together, by name; each has a `step`
Object = dict[str, Any]  # of JSON
LARGEST_FILE = 256 * 2**20  # bytes of a JSON file that is read; a million logged metrics take about 30 MB
LONGEST_FACT = 5_000  # characters


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
    history: list[Entry] = field(default_factory=list)
    accuracy: dict[str, Object] = field(default_factory=dict)
    startup: str = ""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reward_weights: dict[str, float] = field(default_factory=dict)

    def accuracy_texts(self) -> list[str]:
        """The accuracy before and after training, as far as they were measured."""
        texts = []
        for counts in self.accuracy.values():
            share = counts["correct"] / counts["n"]
            texts.append(f"{100 * share:.1f}%")
        return texts

    def interval_text(self) -> str:
        """The intervals of [`accuracy_texts`] in words."""
        ranges = []
        numbers: dict[str, None] = {}  # each once
        for counts in self.accuracy.values():
            n = counts["n"]
            low, high = wilson_interval(counts["correct"], n)
            percents = f"{100 * low:.1f} to {100 * high:.1f}%"
            ranges.append(percents)
            number = f"{n:,}"
            numbers[number] = None
        plural = "s" if len(ranges) > 1 else ""
        all_ranges = " and ".join(ranges)
        all_numbers = " and ".join(numbers)
        return f"95% interval{plural} {all_ranges}, n = {all_numbers}"

    @property
    def last_step(self) -> int:
        if not self.history:
            return 0
        last = self.history[-1]
        return int(last["step"])


class Content:
    """The values of a JSON file by their types; a value of another type becomes a note, and its default is taken."""

    def __init__(self, path: Path, notes: list[str]):
        self.name = path.name
        self.notes = notes
        self.values = _json_file(path, notes)

    def take(self, name: str, default: Default, *types: type[Value]) -> Default | Value:
        """The value of `name` if it is of `types` (by default that of `default`), or else `default`."""
        value = self.values.get(name)
        if value is None:
            return default
        expected = types or type(default)
        if isinstance(value, expected) and not isinstance(value, bool):
            return value
        type_name = type(value).__name__
        self.notes.append(f"{self.name}: {name} is of type {type_name}, and is left out.")
        return default

    def entries(self, name: str) -> list[Object]:
        """The list `name` of logged metrics: those entries that have a step."""
        logged = self.take(name, [])
        entries = []
        for entry in logged:
            if isinstance(entry, dict) and finite(entry.get("step")) is not None:
                entries.append(entry)
        lost = len(logged) - len(entries)
        if lost:
            lines = counted(lost, "logged line")
            self.notes.append(f"{self.name}: {lines} of {name} without a step, left out.")
        return entries

    def texts(self, name: str) -> list[str]:
        """The texts of the list `name`."""
        values = self.take(name, [])
        return [value for value in values if isinstance(value, str)]

    def accuracy(self, when: str) -> Object | None:
        """The accuracy before or after training, if it has its two counts."""
        measured = self.take(when, {})
        if not measured:
            return None
        correct = finite(measured.get("correct"))
        n = finite(measured.get("n"))
        has_counts = correct is not None and n is not None
        if has_counts and n >= 1 and 0 <= correct <= n:
            return measured
        self.notes.append(f"{self.name}: {when} has no `correct` of `n` problems, and is left out.")
        return None


def read_run(folder: Path) -> Run:
    """What `folder` holds, a folder of a recipe or of stock TRL."""
    run = Run(folder.resolve().name)
    record = Content(folder / "metrics.json", run.notes)
    state = _newest_state(folder, run.notes)
    adapter = Content(folder / "adapter_config.json", run.notes)
    of_record = record.entries("history")
    of_state = state.entries("log_history")
    logged = max(of_record, of_state, key=_last_step)
    if not logged:
        run.notes.append("There are no curves: neither a trainer_state.json nor a metrics.json has logged metrics.")
    run.warnings = [portable(text) for text in record.texts("warnings")]
    run.history = _finite(logged, run.warnings)
    for when in ("before", "after"):
        measured = record.accuracy(when)
        if measured is not None:
            run.accuracy[when] = measured
    startup = record.take("startup", "")
    run.startup = portable(startup)
    weights = record.take("reward_weights", {})
    for name, weight in weights.items():
        if finite(weight) is not None:
            run.reward_weights[name] = weight
    facts = _facts(record, adapter)
    if logged:
        facts["steps"] = _steps(run, state)
    for label, value in facts.items():
        if value not in (None, ""):
            text = str(value)[:LONGEST_FACT]
            run.facts[label] = portable(text)
    run.notes = list(dict.fromkeys(run.notes))
    return run


def _steps(run: Run, state: Content) -> str:
    """How many steps of how many a run has logged."""
    done = f"{run.last_step:,}"
    max_steps = state.take("max_steps", 0, int, float)
    most = finite(max_steps)
    if not most or most < 0:
        return done
    return f"{done} of {most:,}"


def finite(value: object) -> float | None:
    """`value` if it is a finite number that a float holds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        is_finite = math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return value if is_finite else None


def spread(items: list[Item], count: int) -> list[Item]:
    """At most `count` of the items at equal distances, the first and, if it is not alone, the last among them."""
    if len(items) <= count:
        return items
    last = len(items) - 1
    distance = last / max(1, count - 1)
    places = [round(number * distance) for number in range(count)]
    return [items[place] for place in places]


def _last_step(history: Sequence[Object]) -> float:
    steps = [entry["step"] for entry in history]
    return max(steps, default=-1)


def _json_file(path: Path, notes: list[str]) -> Object:
    """The dictionary in a JSON file; empty if there is none, with a note if it cannot be read."""
    if not path.exists():
        return {}
    try:
        return _object_in(path)
    except RecursionError:
        reason = "it is nested too deeply"
    except (OSError, ValueError) as error:  # JSON and UTF-8 that do not decode are value errors
        text = str(error)
        reason = portable(text[:200])
    notes.append(f"{path.name} cannot be read: {reason}")
    return {}


def _object_in(path: Path) -> Object:
    """The dictionary in a JSON file.

    Raises:
        ValueError: it is no ordinary file, too large, or holds something else.
    """
    if not path.is_file():  # reading a pipe or a device might never end
        raise ValueError("it is no ordinary file")
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE // 2**20} MiB")
    text = path.read_text(encoding="utf-8")
    content = json.loads(text)
    if not isinstance(content, dict):
        type_name = type(content).__name__
        raise ValueError(f"it holds a {type_name}, and a dictionary was expected")
    return content


def _newest_state(folder: Path, notes: list[str]) -> Content:
    """The trainer's state with the most steps, of the folder itself or of a checkpoint."""
    of_checkpoints = folder.glob("checkpoint-*/trainer_state.json")
    paths = [folder / "trainer_state.json", *of_checkpoints]
    states = [Content(path, notes) for path in paths]
    last_steps = [_last_step(state.entries("log_history")) for state in states]
    newest = last_steps.index(max(last_steps))
    return states[newest]


def _finite(logged: Sequence[Object], warnings: list[str]) -> list[Entry]:
    """The numbers of a log in the order of steps; a warning names metrics that were NaN or infinite."""
    history = []
    lost: Counter[str] = Counter()
    for entry in sorted(logged, key=lambda entry: entry["step"]):
        numbers: Entry = {}
        for name, value in entry.items():
            is_kept = isinstance(value, bool) or finite(value) is not None
            if is_kept:
                numbers[name] = value
            elif isinstance(value, (int, float)):
                lost[name] += 1
        history.append(numbers)
    for name, times in lost.items():
        steps = counted(times, "logged step")
        warnings.append(f"{name} was not finite in {steps}")
    return history


def _without_secret_flags(command: str) -> str:
    """A command line without flags that hold a secret; as it is if it is no line of a shell."""
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    return command_line(words)


def _facts(record: Content, adapter: Content) -> dict[str, str | int | None]:
    """Facts from the `metrics.json` of a recipe, and from PEFT's config."""
    model = record.take("model", None, str)
    if not model:
        model = adapter.take("base_model_name_or_path", None, str)
    rewards = record.texts("rewards")
    facts = {
        "method": record.take("method", None, str),
        "model": model,
        "data": record.take("dataset", None, str),
        "rewards": ", ".join(rewards),
    }
    for label in ("command", "hardware", "software", "seed", "processes"):
        facts[label] = record.take(label, None, str, int)
    command = facts["command"]
    if isinstance(command, str):
        facts["command"] = _without_secret_flags(command)
    seconds = finite(record.take("train_seconds", None, int, float))
    if seconds is not None:
        facts["training"] = f"{seconds:,.0f} s"
    if adapter.values:
        facts["adapter"] = adapter.take("peft_type", "adapter")
        rank = adapter.take("r", None, int)
        if rank is not None:
            alpha = adapter.take("lora_alpha", None, int, float)
            facts["adapter"] += f", r={rank}, alpha={alpha}"
    return facts
