"""What a recipe keeps for its page, and the page itself, at each measurement and at the end."""

import logging
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from ...utils.nonfatal import nonfatal
from ...utils.redaction import text_for_others
from ..report.keep import write_completions
from ..report.page import NAME, write_report
from .record import RunRecord

_MOST_WARNINGS = 50


class KeptWarnings(logging.Handler):
    """A context in which the texts of warnings are kept, each once."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        # transformers' logger hands nothing on to the root.
        self._loggers = [logging.getLogger(), logging.getLogger("transformers")]

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage().removeprefix("[RANK 0] ")  # of accelerate's loggers
        text = text_for_others(" ".join(message.split()))[:1000]
        if text not in self.texts and len(self.texts) < _MOST_WARNINGS:
            self.texts.append(text)

    def __enter__(self):
        for logger in self._loggers:
            logger.addHandler(self)
        return self

    def __exit__(self, *_):
        for logger in self._loggers:
            logger.removeHandler(self)


@nonfatal("the page of the run")
def write_page(folder: str | Path, is_published: bool) -> Path | None:
    """Write `report.html` of the run in `folder`; its path on the main rank, `None` on the others.

    If the folder is published, the page has no prompts and completions.
    """
    if not PartialState().is_main_process:
        return None
    path = Path(folder) / NAME
    write_report([Path(folder)], path, with_completions=not is_published)
    return path


class RunPage(TrainerCallback):
    """Keeps completions whenever metrics are logged, and writes the page of the run when something was measured.

    The page of a run that is pushed to the Hub has no prompts and completions, because the whole folder is published.
    """

    def __init__(self, trainer: Any, record: RunRecord, warnings: KeptWarnings):
        self.trainer = trainer
        self.record = record
        self.warnings = warnings
        self.folder = Path(trainer.args.output_dir)
        if hasattr(trainer, "generation_batches"):
            trainer.generation_batches.keeps = True
        card = getattr(trainer, "card_info", None)  # trainers of TRL's own have none
        # Those of a resumed run's first part, and of the trainer's construction.
        self._earlier = [*(record.content.get("warnings") or []), *([] if card is None else card.warnings)]

    def on_train_begin(self, args, state, control, **kwargs):
        if args.push_to_hub:  # a page with completions may be there, of an earlier part that was not pushed
            self.write()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            self._keep_completions(state.global_step)
        if "accuracy" in logs or any(name.startswith("eval_") for name in logs):
            self.write()

    @nonfatal("keeping completions")
    def _keep_completions(self, step: int) -> None:
        batches = getattr(self.trainer, "generation_batches", None)
        if batches is not None and batches.last is not None:
            drawn, batches.last = batches.last, None
            write_completions(self.folder, step, drawn)

    @nonfatal("the page of the run")
    def write(self) -> Path | None:
        """[`write_page`] of what the run has left so far."""
        texts = dict.fromkeys([*self._earlier, *self.warnings.texts])
        trainer = self.trainer
        about = {}
        if hasattr(trainer, "startup"):
            about["startup"] = trainer.startup.block
        if hasattr(trainer, "reward_func_names"):
            about["reward_weights"] = dict(
                zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True)
            )
        self.record.put(history=trainer.state.log_history, warnings=list(texts), **about)
        return write_page(self.folder, self.trainer.args.push_to_hub)
