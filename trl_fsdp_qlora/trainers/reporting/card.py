"""The model card of a trained model: what it is, how it was made, and a quick start that runs as printed."""

import html
import os
import platform
from collections.abc import Sequence
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from accelerate.utils import is_peft_model
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import ProcessorMixin

from ... import __version__
from ...compat.transformers import auto_class_of, model_name
from ...utils.nonfatal import nonfatal
from ...utils.plain import plain
from ...utils.redaction import command_line, is_secret_name, portable
from ..starting.input_checks import PICTURES, columns_of
from .card_info import CardInfo

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ..trainer_run import TrainerRun

# Settings of a run that have no influence on the result, or that a config works out from other fields.
_NOT_RECIPE = {
    "output_dir",
    "logging_dir",
    "run_name",
    "push_to_hub",
    "disable_tqdm",
    "local_rank",
    "debug",
    "resume_from_checkpoint",
    "phase_metrics",
    "accelerator_config",
    "activation_checkpointing",
    "dataloader_pin_memory",
    "generation_batch_size",
    "pad_to_multiple_of",
}
# Fields of `model_init_kwargs` for which a recipe's model has its own, and what a card has of an adapter's config.
_LOADING_FIELDS = ("revision", "attn_implementation", "dtype")
_LORA_FIELDS = ("r", "lora_alpha", "lora_dropout", "target_modules")
_NOTHING = (None, "", [], {}, "none", ["none"])
_TEMPLATE = Path(__file__).with_name("card.md")


