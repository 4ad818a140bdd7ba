"""What every recipe script does around its trainer: arguments from YAML and command line, data, accuracy, a record."""

import difflib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from ..publishing.card import hardware, software
from ..run import checkpoints, redaction
from .datasets import DatasetError, hold_out, read_problems, to_prompts, without_overlap
from .evaluation import Evaluation, evaluate
from .rewards import UnparsableGoldAnswer, get_reward


class ConfigError(ValueError):
    """A recipe file or command line that cannot be used; names the key and the nearest known one."""


@dataclass
class ScriptArguments:
    """Data, rewards and accuracy of a recipe; everything else is the trainer's config.

    Args:
        dataset: Hub id, local `.json`/`.jsonl` file, folder of `<split>.jsonl`, `addition` or `multiplication`.
        dataset_config: configuration name of a Hub dataset.
        dataset_split: split to train on.
        eval_dataset: where the held-out problems come from; `dataset` where it is not set.
        eval_split: split of the held-out problems.
        held_out: take this many problems out of `dataset` instead of reading another split.
        eval_problems: measure on at most this many held-out problems.
        system_prompt: put before every question.
        prompt_template: how a question becomes a prompt; must hold `{question}`.
        chat: let the tokenizer's chat template frame the prompt.
        rewards: names of rewards, see `trl_fsdp_qlora.recipe.rewards.REWARDS`.
        answer_format: where a completion's final answer stands: auto, hash, tags, boxed or last_number.
        accuracy_steps: measure held-out accuracy every so many optimizer steps; 0 for before and after only.
        accuracy_samples: k of pass@k and majority@k after training; 0 for greedy decoding only.
        accuracy_batch_size: completions a batch of the accuracy measurement, per rank.
        skip_accuracy: train only; measure nothing.
        license: SPDX id for the adapter's card.
    """

    dataset: str = field(metadata={"help": "Hub id, local file, folder, 'addition' or 'multiplication'."})
    dataset_config: str | None = None
    dataset_split: str = "train"
    eval_dataset: str | None = None
    eval_split: str = "test"
    held_out: int = 0
    eval_problems: int | None = None
    system_prompt: str | None = None
    prompt_template: str = "{question}"
    chat: bool = True
    rewards: list[str] = field(default_factory=lambda: ["exact_answer"])
    answer_format: str = "auto"
    accuracy_steps: int = 0
    accuracy_samples: int = 0
    accuracy_batch_size: int = 64
    skip_accuracy: bool = False
    license: str | None = None


def parse_recipe(dataclass_types: Sequence[type], argv: Sequence[str] | None = None) -> tuple:
    """Instances of `dataclass_types` from `--config FILE.yaml` and the command line, which wins.

    Raises:
        ConfigError: the file is missing or no mapping, or holds a key that none of the types has.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = TrlParser(tuple(dataclass_types))
    if "--config" in argv:
        _check_keys(argv[argv.index("--config") + 1], {action.dest for action in parser._actions} - {"help"})
    unknown = [arg for arg in argv if arg.startswith("--") and arg != "--config"]
    options = {option for action in parser._actions for option in action.option_strings}
    for arg in unknown:
        _check_key(arg.split("=")[0], options, "command line")
    return parser.parse_args_and_config(argv)


def _check_key(key: str, known: set[str], where: str) -> None:
    if key in known:
        return
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{where}: unknown key {key!r}{hint}")


def _check_keys(path: str, known: set[str]) -> None:
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--config {path} must hold `key: value` lines")
    for key in config:
        _check_key(key, known | {"env"}, path)


def load_data(args: ScriptArguments) -> tuple[Dataset, Dataset]:
    """(training prompts, held-out prompts) of a recipe, without overlap.

    Raises:
        trl_fsdp_qlora.recipe.datasets.DatasetError: nothing is held out, or nothing is left.
    """
    train = read_problems(args.dataset, args.dataset_split, args.dataset_config)
    if args.held_out:
        train, test = hold_out(train, args.held_out)
    else:
        source = args.eval_dataset or args.dataset
        if source == args.dataset and args.eval_split == args.dataset_split:
            raise DatasetError(
                f"training and held-out problems are both {source!r}, split {args.eval_split!r}; set held_out"
            )
        test = read_problems(source, args.eval_split, args.dataset_config)
        train, dropped = without_overlap(train, test)
        if dropped:
            say(f"left {dropped} training problems out that are among the held-out ones")
    test = test[: args.eval_problems]
    say(f"data: {len(train)} training and {len(test)} held-out problems from {args.dataset}")
    frame = {"system_prompt": args.system_prompt, "template": args.prompt_template, "chat": args.chat}
    return to_prompts(train, **frame), to_prompts(test, **frame)


def reward_functions(args: ScriptArguments) -> list:
    return [get_reward(name, args.answer_format) for name in args.rewards]


def build_trainer(
    trainer_class: type, script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset, **more
):
    """A trainer of `trainer_class` for a recipe's parsed arguments; `more` goes to it as it is."""
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    return trainer_class(
        model.model_name_or_path,
        reward_functions(script),
        config,
        train,
        processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        **more,
    )


def run_main(main: Callable[[], None], *errors: type[Exception]) -> None:
    """Run a script; what its user did wrong (bad data, config or folder, or one of `errors`) is one line, no traceback."""
    try:
        main()
        # Left to the interpreter's end, gloo's threads now and then abort a process that has done its work.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except (checkpoints.CheckpointError, ConfigError, DatasetError, UnparsableGoldAnswer, *errors) as error:
        sys.exit(f"error: {redaction.redact(str(error))}")


