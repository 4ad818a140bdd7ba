"""A recipe's run: build the trainer, measure, train, measure again, save."""

import inspect
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import ModelConfig, get_quantization_config

from ...compat import trl as trls
from ...errors import UserError
from ...trainers.reporting.terminal import use_terminal
from ...trainers.saving.checkpoints import last_step, resolve_resume, step_of
from ...trainers.saving.stopping import stopping_after_step
from ...utils.nonfatal import nonfatal
from ...utils.ranks import on_main
from ...utils.threads import fit_threads
from ..evaluation.accuracy import Evaluation, evaluate, format_result
from ..run.launch import launch_words
from ..run.one_line import pop_options
from .arguments import ConfigError
from .checks import Recipe, lora_config
from .record import RunPage, RunRecord, next_commands
from .rendering import load_processing
from .script import say

if TYPE_CHECKING:
    from ...trainers.trainer_run import TrainerRun
    from ..planning.plan import MemoryPlan


def model_arguments(config: TrainingArguments, model: ModelConfig, images: bool = False) -> dict[str, object]:
    """A trainer's arguments by name for a recipe's model; the loading options go into `config.model_init_kwargs`."""
    loading = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    }
    config.model_init_kwargs = loading | (config.model_init_kwargs or {})
    return {
        "processing_class": load_processing(model.model_name_or_path, model.model_revision, images),
        "quantization_config": get_quantization_config(model),
        "peft_config": lora_config(model),
    }


def trainer_arguments(cls: type[Trainer], recipe: Recipe, train: Dataset) -> dict[str, object]:
    """Returns the arguments by name with which a trainer of `cls` is built for a recipe.

    Raises:
        ConfigError: the recipe has tools or an environment, and trainers of `cls` support none.
    """
    code = recipe.code
    arguments = {
        "model": recipe.model.model_name_or_path,
        "reward_funcs": code.rewards,
        "args": recipe.config,
        "train_dataset": train,
        **model_arguments(recipe.config, recipe.model, "images" in train.column_names),
    }
    if code.agent is not None:
        if "environment_factory" not in inspect.signature(cls.__init__).parameters:
            raise ConfigError(f"environment and tools: {cls.__name__} runs no episodes; train with GRPO")
        arguments.update(code.agent.arguments())
        arguments["processing_class"] = code.tool_format(arguments["processing_class"])
    return arguments


def build_trainer(cls: type, recipe: Recipe, train: Dataset, eval_dataset: Dataset | None = None) -> "TrainerRun":
    """Build a trainer of `cls`, one of this package's, for a recipe.

    Raises:
        ConfigError: see [`trainer_arguments`].
    """
    trainer = cls(**trainer_arguments(cls, recipe, train), eval_dataset=eval_dataset)
    trainer.card_info.settings = (recipe.script, recipe.model)
    fit_threads(trainer.model)
    return trainer


def run_recipe(
    trainer: Trainer, recipe: Recipe, test: Dataset | None, plan: "MemoryPlan | None" = None
) -> dict[str, object]:
    """Measure, train, measure again, and save.

    The output folder then has adapter, `metrics.json`, the page of the run, `report.html`, and the
    card of a trainer of this package. A run that is finished is left as it is.

    Args:
        trainer: a trainer that has not trained yet, of this package or of TRL's own.
        recipe: the recipe that `trainer` was built for.
        test: held-out prompts; `None` if there are none to measure on.
        plan: the run's memory, for a trainer of this package, whose metrics then have its peak next to the measured
            one; `None` if it was not planned.

    Returns:
        The content of `metrics.json`.

    Raises:
        UserError: there is no whole checkpoint to resume from; or at the very end, no completion of the whole run got
            a reward.
    """
    if plan is not None:
        trainer.clock.planned = plan.measurable_peak
    run = _Run(trainer, recipe, test)
    content = run.record.content
    checkpoint = run.find_checkpoint()
    # The run was finished when the checkpoint was written, and is to be no longer.
    if checkpoint is not None and content.get("finished_step", -1) == last_step(checkpoint, trainer.args):
        run.say_that_it_is_finished()
        return content
    run.begin(checkpoint)
    run.train(checkpoint)
    run.measure_and_describe()
    run.say_what_is_there()
    rewards = getattr(trainer, "reward_values", None)
    line = None if rewards is None else rewards.line_if_none()
    if line:
        raise UserError(line)
    return run.record.content


