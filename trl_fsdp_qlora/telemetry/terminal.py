"""What a run says while it trains: one line per logging step, and now and then a few completions with their rewards.

The dictionary of all metrics goes where TRL sends it: to the trackers (`report_to`) and into `trainer_state.json`.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import datasets
import huggingface_hub.utils
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import logging

from ..run.quiet_end import print_anything
from ..run.redaction import redact

SHOWS_PER_RUN = 10  # times that completions are shown, at most
_PROMPT_WIDTH, _COMPLETION_WIDTH = 60, 100


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`, `0:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def number(value: float | None) -> str:
    """Three decimals, or four significant digits where those would say nothing; `-` for what was not measured."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


def training_line(step: int, steps: int, logs: Mapping[str, Any], step_seconds: float, left: float) -> str:
    """The line of a logging step.

    Args:
        step: done.
        steps: of the whole run.
        logs: as `Trainer.log` got them.
        step_seconds: per optimizer step since the last line, without what was measured in between.
        left: seconds to the end of the run.
    """
    parts = [f"step {step:>{len(str(steps))}}/{steps}", f"reward {number(logs.get('reward'))}"]
    if logs.get("accuracy") is not None:
        parts.append(f"accuracy {100 * logs['accuracy']:.1f}%")
    return "  ".join([*parts, f"{step_seconds:.2f} s/step", f"{duration(left)} left"])


def other_line(step: int, logs: Mapping[str, Any]) -> str:
    """The line of whatever else is logged: an evaluation, the end of training, a user's own figures."""
    if "train_runtime" in logs:
        return f"trained to step {step} in {duration(logs['train_runtime'])}"
    evaluated = {name: logs[name] for name in ("eval_reward", "eval_loss") if name in logs}
    shown = evaluated or {name: value for name, value in logs.items() if name not in ("total_flos", "epoch")}
    figures = "  ".join(
        f"{name} {number(value) if isinstance(value, float) else value}" for name, value in shown.items()
    )
    return f"step {step}: {figures}"


def _one_line(text: Any, width: int) -> str:
    if isinstance(text, Sequence) and not isinstance(text, str):  # a conversation: its last message
        text = text[-1].get("content", "") if text and isinstance(text[-1], Mapping) else text
    quoted = json.dumps(text, ensure_ascii=False, default=str)
    return quoted if len(quoted) <= width else f"{quoted[: width - 2]}…{quoted[-1]}"


def completion_lines(
    prompts: Sequence, completions: Sequence, rewards: Mapping[str, Sequence[float]], count: int
) -> list[str]:
    """A line each for `count` completions, from the lowest to the highest reward.

    Args:
        prompts: texts or conversations, one for every completion.
        completions: the same.
        rewards: of each reward function, one for every completion; NaN where it gave none.
        count: how many; spread evenly over the rewards.
    """
    rows = min(len(prompts), len(completions), *(len(values) for values in rewards.values())) if rewards else 0
    totals = [sum(values[i] for values in rewards.values() if not math.isnan(values[i])) for i in range(rows)]
    order = sorted(range(rows), key=totals.__getitem__)
    count = min(count, rows)
    picked = [order[round(i * (rows - 1) / max(count - 1, 1))] for i in range(count)]
    lines = []
    for i in picked:
        if len(rewards) == 1:
            earned = f"reward {number(totals[i])}"
        else:
            earned = ", ".join(f"{name} {number(values[i])}" for name, values in rewards.items())
        lines.append(
            f"    {earned}  {_one_line(prompts[i], _PROMPT_WIDTH)} → {_one_line(completions[i], _COMPLETION_WIDTH)}"
        )
    return lines


class TerminalCallback(ProgressCallback, PrinterCallback):
    """One line per logging step on the main rank, under a bar where there is a terminal to draw it in.

    It is both callbacks that it stands in for, so `trainer.remove_callback(ProgressCallback)` and
    `trainer.remove_callback(PrinterCallback)` silence a run as they do with TRL. The bar and the first estimate of the
    time left begin with the first step, after whatever is measured before it.

    Args:
        bar: draw bars where standard error is a terminal.
        completions: lines on the completions generated last.
    """

    def __init__(self, bar: bool, completions: Callable[[], Iterable[str]]):
        super().__init__()
        self._bars = bar
        self._completions = completions
        self._began = self._step_began = None
        self._next_show = 0.0

    def _draws(self) -> bool:
        return self._bars and sys.stderr.isatty()

    def _say(self, line: str) -> None:
        # Not over the bar; where there is none, into a log file as soon as it is known.
        line = redact(line)
        if self.training_bar is None:
            print(line, flush=True)
        else:
            self.training_bar.write(line)

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = None
        self._steps, self._seconds, self._next_show = 0, 0.0, 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_began = time.perf_counter()
        if self._began is not None:
            return
        self._began, self._first_step = self._step_began, state.global_step
        if state.is_world_process_zero and self._draws():
            self.training_bar = tqdm(total=state.max_steps, initial=state.global_step, dynamic_ncols=True, unit="step")

    def on_step_end(self, args, state, control, **kwargs):
        self._seconds += time.perf_counter() - self._step_began
        self._steps += 1
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self._draws():
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        if "loss" not in logs or not self._steps:
            self._say(other_line(state.global_step, logs))
            return
        left = (time.perf_counter() - self._began) / (state.global_step - self._first_step)
        left *= state.max_steps - state.global_step
        self._say(training_line(state.global_step, state.max_steps, logs, self._seconds / self._steps, left))
        self._steps, self._seconds = 0, 0.0
        if logs.get("reward") is not None and state.global_step >= self._next_show:  # completions are new
            self._next_show = state.global_step + state.max_steps / SHOWS_PER_RUN
            for line in self._completions():
                self._say(line)

    def on_train_end(self, args, state, control, **kwargs):
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


def no_bars_in_files() -> None:
    """Switch the bars of the Hugging Face libraries off where standard error is no terminal."""
    if not sys.stderr.isatty():
        for library in (datasets, huggingface_hub.utils):
            library.disable_progress_bars()
        logging.disable_progress_bar()


def take_over(
    callbacks: list[TrainerCallback],
    brought: Iterable[TrainerCallback | type],
    bar: bool,
    completions: Callable[[], Iterable[str]],
) -> None:
    """Let a [`TerminalCallback`] stand where a trainer's own printing callback is.

    Args:
        callbacks: the trainer's, changed in place. The table of a notebook stays as it is.
        brought: those of its user, which stay too.
        bar, completions: see [`TerminalCallback`].
    """
    print_anything()
    brought = {item if isinstance(item, type) else type(item) for item in brought}
    for place, callback in enumerate(callbacks):
        if type(callback) in {PrinterCallback, ProgressCallback} - brought:
            callbacks[place] = TerminalCallback(bar, completions)


def logged_completions(logs: Mapping[str, Any], count: int) -> list[str]:
    """[`completion_lines`] of what TRL keeps for its own table of completions."""
    rewards = {name: list(values) for name, values in logs["rewards"].items()}
    return completion_lines(list(logs["prompt"]), list(logs["completion"]), rewards, count) if count else []
