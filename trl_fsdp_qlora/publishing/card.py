"""The model card of a trained adapter: what it is, how it was made, and a quick start that runs as printed."""

import functools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import is_peft_model
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants
from huggingface_hub.errors import HTTPError
from transformers.utils import logging

from ..compat.transformers import auto_class_of, model_name
from ..run.nonfatal import nonfatal
from ..run.plain import plain
from ..run.redaction import clean, command_line, is_secret_name, portable, redact, secret_values

logger = logging.get_logger(__name__)

TAGS = ["trl", "grpo", "lora", "trl-fsdp-qlora"]
# What a run sets that says nothing about the result.
_NOT_RECIPE = {"output_dir", "logging_dir", "run_name", "push_to_hub", "disable_tqdm", "local_rank", "debug"}
_NOT_RECIPE |= {"resume_from_checkpoint", "show_completions", "phase_metrics", "accelerator_config"}
# What a reader looks for first, said also where it is the default.
_ALWAYS = {"dataset", "prompt_template", "system_prompt", "rewards", "answer_format", "held_out"}
_NOTHING = (None, "", [], {}, "none", ["none"])
_HUB_SECONDS = 5  # for asking the Hub for a licence: a card must not wait for a network that does not answer

_TEMPLATE = """---
{metadata}
---

# {name}

{kind} `{base}`, trained with {method} by trl-fsdp-qlora, an extension of TRL.

## Quick start

```python
{quick_start}```

## Results

{results}

## What it was not tested on

{untested}

## How it was made

{made}

{settings}

```yaml
{recipe}```
"""


@dataclass
class CardInfo:
    """What a trainer cannot know by itself and a recipe fills in.

    Args:
        dataset: Hub id or file name of the training data.
        license: SPDX id; looked up in the base model's card where it is `None`.
        results: lines such as `"greedy pass@1 97.0% (n=1000, ...)"` by what was measured.
        accuracy: of greedy decoding after training, for the Hub's evaluation metadata: `pass_at_1`, `n` and `interval`.
        accuracy_on: `"test"` or `"validation"`: on which problems.
        accuracy_step: optimizer step that `accuracy` is of; a card of other weights does not claim it.
        picture: file name of the curve, beside the card.
        data_license: SPDX id of the training data.
        recipe_file: the YAML that was run.
        settings: dataclasses of arguments beside the trainer's config: data, prompt and rewards, model and adapter.
        command: the words of the launch line; quoted, and without its secrets and machine paths, in the card.
        quickstart_prompt: a prompt (text, or messages) for the quick start.
        max_new_tokens: of the quick start.
        method: the algorithm, as a reader knows it.
    """

    dataset: str | None = None
    license: str | None = None
    results: dict[str, str] = field(default_factory=dict)
    accuracy: dict[str, Any] | None = None
    accuracy_on: str = "test"
    accuracy_step: int | None = None
    picture: str | None = None
    data_license: str | None = None
    recipe_file: str | None = None
    settings: Sequence[Any] = ()
    command: Sequence[str] | None = None
    quickstart_prompt: Any = None
    max_new_tokens: int = 64
    method: str = "GRPO"


