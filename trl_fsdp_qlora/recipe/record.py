"""What a run measures beside training: held-out accuracy on the way, and the record in `metrics.json`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from ..checkpoints import disk
from ..run.nonfatal import nonfatal
from ..run.plain import plain
from .evaluation import Evaluation
from .script import say


class AccuracyCallback(TrainerCallback):
    """Measures held-out accuracy when training begins and every `steps` optimizer steps, on every rank.

    Training begins with the model prepared, so a sharded one can generate. What is measured between steps is logged
    with that step's metrics.

    Args:
        measure: returns an [`Evaluation`]; called on every rank.
        begin: is given the one from before the first step; a run that resumes has none.
        steps: interval; 0 never measures between steps.
        metrics: gives the lists that the trainer logs the means of.
        on_the_way: is given what was measured between steps, and the step.
    """

    def __init__(
        self,
        measure: Callable[..., Evaluation],
        begin: Callable[[Evaluation], None] | None,
        steps: int,
        metrics: Callable[[], dict[str, list]],
        on_the_way: Callable[[Evaluation, int], None] | None = None,
    ):
        self.measure = measure
        self.begin = begin
        self.steps = steps
        self.metrics = metrics
        self.on_the_way = on_the_way

    def on_train_begin(self, args, state, control, **kwargs):
        if self.begin is not None and state.global_step == 0:
            before = self.measure(description="accuracy before training")
            with nonfatal("the accuracy metric"):
                self.begin(before)

    def on_step_end(self, args, state, control, **kwargs):
        if self.steps and state.global_step % self.steps == 0:
            self._keep(self.measure(), state.global_step)
            control.should_log = True

    @nonfatal("the accuracy metric")
    def _keep(self, result: Evaluation, step: int) -> None:
        shares = {"accuracy": result.correct, "accuracy/strict": result.strict, "accuracy/lenient": result.lenient}
        for name, count in shares.items():
            self.metrics()[name].append(count / result.n)
        self.metrics()["accuracy/n"].append(result.n)
        if self.on_the_way is not None:
            self.on_the_way(result, step)


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

    def is_complete(self, step: int | None) -> bool:
        """Whether a run that ended at `step` has measured and saved everything; `None` for one that has not ended."""
        history = self.content.get("history") or [{}]
        # Records of older versions do not say, and have `after` last.
        last = history[-1].get("step") if "after" in self.content else None
        return step is not None and self.content.get("finished_step", last) == step

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
            from .plots import draw_run
        except ImportError:
            say("no picture: matplotlib is not installed (pip install 'trl-fsdp-qlora[plots]')")
            return None
        return draw_run(self.content, self.path.with_name("training.png"))


def format_result(result: dict[str, Any]) -> str:
    """One line for an [`Evaluation`] kept as a dict."""
    return str(Evaluation(**{**result, "interval": tuple(result["interval"])}))
