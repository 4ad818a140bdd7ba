"""`trl-fsdp-qlora recipes`: which there are, on which hardware, whether they were run; and a copy of one to edit."""

from pathlib import Path

from ..checkpoints.disk import written_whole
from ..errors import UserError
from ..run.one_line import OneLineParser
from .catalog import all_recipes, find
from .words import refuse

_LEGEND = """
run: whether it ran here as it stands, shortened, or never; `recipes NAME` prints one with what to expect of it,
`recipes NAME --copy` puts one here to edit, `COMMAND --config NAME` runs it as it is."""


def recipes(words: list[str]) -> int:
    """List all recipes, print the one that `words` names, or copy it."""
    parser = OneLineParser(prog="trl-fsdp-qlora recipes", description="List the recipes; print one, or copy it here.")
    parser.add_argument("name", nargs="?", help="of a recipe, e.g. small-base/grpo/quickstart")
    parser.add_argument("--copy", action="store_true", help="write the recipe's YAML here, to be edited")
    parser.add_argument("--to", type=Path, default=Path(), metavar="PATH", help="folder or file for --copy")
    parser.add_argument("--overwrite", action="store_true", help="let --copy replace a file")
    options = parser.parse_args(words)
    if options.name is None:
        if options.copy:
            return refuse("--copy needs a recipe's name; `trl-fsdp-qlora recipes` lists them")
        rows = [("recipe", "command", "run", "hardware")]
        rows += [(recipe.name, recipe.command, recipe.was_run, recipe.hardware) for recipe in all_recipes()]
        name, command, run, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        print("\n".join(f"{row[0]:<{name}}  {row[1]:<{command}}  {row[2]:<{run}}  {row[3]}" for row in rows))
        print(_LEGEND)
        return 0
    try:
        recipe, to = find(options.name), options.to
        if not options.copy:
            print(recipe.path.read_text(encoding="utf-8"), end="")
            return 0
        target = to / recipe.path.name if to.is_dir() or to.suffix != ".yaml" else to
        if target.exists() and not options.overwrite:
            raise UserError(f"{target} is there already; --overwrite replaces it, --to PATH writes elsewhere")
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as scratch:
            scratch.write_bytes(recipe.path.read_bytes())
    except UserError as error:
        return refuse(str(error))
    except OSError as error:
        return refuse(f"{to}: {error.strerror}")
    print(f"{target} is {recipe.name}; run it: trl-fsdp-qlora {recipe.command} --config {target}")
    return 0
