"""What the folder of a run holds, apart from its completions: curves, facts, accuracy, warnings.

Only JSON is read, so a folder from elsewhere runs no code. A file that is missing or cannot be read becomes a note.
"""

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ...utils.plain import counted
from ...utils.redaction import portable
from ...utils.stats import wilson_interval

Item = TypeVar("Item")


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
        numbers = dict.fromkeys(f"{each['n']:,}" for each in self.accuracy.values())
        ranges = " and ".join(f"{100 * low:.1f} to {100 * high:.1f}%" for low, high in bounds)
        return f"95% interval{'s' if len(bounds) > 1 else ''} {ranges}, n = {' and '.join(numbers)}"

    @property
    def last_step(self) -> int:
        return int(self.history[-1]["step"]) if self.history else 0


def read_run(folder: Path) -> Run:
    """What `folder` holds, a folder of a recipe or of stock TRL."""
    run = Run(folder.resolve().name)
    record = _json_file(folder / "metrics.json", run.notes)
    state = _newest_state(folder, run.notes)
    logged = max(record.get("history", []), state.get("log_history", []), key=_last_step)
    if not logged:
        run.notes.append("There are no curves: neither a trainer_state.json nor a metrics.json has logged metrics.")
    run.warnings = [portable(text) for text in record.get("warnings", [])]
    run.history = _finite(logged, run.warnings)
    run.accuracy = {when: record[when] for when in ("before", "after") if when in record}
    run.startup = portable(record.get("startup") or "")
    run.reward_weights = record.get("reward_weights", {})
    facts = _facts(record, _json_file(folder / "adapter_config.json", run.notes))
    if logged:
        of_all = f" of {state['max_steps']:,}" if state.get("max_steps", 0) > 0 else ""
        facts["steps"] = f"{run.last_step:,}{of_all}"
    run.facts = {label: portable(str(value)) for label, value in facts.items() if value not in (None, "")}
    return run


def spread(items: list[Item], count: int) -> list[Item]:
    """At most `count` of the items at equal distances, the first and, if it is not alone, the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / max(1, count - 1))] for i in range(count)]


def _last_step(history: list[dict]) -> float:
    return max((entry["step"] for entry in history), default=-1)


def _json_file(path: Path, notes: list[str]) -> dict[str, Any]:
    """The dictionary in a JSON file; empty if there is none, with a note if it cannot be read."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, and a dictionary was expected")
    except (OSError, ValueError) as error:  # JSON and UTF-8 that do not decode are value errors
        notes.append(f"{path.name} cannot be read: {portable(str(error))}")
        return {}
    return content


def _newest_state(folder: Path, notes: list[str]) -> dict[str, Any]:
    """The trainer's state with the most steps, of the folder itself or of a checkpoint."""
    paths = [folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")]
    return max((_json_file(path, notes) for path in paths), key=lambda state: _last_step(state.get("log_history", [])))


def _finite(logged: list[dict], warnings: list[str]) -> list[dict[str, float]]:
    """The numbers of a log in the order of steps; a warning names metrics that were NaN or infinite."""
    history = []
    lost: Counter[str] = Counter()
    for entry in sorted(logged, key=lambda entry: entry["step"]):
        numbers = {name: value for name, value in entry.items() if isinstance(value, (int, float))}
        lost.update(name for name, value in numbers.items() if not math.isfinite(value))
        history.append({name: value for name, value in numbers.items() if math.isfinite(value)})
    warnings += [f"{name} was not finite in {counted(times, 'logged step')}" for name, times in lost.items()]
    return history


def _facts(record: dict[str, Any], adapter: dict[str, Any]) -> dict[str, Any]:
    """Facts from the `metrics.json` of a recipe, and from PEFT's config."""
    facts = {
        "method": record.get("method"),
        "model": record.get("model") or adapter.get("base_model_name_or_path"),
        "data": record.get("dataset"),
        "rewards": ", ".join(record.get("rewards", [])),
        **{label: record.get(label) for label in ("command", "hardware", "software", "seed", "processes")},
    }
    if "train_seconds" in record:
        facts["training"] = f"{record['train_seconds']:,.0f} s"
    if adapter:
        rank = f", r={adapter['r']}, alpha={adapter.get('lora_alpha')}" if "r" in adapter else ""
        facts["adapter"] = f"{adapter.get('peft_type', 'adapter')}{rank}"
    return facts