class _Run:
    """A recipe's run: its trainer, what it measures, and what it writes."""

    def __init__(self, trainer: Trainer, recipe: Recipe, test: Dataset | None):
        self.trainer = trainer
        self.recipe = recipe
        self.test = test
        self.args = trainer.args
        self.folder = trainer.args.output_dir
        self.is_ours = hasattr(trainer, "card_info")
        self.command = launch_words()
        self.record = RunRecord(self.folder)
        self.accuracy: AccuracyCallback | None = None
        if test is not None and not recipe.script.skip_accuracy and can_measure(trainer):
            self.accuracy = AccuracyCallback(trainer, recipe, test, self.record)
        self.results = ""

    @property
    def is_adapter(self) -> bool:
        return is_peft_model(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def find_checkpoint(self) -> str | None:
        """The checkpoint that `resume_from_checkpoint` means, if any."""
        resume = self.args.resume_from_checkpoint
        if self.is_ours:
            return self.trainer.checkpointing.resume_from(resume)
        return on_main(lambda: resolve_resume(self.folder, resume))

    def say_that_it_is_finished(self) -> None:
        goal = "num_train_epochs" if self.args.max_steps <= 0 else "max_steps"
        value = vars(self.args)[goal]
        self._say_what_is_next(
            f"the run in {self.folder} is finished ({goal}={value:g}): nothing is trained, and what it left stays as "
            f"it is\n  train on:   the same command with a larger --{goal}"
        )

    def _say_what_is_next(self, line: str) -> None:
        say(f"{line}\n{next_commands(self.folder, self.recipe.script, self.is_adapter)}")

    def begin(self, checkpoint: str | None) -> None:
        """Write what is known before training, and let accuracy, page and terminal follow the run."""
        step = 0
        if checkpoint is not None:
            say(f"continuing from {checkpoint}")
            step = step_of(checkpoint)
        self.record.begin(self.trainer, self.recipe, step, self.accuracy is not None, self.command)
        if self.is_ours:
            self._begin_card()
        if self.accuracy is not None:
            self.trainer.add_callback(self.accuracy)
        self.page = RunPage(self.trainer, self.record)  # which keeps the warnings of an earlier part
        self.trainer.add_callback(self.page)
        use_terminal(self.trainer)

    @nonfatal("the model card")
    def _begin_card(self) -> None:
        card = self.trainer.card_info
        script = self.recipe.script
        prompts = self.test or self.trainer.train_dataset
        card.dataset = script.dataset or vars(script)["pairs"]
        card.license = script.license
        card.data_license = script.data_license
        card.quickstart_prompt = prompts[0].get("prompt")
        card.max_new_tokens = self.recipe.measurement.max_new_tokens
        card.command = self.command
        card.recipe_file = pop_options(sys.argv, ("--config",))[0].get("--config")

    def train(self, checkpoint: str | None) -> None:
        """Train from `checkpoint` on and save the weights; a stopped run prints the command that continues it."""
        trainer = self.trainer
        started = time.perf_counter()
        resume_command = shlex.join([*self.command, "--resume_from_checkpoint", "auto"])  # the last value counts
        stopping: AbstractContextManager = nullcontext()
        if hasattr(trainer, "resume_command"):
            trainer.resume_command = resume_command
        else:
            stopping = stopping_after_step(trainer, resume_command)
        with stopping:
            trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(_internal_call=True)  # before a measurement or a picture can fail
        seconds = time.perf_counter() - started
        if self.accuracy is not None:
            seconds -= self.accuracy.seconds_before
        self.record.put(train_seconds=seconds, history=trainer.state.log_history)

    def measure_and_describe(self) -> None:
        """Measure again, and write card, figures and page; upload them if the recipe asks for it."""
        if self.accuracy is not None:
            self.results = self.accuracy.finish()
        if self.is_ours:
            self.trainer.create_model_card(Path(self.folder).name)
        self.record.put(finished_step=self.trainer.state.global_step)
        self.page.write()
        if self.args.push_to_hub:
            self.trainer.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def say_what_is_there(self) -> None:
        files = ["adapter" if self.is_adapter else "model"]
        if self.is_ours:
            files.append("card")
        files.append("metrics.json")
        if self.page.path.is_file():
            files.append(self.page.path.name)
        self._say_what_is_next(f"{', '.join(files[:-1])} and {files[-1]} are in {self.folder}")
        if self.results:
            say(self.results)


def can_measure(trainer: Trainer) -> bool:
    """Whether accuracy can be measured: a trainer that draws nothing cannot generate with sharded weights."""
    return hasattr(trainer, "generating") or not (trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled())


@contextmanager
def _generating(trainer: Trainer) -> Iterator[tuple[nn.Module, bool]]:
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

    def __init__(self, trainer: Trainer, recipe: Recipe, test: Dataset, record: RunRecord):
        self.trainer = trainer
        self.script = recipe.script
        self.measurement = recipe.measurement
        self.test = test
        self.record = record
        self.seconds_before = 0.0

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
        card.results = {}
        for name, result in measured.items():
            if result:
                card.results[f"held-out accuracy, {name}"] = format_result(result)
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
