"""The model card of a trained model: what it is, how it was made, and a quick start that runs as printed."""

import html
import os
import platform
from collections.abc import Sequence
from dataclasses import MISSING, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

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
from ..starting.input_checks import columns_of

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


def changed_arguments(args: Any) -> dict[str, Any]:
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


def _recipe(args: Any, settings: Sequence[Any], peft_config: Any) -> dict[str, Any]:
    """The settings that reproduce a run: with `settings` (of a recipe) a file that `--config` takes."""
    recipe = changed_arguments(args)
    for arguments in settings:
        recipe.update(changed_arguments(arguments))
    if settings:  # a recipe's model has its own fields for loading
        loading = recipe.pop("model_init_kwargs", {})
        own_fields = ("revision", "attn_implementation", "dtype")
        further = {name: value for name, value in loading.items() if name not in own_fields}
        if further:
            recipe["model_init_kwargs"] = further
    elif peft_config is not None:
        names = ("r", "lora_alpha", "lora_dropout", "target_modules")
        recipe["lora"] = {name: plain(vars(peft_config).get(name)) for name in names}
    return recipe


def _eval_result(accuracy: dict[str, Any], task: str, data: str) -> EvalResult:
    """The accuracy on held-out problems of `data`, for the Hub's metadata."""
    low, high = (100 * bound for bound in accuracy["interval"])
    return EvalResult(
        task_type=task,
        dataset_type=data,
        dataset_name=f"{Path(data).name}, held-out problems",
        metric_type="accuracy",
        metric_name=f"greedy pass@1 (n={accuracy['n']}, 95% interval {low:.1f}-{high:.1f})",
        metric_value=round(100 * accuracy["pass_at_1"], 1),
    )


def card_of(trainer: Any, name: str | None = None) -> ModelCard:
    """The card of the adapter or the whole model that `trainer` trains, called `name` or like its output folder."""
    args = trainer.args
    state = trainer.state
    info = trainer.card_info
    model = trainer.accelerator.unwrap_model(trainer.model)
    name = name or Path(args.output_dir).name
    adapter = is_peft_model(model)
    base = model_name(model)
    data = portable(info.dataset)
    base_is_local = Path(base).is_absolute() or Path(base).exists()
    base = Path(base).name if base_is_local else base
    task = "text-generation"
    pictures = None
    prompt = info.quickstart_prompt or [{"role": "user", "content": "What is 12 + 30?"}]
    columns = {"image", "images"} & columns_of(trainer.train_dataset)
    if columns and isinstance(trainer.processing_class, ProcessorMixin) and not isinstance(prompt, str):
        task = "image-text-to-text"
        pictures = type(trainer.processing_class).__name__
        content = [{"type": "image", "path": "picture.png"}, {"type": "text", "text": prompt[-1]["content"]}]
        prompt = [*prompt[:-1], prompt[-1] | {"content": content}]
    accuracy = info.accuracy if info.accuracy_step in (None, state.global_step) else None
    evaluation = None
    if accuracy is not None and data is not None:
        evaluation = _eval_result(accuracy, task, data)
    on_hub = data is not None and data.count("/") == 1 and not Path(data).suffix and not Path(info.dataset).exists()
    card_data = ModelCardData(
        base_model=base,
        datasets=[data] if on_hub else None,
        library_name="peft" if adapter else "transformers",
        license=info.license,
        pipeline_tag=task,
        tags=[*trainer._tag_names, *(["lora", f"base_model:adapter:{base}"] if adapter else [])],
        model_name=name,
        eval_results=evaluation,
    )
    recipe = _recipe(args, info.settings, model.peft_config["default"] if adapter else None)
    s_grpo = info.method == "GRPO" and args.token_selection == "s_grpo"
    template_options = plain(vars(args).get("chat_template_kwargs") or {})
    values = {
        "code": code,
        "template_options": f", **{template_options!r}" if template_options else "",
        "escape": escape,
        "method": "S-GRPO ([arXiv 2504.20834](https://arxiv.org/abs/2504.20834))" if s_grpo else info.method,
        "auto_class": auto_class_of(model),
        "processing": "AutoProcessor" if pictures else "AutoTokenizer",
        "repo": trainer.hub_model_id if args.push_to_hub else None,
        "folder": portable(args.output_dir),
        "hardware": hardware(),
        "software": software(),
        "recipe_file": portable(info.recipe_file),
        "command": info.command and command_line(info.command),
        "recipe": yaml.safe_dump(recipe, sort_keys=True, allow_unicode=True),
        "name": name,
        "adapter": adapter,
        "base": base,
        "base_is_local": base_is_local,
        "data": data,
        "prompt": prompt,
        "pictures": pictures,
        "accuracy": accuracy,
        "args": args,
        "state": state,
        "info": info,
    }
    return ModelCard.from_template(card_data, template_path=_TEMPLATE, **values)


@nonfatal("the model card")
def write_card(trainer: Any, folder: str | Path, name: str | None = None, tags: Sequence[str] = ()) -> None:
    """Write [`card_of`] `trainer` into `folder`, with `tags` in addition to the usual ones."""
    card = card_of(trainer, name)
    card.data.tags += [tag for tag in tags if tag not in card.data.tags]
    Path(folder).mkdir(parents=True, exist_ok=True)
    card.save(Path(folder, "README.md"))


def write_first_card(trainer: Any, folder: str | Path) -> None:
    """[`write_card`] if there is none, in place of PEFT's card.

    PEFT's card has nothing filled in but this machine's path to the base.
    """
    if not Path(folder, "README.md").is_file():
        write_card(trainer, folder)
