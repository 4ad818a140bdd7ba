"""The files that describe a run in its folder: its arguments, its settings and figures, and its page.

The page is `report.html`; `metrics.json` has the settings and figures. The arguments decide whether a command may
continue the run in its folder ([`check_output_dir`]); files that begin with an underscore, as theirs does, are not
uploaded.
"""

import contextlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import ModelConfig

from ...compat.transformers import model_name
from ...trainers.reporting.card import hardware, software
from ...trainers.saving import checkpoints
from ...utils import files as disk
from ...utils.nonfatal import nonfatal
from ...utils.plain import plain
from ...utils.redaction import command_line, portable, without_secrets
from ..data.import_path import is_import_path
from ..data.reasoning_gym import is_generated
from ..report.keep import write_completions
from ..report.page import NAME as PAGE
from ..report.page import write_report
from .arguments import ScriptArguments
from .checks import OWN_REWARD, Recipe
from .script import WARNINGS, say

Settings = dict[str, object]  # values of fields of a recipe, by name

# Fields that name data: a file, a folder, a name on the Hub, or a function of the user's.
DATA = ("dataset", "eval_dataset")
# Fields that name nothing but code of the user's.
CODE = ("environment", "tools", "tool_format", "accuracy_function")
# The arguments of the run in a folder. Transformers uploads nothing that begins with an underscore.
ARGUMENTS = "_arguments.json"


def code_in(settings: Mapping[str, object]) -> Settings:
    """The settings that name code, by field. A generator of reasoning-gym is data, although it is spelled alike."""
    code = {}
    for name, value in settings.items():
        is_generator = name in DATA and isinstance(value, str) and is_generated(value)
        if not value or is_generator:
            continue
        texts = value if isinstance(value, list) else [value]
        if name in CODE or any(is_import_path(str(text)) for text in texts):
            code[name] = value
    return code


def as_words(settings: Mapping[str, object]) -> list[str]:
    """`settings` as words of a command line."""
    words = []
    for name, value in settings.items():
        words.append(f"--{name}")
        values = value if isinstance(value, list) else [value]
        words += map(str, values)
    return words


# Fields for a run's folder, how it continues, how long it is, which process this one is, and whether it prints bars
# (by default TRANSFORMERS_VERBOSITY decides).
_NOT_COMPARED = {
    "output_dir", "resume_from_checkpoint", "max_steps", "num_train_epochs", "local_rank",
    "ddp_local_rank", "run_name", "disable_tqdm", "stage",
}  # fmt: skip


def _arguments(script: ScriptArguments, config: TrainingArguments, model: ModelConfig) -> Settings:
    """The fields of a recipe's parsed arguments, as plain values without secrets; paths of data are absolute."""
    values = {}
    for part in (script, config, model):
        for item in fields(part):
            if item.init and item.name not in _NOT_COMPARED:
                values[item.name] = vars(part).get(item.name)
    for name in DATA:
        if os.path.exists(values.get(name) or ""):
            values[name] = os.path.abspath(values[name])
    return plain(without_secrets(values))


def check_output_dir(script: ScriptArguments, config: TrainingArguments, model: ModelConfig) -> None:
    """Refuse a folder that holds another run, and let a command that began the run in it continue that run.

    The same command may train longer. In that case `config.resume_from_checkpoint` becomes `auto`.

    Raises:
        CheckpointError: see [`~trl_fsdp_qlora.trainers.saving.checkpoints.check_output_dir`].
    """
    path = Path(config.output_dir) / ARGUMENTS
    arguments = _arguments(script, config, model)
    changed = None  # not known
    if path.is_file():
        with contextlib.suppress(disk.CheckpointError):  # the file is damaged
            changed = checkpoints.differences(disk.read_json(path), arguments)
    if changed == [] and config.resume_from_checkpoint is None:
        config.resume_from_checkpoint = "auto"
    checkpoints.check_output_dir(config.output_dir, config.resume_from_checkpoint, changed or ())
    if PartialState().is_main_process:
        with nonfatal("the record of the command's arguments"):
            disk.write_json(path, arguments)


# Fields of the data that a run measures on, which do not apply to other data.
OF_THE_DATA = (
    "dataset", "dataset_config", "dataset_split", "eval_dataset", "eval_split", "held_out", "eval_problems",
    "question_column", "answer_column",
)  # fmt: skip
# What else an accuracy depends on, next to the trained weights.
_OF_THE_MEASUREMENT = (
    "model_name_or_path", "model_revision", "dtype", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant",
    "bf16", "max_completion_length", "answer_format", "system_prompt", "prompt_template", "chat",
    "max_tool_calling_iterations", "chat_template_kwargs", *CODE,
)  # fmt: skip


def measured_on(arguments: Mapping[str, object]) -> Settings:
    """Those of a run's arguments on which an accuracy depends: figures make a pair only if these are equal."""
    names = (*OF_THE_DATA, *_OF_THE_MEASUREMENT)
    return {name: arguments[name] for name in names if name in arguments}


def settings_in(folder: str | Path) -> Settings:
    """The fields of `recipes/evaluate.py` with which the run in `folder` measured; none if it is no run's folder.

    No other field is read: a folder may come from anyone, and cannot choose the place of a result, for example.
    """
    if not Path(folder, ARGUMENTS).is_file():
        return {}
    arguments = disk.read_json(Path(folder, ARGUMENTS))
    settings = measured_on(arguments)
    settings.pop("model_name_or_path", None)  # an adapter names its base
    for name in ("seed", "accuracy_samples", "accuracy_batch_size"):
        settings[name] = arguments.get(name)
    # The environment's own reward measures, too; other rewards may be in files that no longer exist.
    if OWN_REWARD in arguments.get("rewards", ()):
        settings["rewards"] = [OWN_REWARD]
    return {name: value for name, value in settings.items() if value is not None}


