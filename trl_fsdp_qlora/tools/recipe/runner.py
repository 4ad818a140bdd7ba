"""A recipe's run: build the trainer, measure, train, measure again, save."""

import inspect
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from transformers import AutoProcessor, AutoTokenizer, ProcessorMixin, TrainingArguments
from trl import ModelConfig, get_quantization_config

from ...errors import UserError
from ...trainers.reporting.terminal import use_terminal
from ...trainers.saving.checkpoints import last_step, resolve_resume, step_of
from ...trainers.saving.stopping import stopping_after_step
from ...utils.nonfatal import nonfatal
from ...utils.ranks import on_main
from ...utils.threads import fit_threads
from ..run.launch import launch_words
from ..run.one_line import pop_options
from .arguments import ConfigError, ScriptArguments
from .checks import lora_config, user_code
from .measuring import AccuracyCallback, can_measure, completion_length
from .record import RunPage, RunRecord, next_commands
from .script import say


def load_processing(name: str, revision: str | None, images: bool):
    """The model's tokenizer, or its processor if the data has `images`; [`ConfigError`] if the model takes none."""
    processing = (AutoProcessor if images else AutoTokenizer).from_pretrained(name, revision=revision)
    if images and not isinstance(processing, ProcessorMixin):
        raise ConfigError(f"model_name_or_path={name!r} takes no images, and the data has some; leave the column out")
    return processing


def model_arguments(config: TrainingArguments, model: ModelConfig, images: bool = False) -> dict[str, Any]:
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


def trainer_arguments(
    cls: type, script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset
) -> dict[str, Any]:
    """Returns the arguments by name with which a trainer of `cls` is built for a recipe's parsed arguments.

    Raises:
        ConfigError: the recipe has tools or an environment, and trainers of `cls` support none.
    """
    code = user_code(script)
    arguments = {
        "model": model.model_name_or_path,
        "reward_funcs": code.rewards,
        "args": config,
        "train_dataset": train,
        **model_arguments(config, model, "images" in train.column_names),
    }
    if code.agent is not None:
        if "environment_factory" not in inspect.signature(cls.__init__).parameters:
            raise ConfigError(f"environment and tools: {cls.__name__} runs no episodes; train with GRPO")
        arguments.update(code.agent.arguments())
        arguments["processing_class"] = code.tool_format(arguments["processing_class"])
    return arguments


def build_trainer(
    cls: type, script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset, **further_arguments
):
    """Build a trainer of `cls` for a recipe's parsed arguments; `further_arguments` are passed on unchanged.

    Raises:
        ConfigError: see [`trainer_arguments`].
    """
    trainer = cls(**trainer_arguments(cls, script, config, model, train), **further_arguments)
    trainer.card_info.settings = (script, model)
    fit_threads(trainer.model)
    return trainer


def run_recipe(
    trainer: Any,
    script: ScriptArguments,
    test: Dataset | None,
    resume: str | bool | None,
    model: ModelConfig | None = None,
) -> dict:
    """Measure, train, measure again, and save.

    The output folder then has adapter, `metrics.json`, the page of the run, `report.html`, and the
    card of a trainer of this package. A run that is finished is left as it is.

    Args:
        trainer: a trainer that has not trained yet, of this package or of TRL's own.
        script: the recipe's script arguments.
        test: held-out prompts; `None` if there are none to measure on.
        resume: `resume_from_checkpoint`.
        model: the recipe's model arguments.

    Raises:
        UserError: at the very end, if no completion of the whole run got a reward.
    """
    run = _Run(trainer, script, test, model or ModelConfig())
    checkpoint = run.find_checkpoint(resume)
    if checkpoint is not None and run.has_ended_at(checkpoint):
        run.say_that_it_is_finished()
        return run.record.content
    run.begin(checkpoint)
    run.train(checkpoint)
    run.measure_and_describe()
    run.say_what_is_there()
    run.refuse_rewards_without_value()
    return run.record.content


