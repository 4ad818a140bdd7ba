"""The model card of what a trainer trained: what it is, how it was made, and a quick start that runs as printed."""

import functools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import is_peft_model
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, constants
from transformers import ProcessorMixin

from ..compat.transformers import auto_class_of, model_name
from ..run.nonfatal import nonfatal
from ..run.plain import plain
from ..run.redaction import command_line, is_secret_name, portable

# What a run sets that says nothing about the result.
_NOT_RECIPE = {"output_dir", "logging_dir", "run_name", "push_to_hub", "disable_tqdm", "local_rank", "debug"}
_NOT_RECIPE |= {"resume_from_checkpoint", "show_completions", "phase_metrics", "accelerator_config"}
# What a reader looks for first, also where it is the default.
_ALWAYS = {"dataset", "prompt_template", "system_prompt", "rewards", "answer_format", "held_out"}
_NOTHING = (None, "", [], {}, "none", ["none"])
_HUB_SECONDS = 5  # for asking the Hub for a licence: a card must not wait for a network that does not answer

_TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

{{ "A LoRA adapter for" if is_adapter else "A model fine-tuned from" }} `{{ base }}`, trained with {{ method }} by \
trl-fsdp-qlora, an extension of TRL.

## Quick start

```python
{% if is_adapter %}from peft import PeftModel
{% endif %}from transformers import {{ auto_class }}, {{ "AutoProcessor" if processor else "AutoTokenizer" }}

base = {{ base_code }}
adapter = {{ folder_code }}
{% if processor %}picture = 'picture.png'  # fill in: the file of a picture to ask about
tokenizer = AutoProcessor.from_pretrained(base)
{% else %}tokenizer = AutoTokenizer.from_pretrained(base)
{% endif %}{% if is_adapter %}model = PeftModel.from_pretrained({{ auto_class }}.from_pretrained(base), adapter)
{% else %}model = {{ auto_class }}.from_pretrained(adapter)
{% endif %}{% if prompt is string %}inputs = tokenizer({{ prompt_code }}, return_tensors='pt')
{% else %}messages = {{ prompt_code }}
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_tensors='pt', return_dict=True
)
{% endif %}output = model.generate(**inputs, max_new_tokens={{ max_new_tokens }}, do_sample=False)
print(tokenizer.decode(output[0, inputs['input_ids'].shape[1]:], skip_special_tokens=True))
```

## Results

{% if results %}| measured | result |
|---|---|
{% for what, value in results.items() %}| {{ what }} | {{ value }} |
{% endfor %}{% if picture %}
![reward, accuracy and seconds over the run]({{ picture }})
{% endif %}{% else %}No accuracy was measured in this run.
{% endif %}
## What it was not tested on

{% if accuracy %}It was measured on {{ accuracy.n }} {{ problems }}, decoded greedily with at most {{ max_new_tokens }} new \
tokens in the prompt of the quick start. Not tested: \
{% elif accuracy_step is not none %}These weights: what was measured is of the steps that the table names. Nor \
{% else %}Anything: neither the data it was trained on nor {% endif %}other data, tasks, languages and prompts, sampled answers, \
and whatever else its base can do and may have lost.

## How it was made

{% for what, value in made.items() if value %}- {{ what }}: {{ value }}
{% endfor %}{% if command %}
```bash
{{ command }}
```
{% endif %}
Every setting that differs from its default{{ ", as `recipes/` take it with `--config`" if settings else "" }}:

