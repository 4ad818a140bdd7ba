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
    names = {"revision": "model_revision", "attn_implementation": "attn_implementation", "dtype": "dtype"}
    loading = {name: vars(model)[field] for name, field in names.items()}
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


def _finished_text(trainer: Any, script: ScriptArguments) -> str:
    args = trainer.args
    goal = "num_train_epochs" if args.max_steps <= 0 else "max_steps"
    return (
        f"the run in {args.output_dir} is finished ({goal}={vars(args)[goal]:g}): nothing is trained, and "
        f"what it left stays as it is\n  train on:   the same command with a larger --{goal}\n"
        f"{next_commands(args.output_dir, script, _is_adapter(trainer))}"
    )


def _is_adapter(trainer: Any) -> bool:
    return is_peft_model(trainer.accelerator.unwrap_model(trainer.model))


@nonfatal("the model card")
def _begin_card(trainer: Any, script: ScriptArguments, test: Dataset | None, command: list[str]) -> None:
    """Put on the card what is known before training."""
    card = trainer.card_info
    card.dataset = script.dataset or vars(script)["pairs"]
    card.license = script.license
    card.data_license = script.data_license
    card.quickstart_prompt = (test or trainer.train_dataset)[0].get("prompt")
    card.max_new_tokens = completion_length(trainer.args, script)
    card.command = command
    card.recipe_file = pop_options(sys.argv, ("--config",))[0].get("--config")


def run_recipe(
    trainer: Any,
    script: ScriptArguments,
    test: Dataset | None,
    resume: str | bool | None,
    model: ModelConfig | None = None,
) -> dict:
    """Measure, train, measure again, and save.

    The output folder then has adapter, `metrics.json`, the page of the run, `report.html`, and the
    card of a trainer of this package.

    Args:
        trainer: a trainer that has not trained yet, of this package or of TRL's own.
        script: the recipe's script arguments.
        test: held-out prompts; `None` if there are none to measure on.
        resume: `resume_from_checkpoint`.
        model: the recipe's model arguments.

    Raises:
        UserError: at the very end, if no completion of the whole run got a reward.
    """
    args = trainer.args
    is_ours = hasattr(trainer, "card_info")
    record = RunRecord(args.output_dir)
    if is_ours:
        resume = trainer.checkpointing.resume_from(resume)
    else:
        resume = on_main(lambda: resolve_resume(args.output_dir, resume))
    if resume is not None:
        if record.content.get("finished_step", -1) == last_step(resume, args):
            say(_finished_text(trainer, script))
            return record.content
        say(f"continuing from {resume}")
    is_measured = not script.skip_accuracy and test is not None and can_measure(trainer)
    command = launch_words()
    record.begin(trainer, script, model or ModelConfig(), step_of(resume) if resume else 0, is_measured, command)
    if is_ours:
        _begin_card(trainer, script, test, command)
    accuracy = AccuracyCallback(trainer, script, test, record) if is_measured else None
    page = RunPage(trainer, record)
    for callback in filter(None, (accuracy, page)):
        trainer.add_callback(callback)
    use_terminal(trainer)

    started = time.perf_counter()
    _train(trainer, resume, shlex.join([*command, "--resume_from_checkpoint", "auto"]))  # the last value counts
    trainer.save_model(_internal_call=True)  # before a measurement or a picture can fail
    seconds = time.perf_counter() - started - (0 if accuracy is None else accuracy.seconds_before)
    record.put(train_seconds=seconds, history=trainer.state.log_history)

    results = "" if accuracy is None else accuracy.finish()
    if is_ours:
        trainer.create_model_card(Path(args.output_dir).name)
    record.put(finished_step=trainer.state.global_step)
    page_path = page.write()
    if args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=args.hub_revision)
    card = ["card"] if is_ours else []
    page_name = [] if page_path is None else [page_path.name]
    files = ["adapter" if _is_adapter(trainer) else "model", *card, "metrics.json", *page_name]
    say(f"{', '.join(files[:-1])} and {files[-1]} are in {args.output_dir}")
    say(next_commands(args.output_dir, script, _is_adapter(trainer)))
    if results:
        say(results)
    rewards = getattr(trainer, "reward_values", None)
    if rewards is not None and rewards.line_if_none():
        raise UserError(rewards.line_if_none())
    return record.content


def _train(trainer: Any, resume: str | None, resume_command: str) -> None:
    """Train from `resume` on; a stopped run prints `resume_command`."""
    if hasattr(trainer, "resume_command"):
        trainer.resume_command = resume_command
        trainer.train(resume_from_checkpoint=resume)
    else:
        with stopping_after_step(trainer, resume_command):
            trainer.train(resume_from_checkpoint=resume)
