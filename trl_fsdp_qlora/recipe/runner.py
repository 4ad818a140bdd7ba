"""A recipe's run: build the trainer, measure, train, measure again, save."""

import os
import shlex
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import is_peft_model
from datasets import Dataset
from transformers import AutoProcessor, AutoTokenizer, ProcessorMixin, TrainingArguments
from trl import ModelConfig, get_quantization_config

from ..checkpoints.checkpoints import last_step, step_of
from ..checkpoints.disk import disk_errors
from ..compat.transformers import model_name
from ..publishing.card import hardware, software
from ..run import launch_line, redaction
from ..run.nonfatal import nonfatal
from ..telemetry.terminal import use_terminal
from .arguments import ConfigError, ScriptArguments
from .checks import lora_config
from .evaluation import Evaluation, evaluate
from .record import AccuracyCallback, RunRecord, format_result
from .rewards import get_reward
from .script import resumable, say
from .time_limit import TimeLimit


def reward_functions(args: ScriptArguments) -> list:
    return [get_reward(name, args.answer_format) for name in args.rewards]


def load_processing(name: str, revision: str | None, images: bool):
    """The model's tokenizer, or its processor where the data has `images`.

    Raises:
        ConfigError: the data has images, and the model takes none.
    """
    processing = (AutoProcessor if images else AutoTokenizer).from_pretrained(name, revision=revision)
    if images and not isinstance(processing, ProcessorMixin):
        raise ConfigError(f"model_name_or_path={name!r} takes no images, and the data has some; leave the column out")
    return processing


def model_arguments(config: TrainingArguments, model: ModelConfig, images: bool = False) -> dict[str, Any]:
    """A trainer's arguments by name for a recipe's model; how it is loaded goes into `config.model_init_kwargs`."""
    processing = load_processing(model.model_name_or_path, model.model_revision, images)
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    return {
        "processing_class": processing,
        "quantization_config": get_quantization_config(model),
        "peft_config": lora_config(model),
    }


def build_trainer(
    trainer_class: type, script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset, **more
):
    """A trainer of `trainer_class` for a recipe's parsed arguments; `more` goes to it as it is."""
    given = model_arguments(config, model, "images" in train.column_names)
    trainer = trainer_class(model.model_name_or_path, reward_functions(script), config, train, **given, **more)
    trainer.card_info.settings = (script, model)
    return trainer


# What `evaluate` takes from the folder of a run, so that it measures what the run measured.
_MEASURED = ("model_revision", "dtype", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
_MEASURED += ("max_completion_length", "bf16", "seed")


def measured_settings(script: ScriptArguments, config: Any, model: ModelConfig) -> dict[str, Any]:
    """The fields of `recipes/evaluate.py` that measure what a run with these arguments does; no path of one machine."""
    values = {name: getattr(model, name, getattr(config, name, None)) for name in _MEASURED}
    values |= {
        name: value for name, value in asdict(script).items() if name not in ("rewards", "skip_accuracy", "stage")
    }
    values |= {name: redaction.portable(values[name]) for name in ("dataset", "eval_dataset") if values[name]}
    return {name: value for name, value in values.items() if value is not None}


def evaluate_line(output_dir: str, script: ScriptArguments, adapter: bool = True) -> str:
    """The command that measures a finished run again, as a line for a shell."""
    words = ["trl-fsdp-qlora", "evaluate", "--adapter" if adapter else "--model_name_or_path", str(output_dir)]
    for name in ("dataset", "eval_dataset"):  # which the folder does not hold
        if os.path.isabs(getattr(script, name) or ""):
            words += [f"--{name}", getattr(script, name)]
    return shlex.join(words)


def run_recipe(
    trainer: Any, script: ScriptArguments, test: Dataset | None, resume: str | bool | None
) -> dict[str, Any]:
    """Measure, train, measure again, save; leaves adapter, card, `metrics.json` and `training.png` in the output folder.

    Args:
        trainer: built, not yet trained.
        script: of the recipe.
        test: held-out prompts; `None` where `skip_accuracy` is set and nothing is held out.
        resume: `resume_from_checkpoint`.

    Returns:
        The record, as in `metrics.json`.
    """
    with trainer.checkpointing.alone():
        return _run_recipe(trainer, script, test, resume)


def _run_recipe(
    trainer: Any, script: ScriptArguments, test: Dataset | None, resume: str | bool | None
) -> dict[str, Any]:
    args = trainer.args
    record = RunRecord(args.output_dir)
    resume = trainer.checkpointing.resume_from(resume)
    if record.is_complete(_finished_step(trainer, script, record, resume)):
        say(_finished(trainer, script))
        return record.content
    _begin(record, trainer, script, resume)
    measure, show = partial(_measure, trainer, script, test), partial(_fill_results, trainer, script, record)
    seconds_before = 0.0

    def keep(before: Evaluation) -> None:
        nonlocal seconds_before
        seconds_before = before.seconds
        say(f"before: {before}")
        record.put(before=before.as_dict())

    limit = None if script.max_train_seconds is None else TimeLimit(script.max_train_seconds)
    if limit is not None:
        trainer.add_callback(limit)
    if not script.skip_accuracy:
        first = None if "before" in record.content else keep
        trainer.add_callback(
            AccuracyCallback(measure, first, script.accuracy_steps, lambda: trainer._metrics["train"], show)
        )
    use_terminal(trainer)
    _fill_card(trainer, script, (test or trainer.train_dataset)[0]["prompt"])
    started = time.perf_counter()
    with resumable(trainer):
        trainer.train(resume_from_checkpoint=resume)
    with disk_errors(args.output_dir):
        trainer.save_model(_internal_call=True)  # before anything that is measured or drawn can fail
    record.put(train_seconds=time.perf_counter() - started - seconds_before, history=trainer.state.log_history)
    results = {}
    if not script.skip_accuracy:
        after = measure(script.accuracy_samples, "accuracy after training")
        record.put(after=after.as_dict())
        results = {when: format_result(record.content[when]) for when in ("before", "after") if when in record.content}
        show(after, trainer.state.global_step, "after")
    picture = record.draw() if PartialState().is_main_process else None
    trainer.card_info.picture = picture and picture.name
    trainer.create_model_card(Path(args.output_dir).name)
    record.put(finished_step=trainer.state.global_step)
    if limit is not None:
        record.put(limited_seconds=limit.spent, stopped_by_seconds=limit.seconds if limit.reached else None)
    if args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=args.hub_revision)
    if PartialState().is_main_process:
        say(f"adapter, card, metrics.json{' and ' + picture.name if picture else ''} are in {args.output_dir}")
        if results:
            say("  ->  ".join(results.values()))
    return record.content


