"""What a recipe prints while training, and a script that asks for it: one line per logging step.

All metrics go where TRL sends them: to the trackers (`report_to`) and into `trainer_state.json`.
"""

import math
import sys
import time

import datasets
import huggingface_hub.utils
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerState
from transformers.utils import logging

from ...utils.nonfatal import nonfatal


def _number(value: float | None) -> str:
    """Three decimals, or four significant digits if three decimals would show nothing.

    A value that was not measured is `-`: NaN, and `None`, which transformers logs for NaN.
    """
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.3f}" if value == 0 or 1e-3 <= abs(value) < 1e3 else f"{value:.4g}"


def _figures(logs: dict[str, float], *names: str) -> list[str]:
    """Name and value of those that were logged, each once."""
    return [f"{name} {_number(logs[name])}" for name in dict.fromkeys(names) if name in logs]


def _duration(seconds: float) -> str:
    return tqdm.format_interval(round(seconds)).removeprefix("0")


class EfficientProgress(TrainerCallback):
    """Prints one line per logging step on the main rank: step, loss, reward, accuracy, seconds, time left.

    A trainer of this package prints these lines in place of transformers' bar and dictionaries; another one in
    addition to them. Recipes use it. All metrics still go to the trackers and into `trainer_state.json`.

    The first and the last step are always logged (unless `logging_strategy` is `"no"`). The seconds of a step are a
    mean over the steps since the first one began, with what is measured between them; an accuracy before training is
    not counted. A line that cannot be printed is a warning.

    Example:

        trainer = EfficientGRPOTrainer(model, reward_funcs=reward, callbacks=[EfficientProgress()], ...)
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self._began = None
        self._first_step = state.global_step

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = self._began or time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        # On every rank: logging sums the loss over them.
        is_last = state.global_step >= state.max_steps or control.should_training_stop
        if args.logging_strategy != "no" and (is_last or state.global_step == self._first_step + 1):
            control.should_log = True

    @nonfatal("a line on the terminal")
    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        step = state.global_step
        best = (args.metric_for_best_model or "loss").removeprefix("eval_")
        evaluated = _figures(logs, "eval_loss", "eval_reward", f"eval_{best}")
        if "train_runtime" in logs:
            print(f"trained to step {step} in {_duration(logs['train_runtime'])}", flush=True)
        elif evaluated:
            print(f"step {step}: {'  '.join(evaluated)}", flush=True)
        elif "loss" in logs and step > self._first_step:
            print(self._line(state, logs), flush=True)

    def _line(self, state: TrainerState, logs: dict[str, float]) -> str:
        """The line of a training step."""
        step = state.global_step
        last = str(state.max_steps)
        figures = [f"step {step:>{len(last)}}/{last}", *_figures(logs, "loss", "reward")]
        if "accuracy" in logs:
            percent = 100 * logs["accuracy"]
            figures.append(f"accuracy {percent:.1f}%")
        seconds = (time.perf_counter() - self._began) / (step - self._first_step)
        left = seconds * (state.max_steps - step)
        figures += [f"{seconds:.2f} s/step", f"{_duration(left)} left"]
        return "  ".join(figures)


def use_terminal(trainer: Trainer) -> None:
    """Replace `trainer`'s printing callback by an [`EfficientProgress`]; a notebook's table stays as it is.

    Call it after all callbacks that may stop training were added.
    """
    if trainer.pop_callback(PrinterCallback) or trainer.pop_callback(ProgressCallback):
        trainer.add_callback(EfficientProgress())


def print_once(trainer: Trainer) -> None:
    """If a user's callbacks have an [`EfficientProgress`], remove those of transformers that print the same."""
    if any(isinstance(callback, EfficientProgress) for callback in trainer.callback_handler.callbacks):
        trainer.pop_callback(PrinterCallback)
        trainer.pop_callback(ProgressCallback)


def no_bars_in_files() -> None:
    """Switch the bars of the Hugging Face libraries off if standard error is no terminal."""
    if not sys.stderr.isatty():
        for library in (datasets, huggingface_hub.utils):
            library.disable_progress_bars()
        logging.disable_progress_bar()
