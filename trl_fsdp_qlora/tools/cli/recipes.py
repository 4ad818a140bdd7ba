"""`trl-fsdp-qlora recipes`: lists all recipes with their hardware and whether they were run, and prints one.

The command `config` does the same for accelerate's configs. Recipes are YAML files under
`<model>/<method>/config_<name>.yaml`, whose head has the results to expect.
"""

import re
from pathlib import Path
from typing import NamedTuple

from ...errors import UserError, did_you_mean
from ...trainers.methods import METHODS
from ...utils.resources import accelerate_config, accelerate_config_names, resource_folder
from ..run.one_line import OneLineParser

_FIELD = re.compile(r"#\s(?P<field>hardware|launch|memory|expect)\s+(?P<text>.*)")
# How the text under `expect` begins: with figures, with figures of a shorter run, or with none.
_WAS_RUN = re.compile(r"run, shortened|run|planned, never run")
_LEGEND = """
run: whether it ran here unchanged, shortened, or is planned; `recipes NAME` prints one with what to expect of it,
`recipes NAME > mine.yaml` puts one here to edit, `COMMAND --config NAME` runs it as it is."""


class RecipeFile(NamedTuple):
    """A YAML file of this package, and the facts in its head."""

    name: str
    path: Path
    command: str
    hardware: str
    was_run: str


def _head(text: str) -> dict[str, str]:
    """The comment that a recipe begins with, by field; the text before the first field is under the empty name."""
    head = {"": ""}
    field = ""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        match = _FIELD.match(line)
        if match:
            field = match["field"]
            content = match["text"]
        else:
            content = line.removeprefix("#").strip()
        before = head.get(field, "")
        head[field] = f"{before} {content}".strip()
    return head


def all_recipes() -> list[RecipeFile]:
    """Every YAML file of this package, by name."""
    recipes = []
    root = resource_folder("recipes")
    for path in sorted(root.glob("*/*/config_*.yaml")):
        head = _head(path.read_text(encoding="utf-8"))
        was_run = _WAS_RUN.match(head["expect"])
        name = recipe_name(path.relative_to(root).as_posix())
        recipe = RecipeFile(name, path, _command_of(path.parent.name), head["hardware"], was_run[0])
        recipes.append(recipe)
    return recipes


def _command_of(folder: str) -> str:
    """The command of the recipes in a folder: a trainer's begins with its room's name, any other is a command's."""
    for method in METHODS:
        if folder.startswith(method.room):
            return method.command
    return folder


def recipe_name(text: str) -> str:
    """`small-base/grpo/quickstart` for any spelling: with `recipes/`, `config_` and `.yaml`, or without."""
    text = text.removeprefix("./").removeprefix("recipes/").removesuffix(".yaml")
    folder, slash, file = text.rpartition("/")
    return f"{folder}{slash}{file.removeprefix('config_')}"


def find(text: str) -> RecipeFile:
    """The recipe called `text`.

    Raises:
        UserError: there is none; the message has the nearest name.
    """
    by_name = {recipe.name: recipe for recipe in all_recipes()}
    asked_for = recipe_name(text)
    if asked_for in by_name:
        return by_name[asked_for]
    # A user who types only the end of a name means the recipe with that end.
    with_that_end = [name for name in by_name if name.endswith(f"/{asked_for}")]
    meant = [*with_that_end, asked_for]
    hint = did_you_mean(meant[0], by_name, 0.5)
    raise UserError(f"there is no recipe {text!r}{hint}; `trl-fsdp-qlora recipes` lists them")


def recipes(words: list[str]) -> int:
    """List all recipes, or print the one that `words` names."""
    parser = OneLineParser(prog="trl-fsdp-qlora recipes", description="List the recipes; print one.")
    parser.add_argument("name", nargs="?", help="of a recipe, e.g. small-base/grpo/quickstart")
    name = parser.parse_args(words).name
    if name is not None:
        recipe = find(name)
        print(recipe.path.read_text(encoding="utf-8"), end="")
        return 0
    rows = [("recipe", "command", "run", "hardware")]
    for recipe in all_recipes():
        rows.append((recipe.name, recipe.command, recipe.was_run, recipe.hardware))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = map(str.ljust, row, widths)
        print("  ".join(cells).rstrip())
    print(_LEGEND)
    return 0


def config(words: list[str]) -> int:
    """Print the path of the accelerate config that `words` names, or the names of all."""
    parser = OneLineParser("trl-fsdp-qlora config", description="The path of an accelerate config, or all names.")
    names = accelerate_config_names()
    all_names = ", ".join(names)
    parser.add_argument("name", nargs="?", help=f"one of: {all_names}")
    name = parser.parse_args(words).name
    print(accelerate_config(name) if name else "\n".join(names))
    return 0