def hardware() -> str:
    """Accelerators or processor of this machine, in words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name(0)}"
    return f"CPU, {os.cpu_count()} cores, {platform.machine()}"


def software() -> str:
    names = ("trl-fsdp-qlora", "trl", "torch", "transformers", "peft", "accelerate")
    return ", ".join(f"{name} {version(name)}" for name in names)


@functools.lru_cache(maxsize=8)  # once per run: a card is written with every checkpoint
def base_model_license(base_model: str) -> str | None:
    """SPDX id from the card of a local folder or of the Hub; `None` where none is stated.

    Where the card cannot be read (private, malformed, the Hub out of reach) the reason is logged.
    """
    local = Path(base_model) / "README.md"
    try:
        if local.is_file():
            return ModelCard.load(str(local)).data.license
        if Path(base_model).exists() or constants.HF_HUB_OFFLINE:
            return None
        data = HfApi().model_info(base_model, timeout=_HUB_SECONDS).card_data
        return None if data is None else data.license
    except (OSError, HTTPError, ValueError, yaml.YAMLError) as error:
        reason = redact(str(error)).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        logger.warning(
            "the card will say `license: other`: the licence of %s could not be looked up (%s). "
            "Set license (`--license` of a recipe) to the right one.",
            portable(base_model),
            reason,
        )
        return None


def changed_arguments(args: Any) -> dict[str, Any]:
    """The fields of a config dataclass that differ from their defaults, as plain values; no paths, no secrets.

    Data, prompt and rewards are said in any case.
    """
    changed = {}
    for item in fields(args):
        value = plain(getattr(args, item.name, None))
        default = plain(item.default_factory() if item.default_factory is not MISSING else item.default)
        # A config turns "" and None into [] or {} when it is made.
        same = value == default or (value in _NOTHING and default in _NOTHING)
        if not item.init or item.name in _NOT_RECIPE or is_secret_name(item.name):
            continue
        if not same or item.name in _ALWAYS:
            changed[item.name] = _portable(value)
    return clean(changed)


def _portable(value: Any) -> Any:
    """Paths, alone or in a list or a dictionary, without what is of one machine."""
    if isinstance(value, list):
        return [_portable(item) for item in value]
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    return portable(value) if isinstance(value, str) else value


def _recipe(args: Any, settings: Sequence[Any], peft_config: Any) -> dict[str, Any]:
    """What reproduces a run: with `settings` (of a recipe) a file that `--config` takes."""
    recipe = changed_arguments(args)
    # Each follows from the other; both together are refused.
    if args.generation_batch_size == args.per_device_train_batch_size * args.world_size * args.steps_per_generation:
        recipe.pop("generation_batch_size", None)
    if args.steps_per_generation == args.gradient_accumulation_steps:
        recipe.pop("steps_per_generation", None)
    for more in settings:
        recipe |= changed_arguments(more)
    if settings:
        # Of a recipe's model they stand in fields of their own.
        loading = {**recipe.pop("model_init_kwargs", {})}
        for name in ("revision", "attn_implementation", "dtype"):
            loading.pop(name, None)
        return recipe | ({"model_init_kwargs": loading} if loading else {})
    if peft_config is not None:
        names = ("r", "lora_alpha", "lora_dropout", "target_modules")
        recipe["lora"] = {name: plain(getattr(peft_config, name, None)) for name in names}
    return recipe


def _place(name: str, path: str, is_folder: bool, hint: str) -> str:
    """The line of a quick start that says where `name` is; what is no id on the Hub is to be filled in."""
    return f"{name} = {path!r}" + (f"  # fill in: {hint}" if is_folder else "")


def quick_start(
    base_model: str,
    adapter: str,
    prompt: Any,
    max_new_tokens: int,
    local_base: bool,
    local_adapter: bool,
    auto_class: str = "AutoModelForCausalLM",
) -> str:
    """Python that loads the adapter with plain PEFT and answers `prompt`.

    Args:
        base_model: id on the Hub, or the folder as it may be published.
        adapter: the same.
        prompt: text or messages.
        max_new_tokens: of the answer.
        local_base: `base_model` is a folder: a reader is told to fill in where it lies.
        local_adapter: `adapter` is a folder.
        auto_class: of transformers, that loads the base.
    """
    if prompt is None:
        prompt = [{"role": "user", "content": "What is 12 + 30?"}]
    if isinstance(prompt, str):
        encode = f"inputs = tokenizer({prompt!r}, return_tensors='pt')"
    else:
        encode = (
            f"messages = {prompt!r}\n"
            "inputs = tokenizer.apply_chat_template(\n"
            "    messages, add_generation_prompt=True, return_tensors='pt', return_dict=True\n)"
        )
    return (
        "from peft import PeftModel\n"
        f"from transformers import {auto_class}, AutoTokenizer\n\n"
        f"{_place('base', base_model, local_base, 'the folder of the base model')}\n"
        f"{_place('adapter', adapter, local_adapter, 'the folder that this card is in')}\n"
        "tokenizer = AutoTokenizer.from_pretrained(base)\n"
        f"model = PeftModel.from_pretrained({auto_class}.from_pretrained(base), adapter)\n"
        f"{encode}\n"
        f"output = model.generate(**inputs, max_new_tokens={max_new_tokens}, do_sample=False)\n"
        "print(tokenizer.decode(output[0, inputs['input_ids'].shape[1]:], skip_special_tokens=True))\n"
    )


def adapter_card(
    base_model: str,
    name: str,
    args: Any,
    info: CardInfo,
    peft_config: Any,
    hub_model_id: str | None,
    steps: tuple[int, int] | None = None,
    auto_class: str = "AutoModelForCausalLM",
) -> ModelCard:
    """The card of an adapter.

    Args:
        base_model: Hub id or folder of the base model.
        name: of the adapter.
        args: the trainer's config.
        info: see [`CardInfo`].
        peft_config: of the adapter, or `None` for full fine-tuning.
        hub_model_id: where it is published, for the quick start; otherwise its folder.
        steps: optimizer steps that were taken, and that were asked for.
        auto_class: of transformers, that loads the base.
    """
    base = portable(base_model)
    license_id = info.license or base_model_license(base_model)
    is_adapter = peft_config is not None
    # The Hub takes owner/name or a bare name: of a folder on this machine, only the name.
    base_id = Path(base).name if Path(base_model).exists() else base
    data = ModelCardData(
        base_model=base_id,
        datasets=[info.dataset] if info.dataset and _is_hub_id(info.dataset) else None,
        library_name="peft" if is_adapter else "transformers",
        license=license_id or "other",
        pipeline_tag="text-generation",
        tags=[*TAGS, f"base_model:adapter:{base_id}"] if is_adapter else [tag for tag in TAGS if tag != "lora"],
        model_name=name,
        eval_results=_evaluation_metadata(info),
    )
    rows = "\n".join(f"| {what} | {value} |" for what, value in info.results.items())
    made = {
        "data": info.dataset and f"`{portable(info.dataset)}`, licence {info.data_license or 'not stated'}",
        "hardware": f"{hardware()}; {args.world_size} process{'es' if args.world_size > 1 else ''}",
        "software": software(),
        "seed": args.seed,
        "optimizer steps": steps and (str(steps[0]) if steps[0] == steps[1] else f"{steps[0]} of {steps[1]}"),
        "recipe": info.recipe_file and f"`{portable(info.recipe_file)}`",
    }
    command = f"\n\n```bash\n{command_line(info.command)}\n```" if info.command else ""
    text = _TEMPLATE.format(
        metadata=data.to_yaml(),
        name=name,
        kind="A LoRA adapter for" if is_adapter else "A model fine-tuned from",
        base=base,
        method=info.method,
        quick_start=quick_start(
            base,
            hub_model_id or portable(str(args.output_dir)),
            info.quickstart_prompt,
            info.max_new_tokens,
            local_base=os.path.isabs(base_model) or Path(base_model).exists(),
            local_adapter=hub_model_id is None,
            auto_class=auto_class,
        ),
        results=_results(rows, info),
        untested=_untested(info),
        made="\n".join(f"- {key}: {value}" for key, value in made.items() if value is not None) + command,
        settings=(
            "Every setting that differs from its default, as `recipes/` take it with `--config`:"
            if info.settings
            else "Every setting that differs from its default:"
        ),
        recipe=yaml.safe_dump(_recipe(args, info.settings, peft_config), sort_keys=True, allow_unicode=True),
    )
    # Whatever field a secret came in by: a card is what gets published.
    return ModelCard(redact(text, secret_values(vars(args))))


def _is_hub_id(dataset: str) -> bool:
    """Whether a reader finds `dataset` on the Hub: it is no file, and none of the made-up tasks."""
    return dataset.count("/") == 1 and ":" not in dataset and not Path(dataset).exists() and not Path(dataset).suffix


def _evaluation_metadata(info: CardInfo) -> list[EvalResult] | None:
    """The accuracy after training as the Hub reads it (`model-index`)."""
    if info.accuracy is None or info.dataset is None:
        return None
    low, high = info.accuracy["interval"]
    data = portable(info.dataset)
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=data,
            dataset_name=f"{Path(data).name}, {_measured_on(info)}",
            metric_type="accuracy",
            metric_name=f"greedy pass@1 (n={info.accuracy['n']}, 95% interval {100 * low:.1f}-{100 * high:.1f})",
            metric_value=round(100 * info.accuracy["pass_at_1"], 1),
        )
    ]


def _measured_on(info: CardInfo) -> str:
    return "held-out problems" if info.accuracy_on == "test" else "validation problems"


def _results(rows: str, info: CardInfo) -> str:
    if not rows:
        return "No accuracy was measured in this run."
    picture = f"\n\n![reward, accuracy and seconds over the run]({info.picture})" if info.picture else ""
    return f"| measured | result |\n|---|---|\n{rows}{picture}"


def _untested(info: CardInfo) -> str:
    rest = "other data, tasks, languages and prompts, sampled answers, and whatever else its base can do and may have lost"
    if info.accuracy is None and info.accuracy_step is not None:
        return f"These weights: what was measured is of the steps that the table names. Nor {rest}."
    if info.accuracy is None:
        return f"Anything: neither the data it was trained on nor {rest}."
    return (
        f"It was measured on {info.accuracy['n']} {_measured_on(info)}, decoded greedily with at most "
        f"{info.max_new_tokens} new tokens in the prompt of the quick start. Not tested: {rest}."
    )


def card_of(trainer: Any, name: str | None = None) -> ModelCard:
    """The card of what `trainer` trains, called `name` or as its output folder."""
    model, state, info = trainer.accelerator.unwrap_model(trainer.model), trainer.state, trainer.card_info
    if info.accuracy_step not in (None, state.global_step):
        info = replace(info, accuracy=None)
    if info.method == "GRPO" and trainer.args.token_selection == "s_grpo":
        info = replace(info, method="S-GRPO ([arXiv 2504.20834](https://arxiv.org/abs/2504.20834))")
    return adapter_card(
        base_model=model_name(model),
        name=name or Path(trainer.args.output_dir).name,
        args=trainer.args,
        info=info,
        peft_config=model.peft_config["default"] if is_peft_model(model) else None,
        hub_model_id=trainer.hub_model_id if trainer.args.push_to_hub else None,
        steps=(state.global_step, max(state.max_steps, state.global_step)),
        auto_class=auto_class_of(model),
    )


def write_card(trainer: Any, name: str | None, tags: str | list[str] | None = None) -> None:
    """Write [`card_of`] `trainer` into its output folder, with `tags` beside the usual ones."""
    card = card_of(trainer, name)
    if tags:
        card.data.tags = [*card.data.tags, *([tags] if isinstance(tags, str) else tags)]
    Path(trainer.args.output_dir).mkdir(parents=True, exist_ok=True)
    card.save(Path(trainer.args.output_dir, "README.md"))


@contextmanager
def keeping_card(folder: str | Path, card: Callable[[], ModelCard]) -> Iterator[None]:
    """Around the saving of an adapter: PEFT writes a template with nothing filled in, and this machine's path to the base.

    Args:
        folder: where the adapter is written.
        card: makes the one that stands there afterwards, unless one stood there before.
    """
    path = Path(folder) / "README.md"
    before = path.read_bytes() if path.is_file() else None
    yield
    if before is not None:
        path.write_bytes(before)
    elif path.is_file():
        path.unlink()
        with nonfatal("the model card"):
            card().save(path)
