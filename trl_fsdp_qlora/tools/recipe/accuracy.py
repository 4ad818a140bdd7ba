"""The held-out accuracy of a run: before, between its steps and after."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from datasets import Dataset
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from trl.models import unwrap_model_for_generation

from ...compat.transformers import model_name, quantization_of, tokenizer_of
from ...trainers.run.checkpoints import describe_data, differences
from ...utils.nonfatal import nonfatal
from ...utils.plain import plain
from ...utils.redaction import portable
from ..evaluation.accuracy import Evaluation, evaluate
from .arguments import ScriptArguments
from .checks import agent_of, judge_of
from .record import CODE, RunRecord
from .script import say


def measured_on(trainer: Any, script: ScriptArguments, test: Dataset, has_agent: bool) -> dict[str, Any]:
    """What an accuracy depends on apart from the trained weights: only figures for which it is equal make a pair."""
    args = trainer.args
    model = trainer.accelerator.unwrap_model(trainer.model)
    tokenizer = tokenizer_of(trainer.processing_class)
    quantization = plain(quantization_of(model.config)) or {}
    depends_on = {
        "base": Path(model_name(model)).name,
        "problems": describe_data(test, rows=len(test)),
        "chat template": xxhash.xxh3_64(str(tokenizer.chat_template).encode()).hexdigest(),
        "answer_format": script.answer_format,
        "max_completion_length": completion_length(args, script),
        "dtype": model.dtype,
        "mixed precision": trainer.accelerator.mixed_precision,
        "quantization": {name: value for name, value in quantization.items() if not name.startswith("_")},
    }
    for name in CODE:
        depends_on[name] = portable(vars(script)[name])
    for name in ("max_tool_calling_iterations", "chat_template_kwargs"):
        depends_on[name] = vars(args).get(name) if has_agent else None
    return plain(depends_on)


def completion_length(args: TrainingArguments, script: ScriptArguments) -> int:
    """Length limit of a measured completion: a field of the config, or of the script for trainers that draw none."""
    return vars(args).get("max_completion_length") or vars(script)["max_completion_length"]


def can_measure(trainer: Any) -> bool:
    """Whether accuracy can be measured: a trainer that draws nothing cannot generate with sharded weights."""
    return hasattr(trainer, "generating") or not (trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled())


@contextmanager
def _generating(trainer: Any) -> Iterator[tuple[nn.Module, bool]]:
    """A model to generate with, and whether a forward is collective."""
    if hasattr(trainer, "generating"):
        with trainer.clock.phase("accuracy"), trainer.generating() as ready:
            yield ready
    else:
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
            yield model, False


def format_result(result: dict[str, Any]) -> str:
    """One line for an [`Evaluation`] that is stored as a dict."""
    return str(Evaluation(**{**result, "interval": tuple(result["interval"])}))


class AccuracyCallback(TrainerCallback):
    """Measures accuracy on the prompts `test` when training begins and every `accuracy_steps` optimizer steps.

    Every rank measures. When training begins the model is prepared, so a sharded one can generate. A resumed run keeps
    its first measurement, unless it measures on something else now, see [`begin`]. Measurements between steps are
    logged with their step's metrics, and are on the card.
    """

    def __init__(self, trainer: Any, script: ScriptArguments, test: Dataset, record: RunRecord):
        self.trainer = trainer
        self.script = script
        self.test = test
        self.record = record
        self.seconds_before = 0.0
        self.agent = agent_of(
            script, vars(trainer.args).get("chat_template_kwargs")
        )  # some trainers have no such field
        self.judge = judge_of(script)

    def begin(self, step: int) -> None:
        """Leave the accuracy before training out if what is measured from `step` on is something else."""
        content = self.record.content
        now = measured_on(self.trainer, self.script, self.test, self.agent is not None)
        changed = differences(content.get("measured_on") or now, now)
        if changed and content.pop("before", None):
            content["accuracy_since"] = step
            because = "; ".join(changed)
            say(f"the accuracy before training is left out: it was measured on something else ({because})")
        self.record.put(measured_on=now)

    def measure(self, description: str = "accuracy", samples: int = 0) -> Evaluation:
        """Measure the held-out accuracy of the current model, on every rank."""
        trainer = self.trainer
        script = self.script
        args = trainer.args
        with _generating(trainer) as (model, synced_gpus):
            return evaluate(
                model,
                trainer.processing_class,
                self.test,
                max_new_tokens=completion_length(args, script),
                answer_format=script.answer_format,
                seed=args.seed,
                batch_size=script.accuracy_batch_size,
                progress=not args.disable_tqdm,
                samples=samples,
                description=description,
                synced_gpus=synced_gpus,
                agent=self.agent,
                judge=self.judge,
                max_tool_turns=None if self.agent is None else args.max_tool_calling_iterations,
            )

    @nonfatal("the model card")
    def fill_card(self, last: Evaluation, step: int, when: str | None = None) -> None:
        """Put the accuracy before training, and `last` at `step`, on the card; trainers of TRL's own have none.

        The card's example becomes a problem that `last` had right.
        """
        card = getattr(self.trainer, "card_info", None)
        if card is None:
            return
        kind = "held-out" if self.script.accuracy_on == "test" else "validation"
        measured = {"before": self.record.content.get("before"), when or f"after {step} steps": last.as_dict()}
        results = {name: format_result(each) for name, each in measured.items() if each}
        card.results = {f"{kind} accuracy, {name}": result for name, result in results.items()}
        card.accuracy = last.as_dict()
        card.accuracy_on = self.script.accuracy_on
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