class _Run:
    """A recipe's run: its trainer, what it measures, and what it writes."""

    def __init__(self, trainer: Any, script: ScriptArguments, test: Dataset | None, model: ModelConfig):
        self.trainer = trainer
        self.script = script
        self.test = test
        self.model = model
        self.args = trainer.args
        self.folder = trainer.args.output_dir
        self.is_ours = hasattr(trainer, "card_info")
        self.command = launch_words()
        self.record = RunRecord(self.folder)
        self.accuracy: AccuracyCallback | None = None
        if test is not None and not script.skip_accuracy and can_measure(trainer):
            self.accuracy = AccuracyCallback(trainer, script, test, self.record)
        self.results = ""

    @property
    def is_adapter(self) -> bool:
        return is_peft_model(self.trainer.accelerator.unwrap_model(self.trainer.model))

    def find_checkpoint(self, resume: str | bool | None) -> str | None:
        """The checkpoint that `resume_from_checkpoint` means, if any."""
        if self.is_ours:
            return self.trainer.checkpointing.resume_from(resume)
        return on_main(lambda: resolve_resume(self.folder, resume))

    def has_ended_at(self, checkpoint: str) -> bool:
        """Whether the run was finished when `checkpoint` was written, and is to be no longer."""
        return self.record.content.get("finished_step", -1) == last_step(checkpoint, self.args)

    def say_that_it_is_finished(self) -> None:
        goal = "num_train_epochs" if self.args.max_steps <= 0 else "max_steps"
        value = vars(self.args)[goal]
        self._say_what_is_next(
            f"the run in {self.folder} is finished ({goal}={value:g}): nothing is trained, and what it left stays as "
            f"it is\n  train on:   the same command with a larger --{goal}"
        )

    def _say_what_is_next(self, line: str) -> None:
        say(f"{line}\n{next_commands(self.folder, self.script, self.is_adapter)}")

    def begin(self, checkpoint: str | None) -> None:
        """Write what is known before training, and let accuracy, page and terminal follow the run."""
        if checkpoint is not None:
            say(f"continuing from {checkpoint}")
        self.record.begin(
            self.trainer,
            self.script,
            self.model,
            0 if checkpoint is None else step_of(checkpoint),
            self.accuracy is not None,
            self.command,
        )
        self.page = RunPage(self.trainer, self.record)  # which keeps the warnings of an earlier part
        if self.is_ours:
            self._begin_card()
        if self.accuracy is not None:
            self.trainer.add_callback(self.accuracy)
        self.trainer.add_callback(self.page)
        use_terminal(self.trainer)

    @nonfatal("the model card")
    def _begin_card(self) -> None:
        card = self.trainer.card_info
        prompts = self.test or self.trainer.train_dataset
        card.dataset = self.script.dataset or vars(self.script)["pairs"]
        card.license = self.script.license
        card.data_license = self.script.data_license
        card.quickstart_prompt = prompts[0].get("prompt")
        card.max_new_tokens = completion_length(self.args, self.script)
        card.command = self.command
        card.recipe_file = pop_options(sys.argv, ("--config",))[0].get("--config")

    def train(self, checkpoint: str | None) -> None:
        """Train from `checkpoint` on and save the weights; a stopped run prints the command that continues it."""
        trainer = self.trainer
        started = time.perf_counter()
        resume_command = shlex.join([*self.command, "--resume_from_checkpoint", "auto"])  # the last value counts
        if hasattr(trainer, "resume_command"):
            trainer.resume_command = resume_command
            trainer.train(resume_from_checkpoint=checkpoint)
        else:
            with stopping_after_step(trainer, resume_command):
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

    def refuse_rewards_without_value(self) -> None:
        """Raises a [`UserError`] if no completion of the run got a reward."""
        rewards = getattr(self.trainer, "reward_values", None)
        line = None if rewards is None else rewards.line_if_none()
        if line:
            raise UserError(line)
