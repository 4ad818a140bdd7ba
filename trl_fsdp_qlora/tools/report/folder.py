"""What the folder of a run holds, apart from its completions: curves, facts, accuracy, warnings.

Only JSON is read, so a folder from elsewhere runs no code. Types and sizes are checked, because anyone may have
written the folder. A file that is missing or cannot be read becomes a note, and so does a value of another type.
"""

import json
import math
import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...utils.plain import counted
from ...utils.redaction import command_line, portable
from ...utils.stats import wilson_interval

Item = TypeVar("Item")
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
    history: list[dict[str, float]] = field(default_factory=list)
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)
    startup: str = ""
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    reward_weights: dict[str, float] = field(default_factory=dict)

    def accuracy_texts(self) -> list[str]:
        """The accuracy before and after training, as far as they were measured."""
        shares = [counts["correct"] / counts["n"] for counts in self.accuracy.values()]
        return [f"{100 * share:.1f}%" for share in shares]

    def interval_text(self) -> str:
        """The intervals of [`accuracy_texts`] in words."""
        ranges = []
        numbers = {}
        for counts in self.accuracy.values():
            low, high = wilson_interval(counts["correct"], counts["n"])
            ranges.append(f"{100 * low:.1f} to {100 * high:.1f}%")
            numbers[f"{counts['n']:,}"] = None
        plural = "s" if len(ranges) > 1 else ""
        return f"95% interval{plural} {' and '.join(ranges)}, n = {' and '.join(numbers)}"

    @property
    def last_step(self) -> int:
        return int(self.history[-1]["step"]) if self.history else 0


class Content:
    """The values of a JSON file by their types; a value of another type becomes a note, and its default is taken."""

    def __init__(self, path: Path, notes: list[str]):
        self.name = path.name
        self.notes = notes
        self.values = _json_file(path, notes)

    def take(self, name: str, default: Any, *types: type) -> Any:
        """The value of `name` if it is of `types` (by default that of `default`), or else `default`."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, types or type(default)) and not isinstance(value, bool):
            return value
        self.notes.append(f"{self.name}: {name} is of type {type(value).__name__}, and is left out.")
        return default

    def entries(self, name: str) -> list[dict[str, Any]]:
        """The list `name` of logged metrics: those entries that have a step."""
        logged = self.take(name, [])
        entries = []
        for entry in logged:
            step = entry.get("step") if isinstance(entry, dict) else None
            if finite(step) is not None:
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

    def accuracy(self, when: str) -> dict[str, Any] | None:
        """The accuracy before or after training, if it has its two counts."""
        measured = self.take(when, {})
        correct = finite(measured.get("correct"))
        n = finite(measured.get("n"))
        has_counts = correct is not None and n is not None
        if has_counts and n >= 1 and 0 <= correct <= n:
            return measured
        if measured:
            self.notes.append(f"{self.name}: {when} has no `correct` of `n` problems, and is left out.")
        return None


def read_run(folder: Path) -> Run:
    """What `folder` holds, a folder of a recipe or of stock TRL."""
    run = Run(folder.resolve().name)
    record = Content(folder / "metrics.json", run.notes)
    state = _newest_state(folder, run.notes)
    adapter = Content(folder / "adapter_config.json", run.notes)
    histories = (record.entries("history"), state.entries("log_history"))
    logged = max(histories, key=_last_step)
    if not logged:
        run.notes.append("There are no curves: neither a trainer_state.json nor a metrics.json has logged metrics.")
    run.warnings = [portable(text) for text in record.texts("warnings")]
    run.history = _finite(logged, run.warnings)
    for when in ("before", "after"):
        measured = record.accuracy(when)
        if measured is not None:
            run.accuracy[when] = measured
    run.startup = portable(record.take("startup", ""))
    weights = record.take("reward_weights", {})
    run.reward_weights = {name: weight for name, weight in weights.items() if finite(weight) is not None}
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
    most = finite(state.take("max_steps", 0, int, float))
    return f"{done} of {most:,}" if most and most > 0 else done


def finite(value: Any) -> float | None:
    """`value` if it is a finite number that a float holds."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def spread(items: list[Item], count: int) -> list[Item]:
    """At most `count` of the items at equal distances, the first and, if it is not alone, the last among them."""
    if len(items) <= count:
        return items
    distance = (len(items) - 1) / max(1, count - 1)
    return [items[round(place * distance)] for place in range(count)]


def _last_step(history: list[dict]) -> float:
    return max((entry["step"] for entry in history), default=-1)


def _json_file(path: Path, notes: list[str]) -> dict[str, Any]:
    """The dictionary in a JSON file; empty if there is none, with a note if it cannot be read."""
    if not path.exists():
        return {}
    try:
        if not path.is_file():  # reading a pipe or a device might never end
            raise ValueError("it is no ordinary file")
        if path.stat().st_size > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE // 2**20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, and a dictionary was expected")
    except RecursionError:
        notes.append(f"{path.name} cannot be read: it is nested too deeply")
        return {}
    except (OSError, ValueError) as error:  # JSON and UTF-8 that do not decode are value errors
        notes.append(f"{path.name} cannot be read: {portable(str(error)[:200])}")
        return {}
    return content


def _newest_state(folder: Path, notes: list[str]) -> Content:
    """The trainer's state with the most steps, of the folder itself or of a checkpoint."""
    paths = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    states = [Content(path, notes) for path in paths]
    return max(states, key=lambda state: _last_step(state.entries("log_history")))


def _finite(logged: list[dict], warnings: list[str]) -> list[dict[str, float]]:
    """The numbers of a log in the order of steps; a warning names metrics that were NaN or infinite."""
    history = []
    lost: Counter[str] = Counter()
    for entry in sorted(logged, key=lambda entry: entry["step"]):
        numbers = {}
        for name, value in entry.items():
            if not isinstance(value, (int, float)):
                continue
            if finite(value) is None and not isinstance(value, bool):
                lost[name] += 1
            else:
                numbers[name] = value
        history.append(numbers)
    warnings += [f"{name} was not finite in {counted(times, 'logged step')}" for name, times in lost.items()]
    return history


def _without_secret_flags(command: str) -> str:
    """A command line without flags that hold a secret; as it is if it is no line of a shell."""
    try:
        return command_line(shlex.split(command))
    except ValueError:
        return command


def _facts(record: Content, adapter: Content) -> dict[str, Any]:
    """Facts from the `metrics.json` of a recipe, and from PEFT's config."""
    facts = {
        "method": record.take("method", None, str),
        "model": record.take("model", None, str) or adapter.take("base_model_name_or_path", None, str),
        "data": record.take("dataset", None, str),
        "rewards": ", ".join(record.texts("rewards")),
    }
    for label in ("command", "hardware", "software", "seed", "processes"):
        facts[label] = record.take(label, None, str, int)
    if isinstance(facts["command"], str):
        facts["command"] = _without_secret_flags(facts["command"])
    seconds = finite(record.take("train_seconds", None, int, float))
    if seconds is not None:
        facts["training"] = f"{seconds:,.0f} s"
    if adapter.values:
        rank = adapter.take("r", None, int)
        size = "" if rank is None else f", r={rank}, alpha={adapter.take('lora_alpha', None, int, float)}"
        facts["adapter"] = f"{adapter.take('peft_type', 'adapter')}{size}"
    return facts
