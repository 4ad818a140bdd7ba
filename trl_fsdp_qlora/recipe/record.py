"""What a run does beside training: held-out accuracy on the way, the record in `metrics.json`, and a limit of its
seconds.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast
from datasets import Dataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..checkpoints import disk
from ..evaluation.accuracy import Evaluation, evaluate
from ..run.import_path import is_import_path
from ..run.nonfatal import nonfatal
from ..run.plain import plain
from .arguments import ScriptArguments
from .episodes import agent_of
from .script import say

# Fields that name data, or code by its file.
FILES = ("dataset", "eval_dataset", "environment", "tool_format")
# Where this machine has the data of a run; Transformers uploads nothing that begins with an underscore.
PATHS = "_paths.json"


@nonfatal("the record of where the data lies")
def keep_paths(output_dir: str | Path, script: ScriptArguments) -> None:
    """Note where files and folders with data lie, of which `metrics.json`, which may be published, has the name
    alone.
    """
    paths = {}
    for name in FILES:
        given = getattr(script, name, None) or ""
        file, colon, function = given.rpartition(":") if is_import_path(given) else (given, "", "")
        if os.path.exists(file):
            paths[name] = f"{os.path.abspath(file)}{colon}{function}"
    if paths and PartialState().is_main_process:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        disk.write_json(Path(output_dir) / PATHS, paths)


def kept_paths(output_dir: str | Path) -> dict[str, str]:
    """What [`keep_paths`] has noted in the folder of a run and is still there."""
    if not Path(output_dir, PATHS).is_file():
        return {}
    paths = disk.read_json(Path(output_dir, PATHS))
    return {
        name: path for name, path in paths.items() if os.path.exists(path) or os.path.exists(path.rpartition(":")[0])
    }


class RunRecord:
    """`metrics.json` of a run: settings, accuracy before and after, seconds, and the curves; written as it goes.

    A resumed run keeps what its first part measured.
    """

    def __init__(self, output_dir: str | Path):
        self.path = Path(output_dir) / "metrics.json"
        self.content: dict[str, Any] = {}
        if self.path.is_file():
            try:
                self.content = disk.read_json(self.path)
            except disk.CheckpointError as error:
                say(f"{self.path}: {error}; the record starts anew")

    @nonfatal("metrics.json")
    def put(self, **values) -> None:
        self.content |= plain(values)
        if PartialState().is_main_process:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            disk.write_json(self.path, self.content)

    @nonfatal("the picture of the run")
    def draw(self) -> Path | None:
        """Reward, accuracy and step time over the run, as a picture; `None` without matplotlib."""
        try:
            from ..evaluation.plots import draw_run
        except ImportError:
            say("no picture: matplotlib is not installed (pip install 'trl-fsdp-qlora[plots]')")
            return None
        return draw_run(self.content, self.path.with_name("training.png"))


def format_result(result: dict[str, Any]) -> str:
    """One line for an [`Evaluation`] kept as a dict."""
    return str(Evaluation(**{**result, "interval": tuple(result["interval"])}))


class AccuracyCallback(TrainerCallback):
    """Measures accuracy on the prompts `test` when training begins and every `accuracy_steps` optimizer steps, on
    every rank.

    Training begins with the model prepared, so a sharded one can generate; a run that resumes keeps what it measured
    then. What is measured between steps is logged with that step's metrics, and stands on the card.
    """

    def __init__(self, trainer: Any, script: ScriptArguments, test: Dataset, record: RunRecord):
        self.trainer = trainer
        self.script = script
        self.test = test
        self.record = record
        self.seconds_before = 0.0
        self.agent = agent_of(script, getattr(trainer.args, "chat_template_kwargs", None))

    def measure(self, description: str = "accuracy", samples: int = 0) -> Evaluation:
        """Held-out accuracy as it is now, on every rank."""
        trainer = self.trainer
        script = self.script
        args = self.trainer.args
        how = {"max_new_tokens": args.max_completion_length, "answer_format": script.answer_format, "seed": args.seed}
        how |= {"batch_size": script.accuracy_batch_size, "progress": not args.disable_tqdm, "samples": samples}
        with trainer.clock.phase("accuracy"), trainer.generating() as (model, lockstep):
            how |= {"description": description, "lockstep": lockstep}
            if self.agent is not None:
                how |= {"agent": self.agent, "max_tool_turns": args.max_tool_calling_iterations}
            return evaluate(model, trainer.processing_class, self.test, **how)

    @nonfatal("the model card")
    def fill_card(self, last: Evaluation, step: int, when: str | None = None) -> None:
        """Put what was measured before training and `last`, at `step`, on the card."""
        card = self.trainer.card_info
        kind = "held-out" if self.script.accuracy_on == "test" else "validation"
        measured = {"before": self.record.content.get("before"), when or f"after {step} steps": last.as_dict()}
        card.results = {f"{kind} accuracy, {name}": format_result(each) for name, each in measured.items() if each}
        card.accuracy = last.as_dict()
        card.accuracy_on = self.script.accuracy_on
        card.accuracy_step = step

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0 and "before" not in self.record.content:
            before = self.measure("accuracy before training")
            self.seconds_before = before.seconds
            say(f"before: {before}")
            self.record.put(before=before.as_dict())

    def on_step_end(self, args, state, control, **kwargs):
        if not self.script.accuracy_steps or state.global_step % self.script.accuracy_steps:
            return
        result = self.measure()
        metrics = self.trainer._metrics["train"]
        counts = {"accuracy": result.correct, "accuracy/strict": result.strict, "accuracy/lenient": result.lenient}
        for name, count in counts.items():
            metrics[name].append(count / result.n)
        metrics["accuracy/n"].append(result.n)
        self.fill_card(result, state.global_step)
        control.should_log = True


class TimeLimit(TrainerCallback, ExportableState):
    """Stops training after the optimizer step in which its seconds have reached a limit: to compare methods at equal
    seconds.

    Seconds run from the beginning of an optimizer step to its end, rollouts included; what is measured or saved
    between steps is not counted, nor is A*-PO's first stage. They stand in the checkpoints, so a resumed run has what
    is left. The first rank's `clock` counts: all ranks stop after the same step, which leaves a checkpoint.
    """

    def __init__(self, seconds: float, clock=time.perf_counter):
        self.seconds = seconds
        self.clock = clock
        self.spent = 0.0

    @property
    def reached(self) -> bool:
        return self.spent >= self.seconds

    def state(self) -> dict:
        return {"args": {"seconds": self.seconds}, "attributes": {"spent": self.spent}}

    def on_train_begin(self, args, state, control, **kwargs):
        # A checkpoint of a run without a limit has no place for it, and Transformers writes into what is there.
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.spent = kept["attributes"]["spent"]

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = self.clock()

    def on_step_end(self, args, state, control, **kwargs):
        # Apple's GPUs have no float64, and no ranks to agree with.
        device = torch.device("cpu") if args.device.type == "mps" else args.device
        spent = torch.tensor(self.spent + self.clock() - self._began, dtype=torch.float64, device=device)
        self.spent = float(broadcast(spent))
        if self.reached:
            control.should_training_stop = control.should_save = control.should_log = True
            with nonfatal("a line on the terminal"):
                limit = f"max_train_seconds={self.seconds:g}"
                say(f"{self.spent:.0f} s of training: {limit} stops it at step {state.global_step}")