```yaml
{{ recipe }}```
"""


@dataclass
class CardInfo:
    """What a trainer cannot know by itself and a recipe fills in."""

    dataset: str | None = None  # Hub id or file name of the training data
    license: str | None = None  # SPDX id; looked up in the base model's card where it is `None`
    # Lines such as "greedy pass@1 97.0% (n=1000, ...)" by what was measured.
    results: dict[str, str] = field(default_factory=dict)
    # Greedy, after training, for the Hub's metadata: `pass_at_1`, `n` and `interval`.
    accuracy: dict[str, Any] | None = None
    accuracy_on: str = "test"  # or "validation": on which problems
    accuracy_step: int | None = None  # optimizer step that `accuracy` is of; a card of other weights does not claim it
    picture: str | None = None  # file name of the curve, beside the card
    data_license: str | None = None  # SPDX id of the training data
    recipe_file: str | None = None  # the YAML that was run
    # Dataclasses of arguments beside the trainer's config: data, prompt, rewards, model, adapter.
    settings: Sequence[Any] = ()
    # Words of the launch line; quoted, without its secrets and machine paths, in the card.
    command: Sequence[str] | None = None
    quickstart_prompt: Any = None  # a prompt (text, or messages) for the quick start
    max_new_tokens: int = 64  # of the quick start
    method: str = "GRPO"  # the algorithm, as a reader knows it


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
    """SPDX id from the card of a local folder or of the Hub; `None` where there is none, or it cannot be read."""
    local = Path(base_model) / "README.md"
    with nonfatal("looking up the licence of the base (say which it is: --license, `card_info.license`)"):
        if local.is_file():
            return ModelCard.load(str(local)).data.license
        if not Path(base_model).exists() and not constants.HF_HUB_OFFLINE:
            data = HfApi().model_info(base_model, timeout=_HUB_SECONDS).card_data
            return None if data is None else data.license
    return None


def changed_arguments(args: Any) -> dict[str, Any]:
    """The fields of a config dataclass that differ from their defaults, as plain values; no paths, no secrets.

    Data, prompt and rewards are there in any case.
    """
    changed = {}
    for item in fields(args):
        if not item.init or item.name in _NOT_RECIPE or is_secret_name(item.name):
            continue
        value = plain(getattr(args, item.name, None))
        default = plain(item.default_factory() if item.default_factory is not MISSING else item.default)
        # A config turns "" and None into [] or {} when it is made.
        same = value == default or (value in _NOTHING and default in _NOTHING)
        if not same or item.name in _ALWAYS:
            changed[item.name] = portable(value)
    return changed


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
    if settings:  # whose model has fields of its own for these
        loading = recipe.pop("model_init_kwargs", {})
        loading = {k: v for k, v in loading.items() if k not in ("revision", "attn_implementation", "dtype")}
        return recipe | ({"model_init_kwargs": loading} if loading else {})
    if peft_config is not None:
        names = ("r", "lora_alpha", "lora_dropout", "target_modules")
        recipe["lora"] = {name: plain(getattr(peft_config, name, None)) for name in names}
    return recipe


def card_of(trainer: Any, name: str | None = None) -> ModelCard:
    """The card of what `trainer` trains, an adapter or a whole model, called `name` or as its output folder."""
    args, state, info = trainer.args, trainer.state, trainer.card_info
    model, name = trainer.accelerator.unwrap_model(trainer.model), name or Path(args.output_dir).name
    base_model, is_adapter = model_name(model), is_peft_model(model)
    base, data = portable(base_model), portable(info.dataset)
    # The Hub takes owner/name or a bare name: of a folder on this machine, only the name.
    base_id = Path(base).name if Path(base_model).exists() else base
    on_hub = data is not None and data.count("/") == 1 and ":" not in data and not Path(info.dataset).exists()
    problems = "held-out problems" if info.accuracy_on == "test" else "validation problems"
    prompt = info.quickstart_prompt or [{"role": "user", "content": "What is 12 + 30?"}]
    prompt_code, task, processor = repr(prompt), "text-generation", None
    columns = {"image", "images"}.intersection(getattr(trainer.train_dataset, "column_names", None) or ())
    if columns and isinstance(trainer.processing_class, ProcessorMixin) and not isinstance(prompt, str):
        task, processor = "image-text-to-text", type(trainer.processing_class).__name__
        parts = f"[{{'type': 'image', 'path': picture}}, {{'type': 'text', 'text': {prompt[-1]['content']!r}}}]"
        prompt_code = repr([*prompt[:-1], prompt[-1] | {"content": 0}]).replace("'content': 0", f"'content': {parts}")
    accuracy = info.accuracy if info.accuracy_step in (None, state.global_step) else None
    evaluation = None
    if accuracy is not None and data is not None:
        low, high = (100 * bound for bound in accuracy["interval"])
        result = EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=f"{Path(data).name}, {problems}",
            metric_type="accuracy",
            metric_name=f"greedy pass@1 (n={accuracy['n']}, 95% interval {low:.1f}-{high:.1f})",
            metric_value=round(100 * accuracy["pass_at_1"], 1),
        )
        evaluation = [result]
    card_data = ModelCardData(
        base_model=base_id,
        datasets=[data] if on_hub and not Path(data).suffix else None,
        library_name="peft" if is_adapter else "transformers",
        license=info.license or base_model_license(base_model) or "other",
        pipeline_tag=task,
        tags=["trl", "grpo", "trl-fsdp-qlora", *(["lora", f"base_model:adapter:{base_id}"] if is_adapter else [])],
        model_name=name,
        eval_results=evaluation,
    )
    to_fill_in, is_local = "  # fill in: the folder ", os.path.isabs(base_model) or Path(base_model).exists()
    folder_code = f"{portable(args.output_dir)!r}{to_fill_in}that this card is in"
    if args.push_to_hub and trainer.hub_model_id:
        folder_code = repr(trainer.hub_model_id)
    taken, asked = state.global_step, max(state.max_steps, state.global_step)
    s_grpo = info.method == "GRPO" and args.token_selection == "s_grpo"
    made = {
        "data": data and f"`{data}`, licence {info.data_license or 'not stated'}",
        "hardware": f"{hardware()}; {args.world_size} process{'es' if args.world_size > 1 else ''}",
        "software": software(),
        "processor": processor and f"`{processor}`, the base's; images in prompts",
        "seed": str(args.seed),
        "optimizer steps": str(taken) if taken == asked else f"{taken} of {asked}",
        "recipe": info.recipe_file and f"`{portable(info.recipe_file)}`",
    }
    recipe = _recipe(args, info.settings, model.peft_config["default"] if is_adapter else None)
    values = {
        "accuracy": accuracy,
        "command": info.command and command_line(info.command),
        "method": "S-GRPO ([arXiv 2504.20834](https://arxiv.org/abs/2504.20834))" if s_grpo else info.method,
        "name": name,
        "base": base,
        "is_adapter": is_adapter,
        "auto_class": auto_class_of(model),
        "base_code": repr(base) + (f"{to_fill_in}of the base model" if is_local else ""),
        "folder_code": folder_code,
        "prompt": prompt,
        "prompt_code": prompt_code,
        "processor": processor,
        "problems": problems,
        "made": made,
        "recipe": yaml.safe_dump(recipe, sort_keys=True, allow_unicode=True),
    }
    return ModelCard.from_template(card_data, template_str=_TEMPLATE, **vars(info) | values)


def write_card(trainer: Any, name: str | None, tags: str | list[str] | None = None) -> None:
    """Write [`card_of`] `trainer` into its output folder, with `tags` beside the usual ones."""
    card = card_of(trainer, name)
    card.data.tags += [tags] if isinstance(tags, str) else tags or []
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
