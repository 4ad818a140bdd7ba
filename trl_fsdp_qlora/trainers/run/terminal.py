"""The terminal of a recipe: a line per logging step, some completions with their rewards, progress of long work.

A user's own script keeps TRL's log lines, with at most [`PRINTED`] of this package's metrics among TRL's. All metrics
go where TRL sends them: to the trackers (`report_to`) and into `trainer_state.json`.
"""

import json
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import datasets
import huggingface_hub.utils
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import logging

from ...utils.nonfatal import nonfatal
from ...utils.progress import progress

SHOWS_PER_RUN = 10  # number of times that completions are shown, apart from the last step
_PROMPT_WIDTH = 60
_COMPLETION_WIDTH = 100
_ARGUMENT_WIDTH = 60
_DIALOGUE_LINES = 16  # of one episode
# Metrics that every run has in addition to stock TRL's, and those of them that a script prints. Metrics of an
# algorithm or an option that the user chose (`t_spmo/`, `dynamic_sampling/`, `v_star`) are printed like stock TRL's.
_EVERY_RUN = ("efficiency/", "generation/", "groups/", "memory/", "prefix_sharing/", "throughput/", "time/", "tokens/")
PRINTED = {
    "efficiency/prompt_redundancy",
    "memory/forward_backward_peak_mib",
    "prefix_sharing/policy/tokens_fraction",
    "throughput/tokens_per_s",
    "time/forward_backward_s",
    "time/generate_s",
}


def number(value: float | None) -> str:
    """Three decimals, or four significant digits if three decimals would show nothing.

    A value that was not measured is `-`: NaN, and `None`, which transformers logs for NaN.
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


def _duration(seconds: float) -> str:
    return tqdm.format_interval(round(seconds)).removeprefix("0")


class TimeLeft(TrainerCallback):
    """Prints the time left of a training with [`progress`]; in a terminal transformers' own bar shows it."""

    def __init__(self, task: str):
        self.task = task
        self._bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        hidden = not state.is_world_process_zero or sys.stderr.isatty()
        self._bar = progress(self.task, state.max_steps, "steps", initial=state.global_step, hidden=hidden)

    def on_step_end(self, args, state, control, **kwargs):
        self._bar.update()

    def on_train_end(self, args, state, control, **kwargs):
        self._bar.close()


def _quoted(text: Any, width: int, end: bool = False) -> str:
    """One line, cut to its beginning or its `end`; the last message of a conversation, the name of an image."""
    if isinstance(text, Sequence) and text and isinstance(text[-1], Mapping):
        text = text[-1].get("content", "")
    if isinstance(text, list):  # a message in parts
        text = "".join(part.get("text") or f"<{part.get('type')}>" for part in text)
    quoted = json.dumps(text, ensure_ascii=False, default=str)
    if len(quoted) <= width:
        return quoted
    return f"{quoted[0]}…{quoted[2 - width :]}" if end else f"{quoted[: width - 2]}…{quoted[-1]}"


def completion_lines(
    prompts: Sequence, completions: Sequence, rewards: Mapping[str, Sequence[float]], count: int
) -> list[str]:
    """A line each for `count` completions, and for an episode with tools its [`dialogue`].

    They go from the lowest to the highest reward, spread evenly. `prompts` and `completions` are texts or
    conversations; each reward function has one value per completion, NaN if it returned none.
    """
    totals = []  # of each completion
    for values in zip(*rewards.values(), strict=True):
        totals.append(sum(value for value in values if not math.isnan(value)))
    if len(rewards) == 1:
        rewards = {"reward": next(iter(rewards.values()))}
    order = sorted(range(len(totals)), key=totals.__getitem__)
    count = min(count, len(order))
    lines = []
    for position in range(count):
        i = order[round(position * (len(order) - 1) / max(count - 1, 1))]
        earned = ", ".join(f"{name} {number(values[i])}" for name, values in rewards.items())
        prompt = _quoted(prompts[i], _PROMPT_WIDTH, end=True)  # solved problems may stand before the question
        if _is_episode(completions[i]):
            lines += [f"    {earned}  {prompt}", *dialogue(completions[i])]
        else:
            lines.append(f"    {earned}  {prompt} → {_quoted(completions[i], _COMPLETION_WIDTH)}")
    return lines


def _is_episode(completion: Any) -> bool:
    """Whether the completion is a conversation with tools, rather than one answer."""
    if isinstance(completion, str) or not completion:
        return False
    return len(completion) > 1 or bool(completion[0].get("tool_calls"))


