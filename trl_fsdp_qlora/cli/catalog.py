"""The recipes that come with the package: scripts, and YAML files under `<model>/<method>/config_<name>.yaml`."""

import re
from pathlib import Path
from typing import NamedTuple

from ..errors import UserError, did_you_mean
from ..run.shipped import shipped

_FIELD = re.compile(r"#\s(?P<field>hardware|launch|memory|expect)\s+(?P<text>.*)")
_NEVER = re.compile(r"\bnever run\b|\bnot measured here\b", re.IGNORECASE)
_SHORTENED = re.compile(r"\brun once\b.*\bshortened\b", re.IGNORECASE)


class Recipe(NamedTuple):
    """A YAML file of this package, and what its head says of it."""

    name: str
    path: Path
    command: str
    hardware: str
    was_run: str


def script(name: str) -> Path:
    """Path of an entry script, `grpo` for grpo.py.

    Raises:
        UserError: it is not there: an installation that is not whole.
    """
    path = shipped("recipes") / f"{name}.py"
    if not path.is_file():
        raise UserError(f"{path.name} is not in this installation; install trl-fsdp-qlora again")
    return path


def all_recipes() -> list[Recipe]:
    """Every YAML file of this package, by name."""
    root = shipped("recipes")
    return [_read(path, root) for path in sorted(root.glob("*/*/config_*.yaml"))]


def recipe_name(text: str) -> str:
    """`small-base/grpo/quickstart` of any way to write it: with `recipes/`, `config_` and `.yaml`, or without."""
    text = text.removeprefix("./").removeprefix("recipes/").removesuffix(".yaml")
    folder, slash, file = text.rpartition("/")
    return f"{folder}{slash}{file.removeprefix('config_')}"


def find(text: str) -> Recipe:
    """The recipe called `text`.

    Raises:
        UserError: there is none; names the one that is called nearly so.
    """
    known = {recipe.name: recipe for recipe in all_recipes()}
    wanted = recipe_name(text)
    if wanted in known:
        return known[wanted]
    # Somebody who gives the end of a name knows which one it is.
    ending = [name for name in known if name.endswith(f"/{wanted}")]
    hint = did_you_mean(ending[0] if ending else wanted, known, 0.5)
    raise UserError(f"there is no recipe {text!r}{hint}; `trl-fsdp-qlora recipes` lists them")


def _read(path: Path, root: Path) -> Recipe:
    head = _head(path.read_text(encoding="utf-8"))
    method = path.parent.name
    command = next((name for name in ("t_spmo", "a_star_po", "sft") if method.startswith(name)), "grpo")
    expected = f"{head['']} {head.get('hardware', '')} {head.get('expect', '')}"
    was_run = "never" if _NEVER.search(expected) else "shortened" if _SHORTENED.search(expected) else "yes"
    hardware = re.sub(r"\s*\((?=[^)]*never run)[^)]*\)", "", head.get("hardware", "not said"))
    name = recipe_name(str(path.relative_to(root).as_posix()))
    return Recipe(name, path, command.replace("_", "-"), hardware, was_run)


def _head(text: str) -> dict[str, str]:
    """The comment that a recipe begins with, by field; what stands before the first field under `""`."""
    found, field = {"": ""}, ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        match = _FIELD.match(line)
        field = match["field"] if match else field
        piece = match["text"] if match else line.removeprefix("#").strip()
        found[field] = f"{found.get(field, '')} {piece}".strip()
    return found
