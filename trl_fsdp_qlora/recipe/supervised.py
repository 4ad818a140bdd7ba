"""A supervised start for reinforcement: TRL's `SFTTrainer` on the worked answers that a dataset brings along."""

from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import TrainerCallback
from trl import ModelConfig, SFTConfig, SFTTrainer

from ..checkpoints.checkpoints import last_step, resolve_resume
from ..checkpoints.disk import disk_errors
from ..publishing.card import hardware, software
from ..run import redaction
from ..scoring.cpu_products import faster_products
from .arguments import ScriptArguments
from .building import model_arguments, refusals_in_a_line
from .data import load_problems, measured_prompts, prompts_of
from .datasets import DatasetError
from .evaluation import Evaluation, evaluate
from .record import RunRecord, format_result
from .script import say


def worked_data(script: ScriptArguments, problems: int | None) -> tuple[Dataset, Dataset]:
    """(prompts with their worked answers, prompts to measure on); the prompts are those of the other recipes.

    Args:
        script: of the recipe.
        problems: how many training problems are taught, the first ones; `None` teaches all.

    Raises:
        trl_fsdp_qlora.recipe.datasets.DatasetError: see [`load_problems`]; there are no worked answers, or fewer than
            `problems`.
    """
    loaded = load_problems(script, worked=True)
    workable = [problem for problem in loaded.train if problem["work"] is not None]
    if not workable:
        raise DatasetError(
            f"{script.dataset!r} holds no worked answers to teach; SVAMP's `Equation` and GSM8K's `answer` do"
        )
    if problems is not None and problems > len(workable):
        raise DatasetError(
            f"sft_problems={problems} are more than the {len(workable)} that can be taught; leave it out"
        )
    taught = workable[:problems]
    prompts = prompts_of(script, taught)
    answers = [problem["work"] for problem in taught]
    if script.chat:
        answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    unworkable = len(loaded.train) - len(workable)
    measured = measured_prompts(script, loaded)
    kind = "held-out" if script.accuracy_on == "test" else "validation"
    aside = f" ({unworkable} have no worked answer that is right)" if unworkable else ""
    say(f"data: {len(taught)} of {len(loaded.train)} training problems are taught{aside}")
    say(f"data: {len(measured)} {kind} problems are measured")
    return Dataset.from_dict({"prompt": prompts["prompt"], "completion": answers}), measured


class _Measure(TrainerCallback):
    """Accuracy before the first step and after every epoch, on every rank; into the record and into the log."""

    def __init__(self, measure, record: RunRecord):
        self.measure = measure
        self.record = record

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.record.put(before=self._say("before", "accuracy before training").as_dict())

    def on_epoch_end(self, args, state, control, **kwargs):
        epoch = round(state.epoch, 3)
        after = self._say(f"epoch {epoch:g}", "accuracy").as_dict()
        epochs = [entry for entry in self.record.content.get("epochs", []) if entry["epoch"] < epoch]
        self.record.put(epochs=[*epochs, {"epoch": epoch, "step": state.global_step, **after}])

    def _say(self, when: str, description: str) -> Evaluation:
        result = self.measure(description)
        say(f"{when}: {result}")
        return result


def build_sft_trainer(config: SFTConfig, model: ModelConfig, train: Dataset) -> SFTTrainer:
    """TRL's trainer for a recipe's parsed arguments; the loss is on the completions.

    Raises:
        ConfigError: TRL or PEFT refuses an argument, see [`trl_fsdp_qlora.recipe.refusals.is_refusal`].
    """
    with refusals_in_a_line():
        given = model_arguments(config, model)
        return SFTTrainer(model.model_name_or_path, config, train_dataset=train, **given)


def run_sft(
    trainer: SFTTrainer, script: ScriptArguments, test: Dataset, max_new_tokens: int, resume: str | bool | None
) -> dict[str, Any]:
    """Measure, train, measure after every epoch, save; leaves model, tokenizer and `metrics.json` in the output folder.

    One process, or several that hold a copy of the model each; sharded weights cannot generate here.

    Args:
        trainer: built, not yet trained.
        script: of the recipe.
        test: prompts to measure on.
        max_new_tokens: of a measured completion.
        resume: `resume_from_checkpoint`.

    Returns:
        The record, as in `metrics.json`.

    Raises:
        trl_fsdp_qlora.run.errors.CheckpointError: there is no whole checkpoint to resume from, or the disk is full.
    """
    args, record = trainer.args, RunRecord(trainer.args.output_dir)
    resume = resolve_resume(args.output_dir, resume)
    if resume is None:
        record.content = {}
    elif record.is_complete(last_step(resume, args)):
        say(f"the run in {args.output_dir} is finished: nothing is trained, and what it left stays as it is")
        return record.content

    def measure(description: str) -> Evaluation:
        return evaluate(
            trainer.accelerator.unwrap_model(trainer.model),
            trainer.processing_class,
            test,
            max_new_tokens=max_new_tokens,
            batch_size=script.accuracy_batch_size,
            answer_format=script.answer_format,
            seed=args.seed,
            progress=not args.disable_tqdm,
            description=description,
        )

    about = {"hardware": hardware(), "software": software(), "processes": args.world_size, "seed": args.seed}
    record.put(**about, dataset=redaction.portable(script.dataset), accuracy_on=script.accuracy_on)
    if not script.skip_accuracy:
        trainer.add_callback(_Measure(measure, record))
    with faster_products(trainer.model):
        trainer.train(resume_from_checkpoint=resume)
    with disk_errors(args.output_dir):
        trainer.save_model()
        record.put(history=trainer.state.log_history, finished_step=trainer.state.global_step)
    if PartialState().is_main_process:
        say(f"model, tokenizer and metrics.json are in {args.output_dir}")
        measured = [record.content.get("before"), *record.content.get("epochs", [])[-1:]]
        say("  ->  ".join(format_result(_evaluation(entry)) for entry in measured if entry))
    return record.content


def _evaluation(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name in Evaluation.__dataclass_fields__}
