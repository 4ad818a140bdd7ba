"""The terminal of a recipe: one line per logging step, now and then a few completions with their rewards; progress of what takes long.

A script of a user's keeps TRL's own log lines. The dictionary of all metrics goes where TRL sends it: to the trackers
(`report_to`) and into `trainer_state.json`.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import huggingface_hub.utils
from tqdm import tqdm as std_tqdm
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback
from transformers.utils import logging

from ..run.nonfatal import nonfatal

LINE_SECONDS = 30.0  # between two lines on what takes long, where there is no terminal for a bar
SHOWS_PER_RUN = 10  # times that completions are shown, and after the last step
_PROMPT_WIDTH, _COMPLETION_WIDTH = 60, 100


def duration(seconds: float) -> str:
    """`1:02:03`, `2:03`, `0:03`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def number(value: float | None) -> str:
    """Three decimals, or four significant digits where those would show nothing; `-` for what was not measured."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


class _Lines(std_tqdm):
    """What stands for a bar in a log file, where a bar would leave one line per refresh."""

    def display(self, msg=None, pos=None):
        if self.initial < self.n < self.total:
            line = "{desc}: {n:,}/{total:,} {unit}, {remaining} left"
            print(self.format_meter(**self.format_dict | {"bar_format": line}), file=sys.stderr, flush=True)

    def close(self):
        """Nothing is left to tidy up; a bar's is."""


def progress(
    what: str, total: int, unit: str, *, initial: int = 0, hidden: bool = False, leave: bool = False
) -> std_tqdm:
    """A context with a bar that counts `unit`s of `what`; in a log file a line every [`LINE_SECONDS`], and none if it ends sooner.

    Args:
        hidden: neither; on every rank but the main one.
        leave: the bar stays when it is done.
    """
    said = {"total": total, "initial": initial, "desc": what, "disable": hidden}
    if hidden or sys.stderr.isatty():
        return tqdm(**said, unit=f" {unit}", leave=leave)
    return _Lines(**said, unit=unit, mininterval=LINE_SECONDS, maxinterval=LINE_SECONDS, delay=LINE_SECONDS)


def _one_line(text: Any, width: int, end: bool = False) -> str:
    """Quoted and cut, from its beginning on, or its `end`."""
    if isinstance(text, Sequence) and not isinstance(text, str):  # a conversation: its last message
        text = text[-1].get("content", "") if text and isinstance(text[-1], Mapping) else text
    if isinstance(text, list):  # a message in parts: an image by its name
        text = "".join(part.get("text") or f"<{part.get('type')}>" for part in text)
    quoted = json.dumps(text, ensure_ascii=False, default=str)
    if len(quoted) <= width:
        return quoted
    return f"{quoted[0]}…{quoted[2 - width :]}" if end else f"{quoted[: width - 2]}…{quoted[-1]}"


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
    order, count = sorted(range(rows), key=totals.__getitem__), min(count, rows)
    lines = []
    for i in [order[round(i * (rows - 1) / max(count - 1, 1))] for i in range(count)]:
        earned = ", ".join(f"{name} {number(values[i])}" for name, values in rewards.items())
        earned = f"reward {number(totals[i])}" if len(rewards) == 1 else earned
        asked = _one_line(prompts[i], _PROMPT_WIDTH, end=True)  # solved problems may stand before the question
        lines.append(f"    {earned}  {asked} → {_one_line(completions[i], _COMPLETION_WIDTH)}")
    return lines