def dialogue(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each message, call and result; for a long episode its beginning and its end."""
    lines = []
    for message in messages:
        speaker = "tool" if message["role"] == "tool" else "model"
        if message.get("content") or not message.get("tool_calls"):
            lines.append((speaker, _quoted([message], _COMPLETION_WIDTH)))
        for call in message.get("tool_calls") or []:
            function = call.get("function") or call
            arguments = function.get("arguments") or {}
            if isinstance(arguments, Mapping):
                arguments = ", ".join(f"{name}={_quoted(value, _ARGUMENT_WIDTH)}" for name, value in arguments.items())
            lines.append(("calls", f"{function.get('name')}({arguments})"))
    if len(lines) > _DIALOGUE_LINES:
        half = _DIALOGUE_LINES // 2
        lines[half:-half] = [("", f"… {len(lines) - 2 * half} lines …")]
    return [f"      {speaker:<6} {text}" for speaker, text in lines]


class TerminalCallback(TrainerCallback):
    """Prints one line per logging step on the main rank, and now and then lines on the last completions.

    `completions` returns those lines. The first and the last step are always logged (unless `logging_strategy` is
    `"no"`). The estimate of the time left starts with the first step, after any measurement before it. A line that
    cannot be printed is a warning.
    """

    def __init__(self, completions: Callable[[], Iterable[str]]):
        self._completions = completions

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = None
        self._first_step = state.global_step
        self._steps = 0
        self._seconds = 0.0
        self._next_show = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._step_began = time.perf_counter()
        self._began = self._began or self._step_began

    def on_optimizer_step(self, args, state, control, **kwargs):
        # Not at the step's end: other callbacks measure accuracy there before this one is called.
        self._seconds += time.perf_counter() - self._step_began

    def on_step_end(self, args, state, control, **kwargs):
        self._steps += 1
        # On every rank: logging sums the loss over them.
        if args.logging_strategy != "no" and (state.global_step == self._first_step + 1 or _is_last(state, control)):
            control.should_log = True

    @nonfatal("a line on the terminal")
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        step = state.global_step
        steps = state.max_steps
        lines = []
        if "train_runtime" in logs:
            lines.append(f"trained to step {step} in {_duration(logs['train_runtime'])}")
            lines += phase_line(state.log_history)
        elif "eval_reward" in logs:
            lines.append(f"step {step}: eval_reward {number(logs['eval_reward'])}")
        elif "loss" in logs and self._steps:
            seconds_left = (time.perf_counter() - self._began) / (step - self._first_step) * (steps - step)
            accuracy = f"  accuracy {100 * logs['accuracy']:.1f}%" if "accuracy" in logs else ""
            shown = "reward" if "reward" in logs else "loss"  # a trainer without rewards learns from its data
            figures = f"{shown} {number(logs[shown])}{accuracy}  {self._seconds / self._steps:.2f} s/step"
            lines.append(f"step {step:>{len(str(steps))}}/{steps}  {figures}  {_duration(seconds_left)} left")
            self._steps = 0
            self._seconds = 0.0
            if "reward" in logs and (step >= self._next_show or _is_last(state, control)):  # completions are new
                self._next_show = step + steps / SHOWS_PER_RUN
                lines += self._completions()
        for line in lines:
            print(line, flush=True)


def phase_line(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line with the mean seconds of each phase of an optimizer step, the largest first; none without such metrics.

    Every entry of the log has means over the steps since the last one.
    """
    totals: dict[str, float] = defaultdict(float)
    steps = 0
    for entry in history:
        phases = {name: value for name, value in entry.items() if re.fullmatch(r"time/\w+_s", name)}
        if not phases:
            continue
        for name, value in phases.items():
            totals[name.removeprefix("time/").removesuffix("_s")] += value * (entry["step"] - steps)
        steps = entry["step"]
    if not steps:
        return []
    means = {name: total / steps for name, total in totals.items() if total}
    ordered = sorted(means, key=means.get, reverse=True)
    return [f"seconds of a step: {', '.join(f'{name} {number(means[name])}' for name in ordered)}"]


def _is_last(state, control) -> bool:
    return state.global_step >= state.max_steps or control.should_training_stop


def printed_metrics(logs: dict[str, Any]) -> dict[str, Any]:
    """The part of `logs` that a script prints: all metrics of stock TRL, and [`PRINTED`]."""
    printed = {}
    for name, value in logs.items():
        metric = name.removeprefix("eval_")
        if metric in PRINTED or not metric.startswith(_EVERY_RUN):
            printed[name] = value
    return printed


class _BriefPrinterCallback(PrinterCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=printed_metrics(logs or {}), **kwargs)


class _BriefProgressCallback(ProgressCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=printed_metrics(logs or {}), **kwargs)


def print_briefly(trainer: Any) -> None:
    """Let transformers' own printing callback of `trainer` print [`printed_metrics`] only.

    The other callbacks get all metrics. The printing callback keeps its place among the callbacks, and
    `remove_callback(PrinterCallback)` still finds it.
    """
    brief = {PrinterCallback: _BriefPrinterCallback, ProgressCallback: _BriefProgressCallback}
    for callback in trainer.callback_handler.callbacks:
        callback.__class__ = brief.get(type(callback), type(callback))


def use_terminal(trainer: Any) -> None:
    """Replace `trainer`'s printing callback by a [`TerminalCallback`]; a notebook's table stays as it is.

    Call it after all callbacks that may stop training were added.
    """

    def completions() -> list[str]:
        if not hasattr(trainer.args, "show_completions"):  # a trainer without rewards
            return []
        logs = trainer._logs  # that TRL keeps for its own table of completions, which it prints with log_completions
        count = 0 if trainer.log_completions else trainer.args.show_completions
        rewards = {name: list(values) for name, values in logs["rewards"].items()}
        return completion_lines(list(logs["prompt"]), list(logs["completion"]), rewards, count)

    if trainer.pop_callback(PrinterCallback) or trainer.pop_callback(ProgressCallback):
        trainer.add_callback(TerminalCallback(completions))


def no_bars_in_files() -> None:
    """Switch the bars of the Hugging Face libraries off if standard error is no terminal."""
    if not sys.stderr.isatty():
        for library in (datasets, huggingface_hub.utils):
            library.disable_progress_bars()
        logging.disable_progress_bar()