def next_commands(output_dir: str, script: ScriptArguments, is_adapter: bool) -> str:
    """Lines with what to type when a run is finished."""
    option = "--adapter" if is_adapter else "--model_name_or_path"
    # The code that the run measures with, which `evaluate` takes from no folder.
    settings = {name: vars(script)[name] for name in (*DATA, *CODE)}
    code = as_words(code_in(settings))
    evaluate = ["trl-fsdp-qlora", "evaluate", option, output_dir, *code]
    lines = [f"  measure it: {shlex.join(evaluate)}"]
    served = output_dir
    if is_adapter:
        served = f"{output_dir.rstrip('/')}-merged"
        merge = ["trl-fsdp-qlora", "merge", "--adapter", output_dir, "--output", served]
        lines.append(f"  merge it:   {shlex.join(merge)}")
    served = shlex.quote(served)
    lines.append(f"  chat:       transformers serve {served}, and in another terminal transformers chat {served}")
    page = Path(output_dir, PAGE)
    if page.is_file():
        name = shlex.quote(str(page))
        lines.append(f"  see it:     open {name} in a browser")
    return "\n".join(lines)


class RunRecord:
    """`metrics.json` of a run: facts, accuracy before and after, seconds, and the curves; written as it goes.

    A resumed run keeps the measurements of its first part.
    """

    def __init__(self, output_dir: str | Path):
        self.path = Path(output_dir) / "metrics.json"
        self.content: dict[str, Any] = {}  # JSON
        if self.path.is_file():
            try:
                self.content = disk.read_json(self.path)
            except disk.CheckpointError as error:
                say(f"{self.path}: {error}; a new record begins")

    def begin(
        self,
        trainer: Trainer,
        recipe: Recipe,
        step: int,
        is_measured: bool,
        command: list[str],
    ) -> None:
        """Write what is known of a run before it trains from `step` on.

        The accuracy from before training stays only if this part of the run measures on the same.
        """
        args = trainer.args
        now = portable(measured_on(_arguments(recipe.script, args, recipe.model)))
        changed = checkpoints.differences(self.content.get("measured_on", now), now)
        self.content.pop("after", None)  # of weights that are about to change
        if step == 0:
            self.content = {}  # the record of a run that left no checkpoint
        elif changed and self.content.pop("before", None):
            say(f"the accuracy before training is left out: it was measured on something else ({'; '.join(changed)})")
        elif is_measured and "before" not in self.content:
            say(f"{self.path} does not hold the accuracy from before training, which a resumed run cannot measure")
        names = {
            "dataset": recipe.script.dataset,
            "model": model_name(trainer.model),
            "rewards": recipe.script.rewards,
        }
        self.put(
            hardware=hardware(),
            software=software(),
            method=getattr(trainer, "method_on_card", trainer._name),
            **portable(names),
            seed=args.seed,
            command=command_line(command),
            processes=args.world_size,
            measured_on=now,
        )

    @nonfatal("metrics.json")
    def put(self, **values: object) -> None:
        self.content.update(plain(values))
        if PartialState().is_main_process:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            disk.write_json(self.path, self.content)


_MOST_WARNINGS = 50


class RunPage(TrainerCallback):
    """Keeps completions when a step is logged, and writes the page of the run when something was measured.

    The page of a run that is pushed to the Hub has no prompts and completions, because the whole folder is published.
    """

    def __init__(self, trainer: Trainer, record: RunRecord):
        self.trainer = trainer
        self.record = record
        self.folder = Path(trainer.args.output_dir)
        self.path = self.folder / PAGE
        trainer.keeps_drawn_rows = True  # of a trainer that draws completions
        self._earlier = record.content.get("warnings", [])  # of a resumed run's first part

    def on_train_begin(self, args, state, control, **kwargs):
        if args.push_to_hub:  # a page with completions may be there, of an earlier part that was not pushed
            self.write()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if "loss" in logs:
            self._keep_completions(state.global_step)
        if "accuracy" in logs or any(name.startswith("eval_") for name in logs):
            self.write()

    @nonfatal("keeping completions")
    def _keep_completions(self, step: int) -> None:
        drawn = getattr(self.trainer, "drawn_rows", None)
        if drawn is not None:
            self.trainer.drawn_rows = None
            write_completions(self.folder, step, drawn)

    @nonfatal("the page of the run")
    def write(self) -> None:
        """Write the page of what the run has left so far, on the main rank."""
        texts = list(dict.fromkeys([*self._earlier, *WARNINGS.texts]))
        trainer = self.trainer
        about = {}
        if hasattr(trainer, "startup"):
            about["startup"] = trainer.startup.block
        if hasattr(trainer, "reward_func_names"):
            weights = trainer.reward_weights.tolist()
            about["reward_weights"] = dict(zip(trainer.reward_func_names, weights, strict=True))
        self.record.put(history=trainer.state.log_history, warnings=texts[:_MOST_WARNINGS], **about)
        if PartialState().is_main_process:
            write_report(self.folder, self.path, with_completions=not trainer.args.push_to_hub)
