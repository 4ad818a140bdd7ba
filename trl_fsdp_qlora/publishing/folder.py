"""What of an adapter's folder may be published: a copy with nothing in it that a reader should not get or cannot use."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from safetensors import SafetensorError, safe_open

from ..errors import UserError
from ..run.redaction import portable_text, redact
from .logits import LOGITS

CONFIG, WEIGHTS, CARD, PICTURE = "adapter_config.json", "adapter_model.safetensors", "README.md", "training.png"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")


class PublishError(UserError):
    """Something is wrong with the folder, the card, the token or the repository; nothing, or nothing whole, was published."""


@dataclass
class Staged:
    """A folder as it is to be published.

    Args:
        folder: the copy.
        files: in it, sorted.
        base: Hub id of the base model.
        left_out: names in the original that are not published.
        recorded: there are logits from when it was saved.
    """

    folder: Path
    files: list[str]
    base: str
    left_out: list[str]
    recorded: bool


def stage(folder: str | Path, scratch: str | Path, repo: str, base: str | None = None) -> Staged:
    """Check `folder` and copy what is to be published of it into `scratch`, with the base named as readers find it.

    Args:
        folder: with an adapter that PEFT saved.
        scratch: an empty folder.
        repo: that it is published as, for the card's quick start.
        base: Hub id of the base model, needed where the adapter was trained on a folder.

    Raises:
        PublishError: no adapter, no card, a card of another base, values that are not finite, a secret or a path of this
            machine in a text; says which line to change.
    """
    folder, scratch = Path(folder), Path(scratch)
    config = _config(folder)
    trained_on = config["base_model_name_or_path"]
    base = base or trained_on
    if Path(base).exists() or not _HUB_ID.fullmatch(base):
        raise PublishError(
            f"{folder / CONFIG} names the folder {Path(base).name!r} as the base, which no reader has; say which model on the "
            "Hub it is: --base owner/name"
        )
    _check_weights(folder / WEIGHTS)
    card = _card(folder / CARD, {base, trained_on, Path(trained_on).name}, base, repo)
    texts = {
        CARD: str(card),
        CONFIG: json.dumps({**config, "base_model_name_or_path": base}, indent=2, sort_keys=True),
    }
    for name, text in texts.items():
        _check_text(folder / name, text)
        (scratch / name).write_text(text, encoding="utf-8")
    for name in (WEIGHTS, LOGITS, PICTURE):  # and nothing else: no optimizer states, no pickles, no logs
        if (folder / name).is_file():
            shutil.copyfile(folder / name, scratch / name)
    files = sorted(path.name for path in scratch.iterdir())
    left_out = sorted(path.name for path in folder.iterdir() if path.name not in files)
    return Staged(scratch, files, base, left_out, LOGITS in files)


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise PublishError(f"{str(folder)!r} is no folder")
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
            hint = f"; its folder {inside[-1]!r} has one" if inside else ""
            raise PublishError(f"{str(folder)!r} has no {name}, so no adapter to publish{hint}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base = config["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise PublishError(f"{folder / CONFIG} is no adapter's config: {error}") from None
    if not isinstance(base, str) or not base or "peft_type" not in config:
        raise PublishError(f"{folder / CONFIG} names no base model; set base_model_name_or_path in it")
    return config


def _check_weights(path: Path) -> None:
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            broken = next((name for name in names if not bool(file.get_tensor(name).isfinite().all())), None)
    except (SafetensorError, OSError) as error:
        raise PublishError(f"{path} cannot be read: {error}") from None
    if not names or broken is not None:
        what = "holds no weights" if not names else f"holds values that are not finite, in {broken}"
        raise PublishError(f"{path} {what}; publish another checkpoint")


def _card(path: Path, known: set[str], base: str, repo: str) -> ModelCard:
    """The card with `base` and `repo` where it named this machine's folders."""
    if not path.is_file():
        raise PublishError(f"{path.parent} has no {CARD}, the card; trainer.create_model_card() writes one")
    try:
        card = ModelCard.load(path)
    except (ValueError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise PublishError(f"{path}: its metadata cannot be read: {' '.join(str(error).split())}") from None
    if "More Information Needed" in card.text:
        raise PublishError(f"{path} is PEFT's empty template; trainer.create_model_card() writes a card")
    named = card.data.base_model
    if named not in known:
        raise PublishError(f"{path} says base_model: {named}, but the adapter was trained on {base}; correct the card")
    if named != base:
        tags = [tag.replace(f":{named}", f":{base}") for tag in card.data.tags or []]
        card.data.base_model, card.data.tags = base, tags
        card.text = card.text.replace(f"`{named}`", f"`{base}`")
        card.text = re.sub(rf"(?m)(model_name_or_path:? ){re.escape(named)}(?=\s)", rf"\g<1>{base}", card.text)
    text = re.sub(r"(?m)^base = '[^'\n]*'  # fill in: .*$", f"base = {base!r}", card.text)
    card.text = re.sub(r"(?m)^adapter = '[^'\n]*'  # fill in: .*$", f"adapter = {repo!r}", text)
    return card


def _check_text(path: Path, text: str) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        if redact(line) != line:
            raise PublishError(f"{path}, line {number} holds what looks like a secret; take it out")
        if portable_text(line) != line:
            raise PublishError(
                f"{path}, line {number} holds a path of this machine; take it out: {line.strip()[:100]}"
            )