def hardware() -> str:
    """Accelerators or processor of this machine, in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"


def software() -> str:
    # A checkout on PYTHONPATH has no metadata.
    libraries = [f"{name} {version(name)}" for name in ("trl", "torch", "transformers", "peft", "accelerate")]
    return ", ".join([f"trl-fsdp-qlora {__version__}", *libraries])


def code(text: str) -> str:
    """`text` as code within a line of Markdown; a backtick, which no name has, would end it."""
    return f"`{text.replace('`', '')}`"


def escape(text: str) -> str:
    """`text` for a line of Markdown, without HTML."""
    return html.escape(text, quote=False)


def changed_arguments(args: "TrainingArguments") -> dict[str, object]:
    """Fields of a config dataclass that differ from their defaults, plain, without paths and secrets."""
    changed = {}
    for item in fields(args):
        if not item.init or item.name in _NOT_RECIPE or is_secret_name(item.name):
            continue
        value = plain(vars(args).get(item.name))
        default = plain(item.default_factory() if item.default_factory is not MISSING else item.default)
        # A config turns "" and None into [] or {} when it is made.
        if value != default and not (value in _NOTHING and default in _NOTHING):
            changed[item.name] = portable(value)
    if changed.get("steps_per_generation") == vars(args).get("gradient_accumulation_steps"):
        changed.pop("steps_per_generation", None)
    return changed


class CardText:
    """What the template `card.md` fills in: an attribute for each entry, and `data`, the metadata at the card's head.

    Args:
        trainer: the trainer whose adapter or whole model the card is of; one of this package.
        name: of the model; that of the output folder if `None`.
    """

    def __init__(self, trainer: "TrainerRun", name: str | None = None):
        self.trainer = trainer
        self.args = trainer.args
        self.state = trainer.state
        self.info: CardInfo = trainer.card_info
        self.model = trainer.accelerator.unwrap_model(trainer.model)
        self.name = name or Path(self.args.output_dir).name
        self.is_adapter = is_peft_model(self.model)

    # --- the base, and where the weights are ---

    @property
    def auto_class(self) -> str:
        return auto_class_of(self.model)

    @property
    def base_is_local(self) -> bool:
        base = Path(model_name(self.model))
        return base.is_absolute() or base.exists()

    @property
    def base(self) -> str:
        """The base's name on the Hub, or that of its folder without this machine's path."""
        base = model_name(self.model)
        return Path(base).name if self.base_is_local else base

    @property
    def folder(self) -> str:
        return portable(self.args.output_dir)

    @property
    def repository(self) -> str | None:
        return self.trainer.hub_model_id if self.args.push_to_hub else None

    # --- the quick start ---

    @property
    def processor(self) -> str | None:
        """The class of the processor if prompts have images; `None` if a tokenizer reads them."""
        processing = self.trainer.processing_class
        has_images = bool(PICTURES & columns_of(self.trainer.train_dataset))
        if not has_images or not isinstance(processing, ProcessorMixin) or isinstance(self._text_prompt, str):
            return None
        return type(processing).__name__

    @property
    def prompt(self) -> str | list[dict]:
        """A prompt like those of the training, with a picture if they have some."""
        prompt = self._text_prompt
        if self.processor is None:
            return prompt
        *before, last = prompt
        picture = {"type": "image", "path": "picture.png"}
        question = {"type": "text", "text": last["content"]}
        return [*before, {**last, "content": [picture, question]}]

    @property
    def _text_prompt(self) -> str | list[dict]:
        return self.info.quickstart_prompt or [{"role": "user", "content": "What is 12 + 30?"}]

    @property
    def template_options(self) -> str:
        """Arguments of the chat template with which the run was trained, as code."""
        options = plain(vars(self.args).get("chat_template_kwargs") or {})
        return f", **{options!r}" if options else ""

    # --- results ---

    @property
    def accuracy(self) -> dict[str, float | Sequence[float]] | None:
        """The accuracy that was measured of these very weights."""
        is_of_these_weights = self.info.accuracy_step in (None, self.state.global_step)
        return self.info.accuracy if is_of_these_weights else None

    # --- how it was made ---

    @property
    def method(self) -> str:
        is_s_grpo = self.info.method == "GRPO" and self.args.token_selection == "s_grpo"
        return "S-GRPO ([arXiv 2504.20834](https://arxiv.org/abs/2504.20834))" if is_s_grpo else self.info.method

    @property
    def dataset(self) -> str | None:
        return portable(self.info.dataset)

    @property
    def hardware(self) -> str:
        return hardware()

    @property
    def software(self) -> str:
        return software()

    @property
    def recipe_file(self) -> str | None:
        return portable(self.info.recipe_file)

    @property
    def command(self) -> str | None:
        return command_line(self.info.command) if self.info.command else None

    @property
    def recipe(self) -> str:
        """The settings that reproduce the run, as YAML; of a recipe's run a file that `--config` takes."""
        settings = changed_arguments(self.args)
        for arguments in self.info.settings:
            settings.update(changed_arguments(arguments))
        if self.info.settings:
            loading = settings.pop("model_init_kwargs", {})
            # A recipe's model has fields of its own for these.
            further = {name: loading[name] for name in loading if name not in _LOADING_FIELDS}
            if further:
                settings["model_init_kwargs"] = further
        elif self.is_adapter:
            adapter = vars(self.model.peft_config["default"])
            settings["lora"] = {name: plain(adapter.get(name)) for name in _LORA_FIELDS}
        return yaml.safe_dump(settings, sort_keys=True, allow_unicode=True)

    # --- metadata ---

    @property
    def data(self) -> ModelCardData:
        adapter_tags = ["lora", f"base_model:adapter:{self.base}"] if self.is_adapter else []
        return ModelCardData(
            base_model=self.base,
            datasets=[self.dataset] if self._dataset_is_on_hub else None,
            library_name="peft" if self.is_adapter else "transformers",
            license=self.info.license,
            pipeline_tag=self._task,
            tags=[*self.trainer._tag_names, *adapter_tags],
            model_name=self.name,
            eval_results=self._eval_result,
        )

    @property
    def _task(self) -> str:
        return "text-generation" if self.processor is None else "image-text-to-text"

    @property
    def _dataset_is_on_hub(self) -> bool:
        name = self.dataset
        is_a_hub_id = name is not None and name.count("/") == 1 and not Path(name).suffix
        return is_a_hub_id and not Path(self.info.dataset).exists()

    @property
    def _eval_result(self) -> EvalResult | None:
        """The accuracy on held-out problems, for the Hub's list of results."""
        accuracy = self.accuracy
        if accuracy is None or self.dataset is None:
            return None
        low, high = (100 * bound for bound in accuracy["interval"])
        return EvalResult(
            task_type=self._task,
            dataset_type=self.dataset,
            dataset_name=f"{Path(self.dataset).name}, held-out problems",
            metric_type="accuracy",
            metric_name=f"greedy pass@1 (n={accuracy['n']}, 95% interval {low:.1f}-{high:.1f})",
            metric_value=round(100 * accuracy["pass_at_1"], 1),
        )


def card_of(trainer: "TrainerRun", name: str | None = None) -> ModelCard:
    """The card of the adapter or the whole model that `trainer` trains, called `name` or like its output folder."""
    text = CardText(trainer, name)
    return ModelCard.from_template(text.data, template_path=_TEMPLATE, card=text, code=code, escape=escape)


@nonfatal("the model card")
def write_card(trainer: "TrainerRun", folder: str | Path, name: str | None = None, tags: Sequence[str] = ()) -> None:
    """Write [`card_of`] `trainer` into `folder`, with `tags` in addition to the usual ones."""
    card = card_of(trainer, name)
    card.data.tags += [tag for tag in tags if tag not in card.data.tags]
    Path(folder).mkdir(parents=True, exist_ok=True)
    card.save(Path(folder, "README.md"))


def write_first_card(trainer: "TrainerRun", folder: str | Path) -> None:
    """[`write_card`] if there is none, in place of PEFT's card.

    PEFT's card has nothing filled in but this machine's path to the base.
    """
    if not Path(folder, "README.md").is_file():
        write_card(trainer, folder)
