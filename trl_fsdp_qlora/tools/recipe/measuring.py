"""The held-out accuracy of a run: before, between its steps and after."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from datasets import Dataset
from jinja2 import TemplateError
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ...compat import trl as trls
from ...utils.nonfatal import nonfatal
from ..evaluation.accuracy import Evaluation, evaluate, format_result
from ..evaluation.drawing import MeasuringTrainer
from ..evaluation.measurement import Measurement
from .arguments import ConfigError, ScriptArguments
from .checks import UserCode, user_code
from .record import RunRecord
from .script import say

if TYPE_CHECKING:
    from ...trainers.trainer_run import TrainerRun


def completion_length(args: TrainingArguments, script: ScriptArguments) -> int:
    """Length limit of a measured completion: a field of the config, or of the script for trainers that draw none."""
    return vars(args).get("max_completion_length") or vars(script)["max_completion_length"]


def measurement_of(script: ScriptArguments, args: TrainingArguments, code: UserCode) -> Measurement:
    """How a recipe measures: with the prompts and the limits of its training."""
    settings = vars(args)  # not every trainer has every field
    return Measurement(
        max_new_tokens=completion_length(args, script),
        batch_size=script.accuracy_batch_size,
        seed=args.seed,
        answer_format=script.answer_format,
        template_options=settings.get("chat_template_kwargs") or {},
        agent=code.agent,
        max_tool_turns=settings.get("max_tool_calling_iterations"),
        judge=code.judge,
    )


_RENDERED = 64  # prompts that are rendered before a model is loaded


def check_prompts(prompts: Dataset, tokenizer: PreTrainedTokenizerBase, measurement: Measurement) -> None:
    """Refuse prompts that the chat template cannot render, before a model is loaded.

    Prompts with images need the model's processor, and those of environments a reset, so training renders them first.

    Raises:
        ConfigError: the message has the row and the template's own reason.
    """
    if measurement.agent is not None or "images" in prompts.column_names:
        return
    trainer = MeasuringTrainer(tokenizer, measurement)
    for row in prompts.select(range(min(_RENDERED, len(prompts)))):
        try:
            trainer.prompt_ids([row])
        except TemplateError as error:
            raise ConfigError(
                f"the chat template cannot render the prompt of row {row['row'] + 1}: {error}; its options are "
                "chat_template_kwargs"
            ) from error


def can_measure(trainer: "TrainerRun") -> bool:
    """Whether accuracy can be measured: a trainer that draws nothing cannot generate with sharded weights."""
    return hasattr(trainer, "generating") or not (trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled())


@contextmanager
def _generating(trainer: "TrainerRun") -> Iterator[tuple[nn.Module, bool]]:
    """A model to generate with, and whether a forward is collective."""
    if hasattr(trainer, "generating"):
        with trainer.clock.phase("accuracy"), trainer.generating() as ready:
            yield ready
    else:
        with trls.unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
            yield model, False


class AccuracyCallback(TrainerCallback):
    """Measures accuracy on the prompts `test` when training begins and every `accuracy_steps` optimizer steps.

    Every rank measures. When training begins the model is prepared, so a sharded one can generate. A resumed run keeps
    its first measurement. Measurements between steps are logged with their step's metrics, and are on the card.
    """

    def __init__(self, trainer: "TrainerRun", script: ScriptArguments, test: Dataset, record: RunRecord):
        self.trainer = trainer
        self.script = script
        self.test = test
        self.record = record
        self.seconds_before = 0.0
        self.measurement = measurement_of(script, trainer.args, user_code(script, vars(trainer.args)))

    def measure(self, description: str = "accuracy", samples: int = 0) -> Evaluation:
        """Measure the held-out accuracy of the current model, on every rank."""
        trainer = self.trainer
        with _generating(trainer) as (model, synced_gpus):
            return evaluate(
                model,
                trainer.processing_class,
                self.test,
                replace(self.measurement, samples=samples),
                synced_gpus=synced_gpus,
                description=None if trainer.args.disable_tqdm else description,
            )

    def finish(self) -> str:
        """Measure after training, and put it into the record and on the card; a line with before and after."""
        after = self.measure("accuracy after training", self.script.accuracy_samples)
        self.record.put(after=after.as_dict())
        self.fill_card(after, self.trainer.state.global_step, "after")
        measured = [self.record.content[when] for when in ("before", "after") if when in self.record.content]
        return "  ->  ".join(map(format_result, measured))

    @nonfatal("the model card")
    def fill_card(self, last: Evaluation, step: int, when: str | None = None) -> None:
        """Put the accuracy before training, and `last` at `step`, on the card; trainers of TRL's own have none.

        The card's example becomes a problem that `last` had right.
        """
        card = getattr(self.trainer, "card_info", None)
        if card is None:
            return
        measured = {"before": self.record.content.get("before"), when or f"after {step} steps": last.as_dict()}
        results = {name: format_result(each) for name, each in measured.items() if each}
        card.results = {f"held-out accuracy, {name}": result for name, result in results.items()}
        card.accuracy = last.as_dict()
        card.accuracy_step = step
        if last.first_right is not None:
            card.quickstart_prompt = self.test[last.first_right]["prompt"]

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
            if count is not None:
                metrics[name].append(count / result.n)
        metrics["accuracy/n"].append(result.n)
        self.fill_card(result, state.global_step)
        control.should_log = True