def say(text: str) -> None:
    """Print on the main rank."""
    if PartialState().is_main_process:
        print(redaction.redact(text), flush=True)


class AccuracyCallback(TrainerCallback):
    """Measures held-out accuracy when training begins and every `steps` optimizer steps, on every rank.

    Training begins with the model prepared, so a sharded one can generate. What is measured between steps is logged
    with that step's metrics.

    Args:
        measure: returns an [`Evaluation`]; called on every rank.
        begin: is given the one from before the first step; a run that resumes has none.
        steps: interval; 0 never measures between steps.
        metrics: gives the lists that the trainer logs the means of.
    """

    def __init__(
        self,
        measure: Callable[..., Evaluation],
        begin: Callable[[Evaluation], None] | None,
        steps: int,
        metrics: Callable[[], dict[str, list]],
    ):
        self.measure = measure
        self.begin = begin
        self.steps = steps
        self.metrics = metrics

    def on_train_begin(self, args, state, control, **kwargs):
        if self.begin is not None and state.global_step == 0:
            self.begin(self.measure(description="accuracy before training"))

    def on_step_end(self, args, state, control, **kwargs):
        if self.steps and state.global_step % self.steps == 0:
            result = self.measure()
            for name, value in (("accuracy", result.pass_at_1), ("accuracy/n", result.n)):
                self.metrics()[name].append(value)
            control.should_log = True


class RunRecord:
    """`metrics.json` of a run: settings, accuracy before and after, seconds, and the curves; written as it goes.

    A resumed run keeps what its first part measured.
    """

    def __init__(self, output_dir: str | Path):
        self.path = Path(output_dir) / "metrics.json"
        self.content: dict[str, Any] = {}
        if self.path.is_file():
            self.content = json.loads(self.path.read_text(encoding="utf-8"))

    def put(self, **values) -> None:
        self.content |= redaction.clean(values)
        if PartialState().is_main_process:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            checkpoints.write_json(self.path, self.content)

    def draw(self) -> Path | None:
        """Reward, accuracy and step time over the run, as a picture; `None` without matplotlib."""
        try:
            from .plots import draw_run
        except ImportError:
            say("no picture: matplotlib is not installed (pip install 'trl-fsdp-qlora[plots]')")
            return None
        return draw_run(self.content, self.path.with_name("training.png"))


def run_recipe(trainer: Any, script: ScriptArguments, test: Dataset, resume: str | bool | None) -> dict[str, Any]:
    """Measure, train, measure again, save; leaves adapter, card, `metrics.json` and `training.png` in the output folder.

    Args:
        trainer: built, not yet trained.
        script: of the recipe.
        test: held-out prompts.
        resume: `resume_from_checkpoint`.

    Returns:
        The record, as in `metrics.json`.
    """
    args = trainer.args
    record = RunRecord(args.output_dir)
    tokenizer = trainer.processing_class

    def measure(samples: int = 0, description: str = "accuracy") -> Evaluation:
        with trainer.clock.phase("accuracy"), trainer.generating() as (model, lockstep):
            return evaluate(
                model,
                tokenizer,
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

    seconds_before = 0.0

    def begin(before: Evaluation) -> None:
        nonlocal seconds_before
        seconds_before = before.seconds
        say(f"before: {before}")
        record.put(before=before.as_dict())

    record.put(
        hardware=hardware(),
        software=software(),
        processes=args.world_size,
        seed=args.seed,
        dataset=redaction.portable(script.dataset),
        model=redaction.portable(trainer.model.config._name_or_path),
    )
    resume = checkpoints.resolve_resume(args.output_dir, resume)
    if not script.skip_accuracy:
        first = None if "before" in record.content else begin
        callback = AccuracyCallback(measure, first, script.accuracy_steps, lambda: trainer._metrics["train"])
        trainer.add_callback(callback)
    trainer.card_info.dataset = script.dataset
    trainer.card_info.license = script.license
    trainer.card_info.quickstart_prompt = test[0]["prompt"]
    trainer.card_info.max_new_tokens = args.max_completion_length
    argv = sys.argv
    trainer.card_info.command = ["accelerate", "launch", *argv]
    trainer.card_info.recipe_file = argv[argv.index("--config") + 1] if "--config" in argv else None
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    record.put(train_seconds=time.perf_counter() - started - seconds_before, history=trainer.state.log_history)
    if not script.skip_accuracy:
        record.put(after=measure(script.accuracy_samples, "accuracy after training").as_dict())
        results = {when: format_result(record.content[when]) for when in ("before", "after") if when in record.content}
        trainer.card_info.results = {f"held-out accuracy, {when}": result for when, result in results.items()}
    trainer.save_model()
    trainer.create_model_card(Path(args.output_dir).name)
    if PartialState().is_main_process:
        picture = record.draw()
        say(f"adapter, card, metrics.json{' and ' + picture.name if picture else ''} are in {args.output_dir}")
        if not script.skip_accuracy:
            say("  ->  ".join(results.values()))
    return record.content


def format_result(result: dict[str, Any]) -> str:
    """One line for an [`Evaluation`] kept as a dict."""
    return str(Evaluation(**{**result, "interval": tuple(result["interval"])}))