def _begin(record: RunRecord, trainer: Any, script: ScriptArguments, resume: str | None) -> None:
    """Put into the record what a run is, and say so where a resumed one lacks its accuracy from before training."""
    if resume is None:
        record.content = {}  # of a run that left no checkpoint
    elif not script.skip_accuracy and "before" not in record.content:
        say(
            f"{record.path} does not hold the accuracy from before training, and a run that resumes cannot measure it: the "
            "record, the card and the last line go without"
        )
    _, model = trainer.card_info.settings or (script, ModelConfig())
    record.put(
        hardware=hardware(),
        software=software(),
        processes=trainer.args.world_size,
        seed=trainer.args.seed,
        dataset=redaction.portable(script.dataset),
        model=redaction.portable(model_name(trainer.model)),
        settings=measured_settings(script, trainer.args, model),
    )


def _measure(
    trainer: Any, script: ScriptArguments, test: Dataset, samples: int = 0, description: str = "accuracy"
) -> Evaluation:
    """Held-out accuracy as it is now, on every rank."""
    args = trainer.args
    with trainer.clock.phase("accuracy"), trainer.generating() as (model, lockstep):
        return evaluate(
            model,
            trainer.processing_class,
            test,
            max_new_tokens=args.max_completion_length,
            batch_size=script.accuracy_batch_size,
            samples=samples,
            answer_format=script.answer_format,
            seed=args.seed,
            progress=not args.disable_tqdm,
            description=description,
            lockstep=lockstep,
        )


@nonfatal("the model card")
def _fill_card(trainer: Any, script: ScriptArguments, prompt: Any) -> None:
    card = trainer.card_info
    card.dataset, card.license, card.data_license = script.dataset, script.license, script.data_license
    card.quickstart_prompt, card.max_new_tokens = prompt, trainer.args.max_completion_length
    card.command, card.recipe_file = launch_line.launch_words(), launch_line.config_file(sys.argv)


@nonfatal("the model card")
def _fill_results(
    trainer: Any, script: ScriptArguments, record: RunRecord, last: Evaluation, step: int, when: str | None = None
) -> None:
    """Let the card say what was measured before training and last, at `step`."""
    card, kind = trainer.card_info, "held-out" if script.accuracy_on == "test" else "validation"
    measured = {"before": record.content.get("before"), when or f"after {step} steps": last.as_dict()}
    card.results = {f"{kind} accuracy, {name}": format_result(each) for name, each in measured.items() if each}
    card.accuracy, card.accuracy_on, card.accuracy_step = last.as_dict(), script.accuracy_on, step


def _finished_step(trainer: Any, script: ScriptArguments, record: RunRecord, resume: str | None) -> int | None:
    """The step that the run ended at, by its steps or by its seconds; `None` where there is something left to do."""
    limit = record.content.get("stopped_by_seconds")
    if resume is not None and limit is not None and limit == script.max_train_seconds:
        return step_of(resume)
    return None if resume is None else last_step(resume, trainer.args)


def _finished(trainer: Any, script: ScriptArguments) -> str:
    """What a run with no steps left says instead of training."""
    args = trainer.args
    goal = f"max_steps={args.max_steps}" if args.max_steps > 0 else f"num_train_epochs={args.num_train_epochs:g}"
    longer = "--max_steps" if args.max_steps > 0 else "--num_train_epochs"
    return (
        f"the run in {args.output_dir} is finished ({goal}): nothing is trained, and what it left stays as it is\n"
        f"  train further:  the same command with a larger {longer}\n"
        f"  train another:  the same command with another --output_dir\n"
        f"  measure it:     {evaluate_line(args.output_dir, script, is_peft_model(trainer.accelerator.unwrap_model(trainer.model)))}"
    )