class TerminalCallback(ProgressCallback):
    """One line per logging step on the main rank, under a bar where there is a terminal to draw it in.

    The first and the last step are always logged (unless `logging_strategy` is `"no"`). The bar and the time left begin with
    the first step, after whatever is measured before it. A line that cannot be printed is a warning.

    Args:
        bar: draw bars where standard error is a terminal.
        completions: lines on the completions generated last.
    """

    def __init__(self, bar: bool, completions: Callable[[], Iterable[str]]):
        super().__init__()
        self._draws = bar and sys.stderr.isatty()
        self._completions = completions
        self._steps = 0

    def on_train_begin(self, args, state, control, **kwargs):
        self._began, self._steps, self._seconds, self._next_show = None, 0, 0.0, 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_began = time.perf_counter()
        if self._began is None:
            self._began, self._first_step = self._step_began, state.global_step
            if state.is_world_process_zero and self._draws:
                done = {"total": state.max_steps, "initial": state.global_step}
                self.training_bar = tqdm(**done, dynamic_ncols=True, unit="step")

    def on_step_end(self, args, state, control, **kwargs):
        self._seconds += time.perf_counter() - self._step_began
        self._steps += 1
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.training_bar.n)
        # On every rank: logging sums the loss over them.
        if args.logging_strategy != "no" and (state.global_step == self._first_step + 1 or _is_last(state, control)):
            control.should_log = True

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self._draws:
            super().on_prediction_step(args, state, control, eval_dataloader=eval_dataloader, **kwargs)

    @nonfatal("a line on the terminal")
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not logs:
            return
        # Not over the bar; where there is none, into a log file as soon as it is known.
        write = partial(print, flush=True) if self.training_bar is None else self.training_bar.write
        step, steps = state.global_step, state.max_steps
        if "train_runtime" in logs:
            write(f"trained to step {step} in {duration(logs['train_runtime'])}")
        elif "loss" not in logs or not self._steps:  # an evaluation, a user's own figures
            evaluated = {name: logs[name] for name in ("eval_reward", "eval_loss") if name in logs}
            shown = evaluated or {name: value for name, value in logs.items() if name not in ("total_flos", "epoch")}
            figures = (f"{name} {number(x) if isinstance(x, float) else x}" for name, x in shown.items())
            write(f"step {step}: {'  '.join(figures)}")
        else:
            left = (time.perf_counter() - self._began) / (step - self._first_step) * (steps - step)
            accuracy = f"  accuracy {100 * logs['accuracy']:.1f}%" if logs.get("accuracy") is not None else ""
            seconds = self._seconds / self._steps
            self._steps, self._seconds = 0, 0.0
            reward = f"reward {number(logs.get('reward'))}{accuracy}"
            write(f"step {step:>{len(str(steps))}}/{steps}  {reward}  {seconds:.2f} s/step  {duration(left)} left")
            due = step >= self._next_show or _is_last(state, control)
            if due and logs.get("reward") is not None:  # completions are new
                self._next_show = step + steps / SHOWS_PER_RUN
                for line in self._completions():
                    write(line)

    def on_train_end(self, args, state, control, **kwargs):
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


def _is_last(state, control) -> bool:
    return state.global_step >= state.max_steps or control.should_training_stop


def use_terminal(trainer: Any) -> None:
    """Put a [`TerminalCallback`] in the place of `trainer`'s printing callback; a notebook's table stays as it is.

    Call it after every callback that may stop training was added.
    """
    printing = [c for c in trainer.callback_handler.callbacks if type(c) in (PrinterCallback, ProgressCallback)]
    for callback in printing:
        trainer.remove_callback(callback)

    def completions() -> list[str]:
        logs = trainer._logs  # that TRL keeps for its own table of completions, which it prints with log_completions
        count = 0 if trainer.log_completions else trainer.args.show_completions
        rewards = {name: list(values) for name, values in logs["rewards"].items()}
        return completion_lines(list(logs["prompt"]), list(logs["completion"]), rewards, count) if count else []

    if printing:
        trainer.add_callback(TerminalCallback(not trainer.args.disable_tqdm, completions))


def no_bars_in_files() -> None:
    """Switch the bars of the Hugging Face libraries off where standard error is no terminal."""
    if not sys.stderr.isatty():
        for library in (datasets, huggingface_hub.utils):
            library.disable_progress_bars()
        logging.disable_progress_bar()
