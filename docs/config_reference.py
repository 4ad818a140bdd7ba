"""Writes docs/config.md from the config classes, and the list of all commands' options from their parsers.

    python docs/config_reference.py

Run it after a field or an option was changed.
"""

import argparse
import dataclasses
import json
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

from trl_fsdp_qlora.__main__ import COMMANDS
from trl_fsdp_qlora.tools.cli.scripts import NOT_CHECKED, config_of
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.keys import LIBRARIES, OPTIONS
from trl_fsdp_qlora.trainers.config_fields import default_of, own_fields, type_name
from trl_fsdp_qlora.trainers.methods import METHODS
from trl_fsdp_qlora.utils.resources import resource_folder

PAGE = Path(__file__).with_name("config.md")
HEAD = """# Fields of the configs

```bash
trl-fsdp-qlora grpo --help      # the same texts
```

Every config takes all fields of TRL's of the same trainer ([`trl.GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig),
`trl.RLOOConfig`, `trl.DPOConfig`), with TRL's defaults and meaning. This page has what each class adds, and the fields whose default is another.

`python docs/config_reference.py` writes this page from the classes; do not edit it by hand.
"""
BASES = [config_of(method) for method in METHODS if method.stock]


def default_cell(cls: type, item: dataclasses.Field) -> str:
    """The default of a field, with its type if the default does not show it."""
    default = default_of(item)
    value_type = type_name(cls, item).removesuffix(" | None")
    if default is dataclasses.MISSING:
        return f"required (`{value_type}`)"
    if default is None or default == []:
        return f"`{default!r}` (`{value_type}`)"
    return f"`{default!r}`"


def row(cls: type, item: dataclasses.Field) -> str:
    """The line of a field in a table."""
    cells = [f"`{item.name}`", default_cell(cls, item), item.metadata["help"]]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def sections() -> list[tuple[str, str, list[str]]]:
    """Headings, what is in front of the table, and the table's lines; a field that several trainers share is in one."""
    owners: dict[str, list[str]] = {}
    for cls in BASES:
        for item in own_fields(cls):
            owners.setdefault(row(cls, item), []).append(cls.__name__)
    names = [cls.__name__ for cls in BASES]
    shared: dict[tuple[str, ...], list[str]] = {tuple(names): []}
    for line, classes in owners.items():
        shared.setdefault(tuple(classes), []).append(line)
    tables = []
    for classes, lines in sorted(shared.items(), key=lambda entry: (-len(entry[0]), names.index(entry[0][0]))):
        about = "Fields of all of these." if len(classes) > 1 else "Its own fields."
        tables.append((", ".join(classes), about, lines))
    for method in METHODS:
        if not method.stock:
            cls = config_of(method)
            about = f"The fields of `{METHODS[0].config}`, and"
            tables.append((cls.__name__, about, [row(cls, item) for item in own_fields(cls)]))
    about = "Data, rewards and accuracy of a recipe, in addition to the fields of its trainer's config."
    recipe = [row(ScriptArguments, item) for item in own_fields(ScriptArguments)]
    return [*tables, (ScriptArguments.__name__, about, recipe)]


class _Parsed(Exception):
    """A command has come as far as to its parser."""


def options_of(command: str) -> list[str]:
    """Names of the options of a command's parser, in the order of the alphabet."""
    parse = argparse.ArgumentParser.parse_known_args
    names = set()

    def record(parser, *arguments, **options):
        if not parser.add_help:  # it takes single options out of the command's words
            return parse(parser, *arguments, **options)
        names.update(action.dest for action in parser._actions if action.option_strings)
        raise _Parsed

    script = COMMANDS[command].script
    run: Callable
    if script is None:
        module = import_module(f"trl_fsdp_qlora.{COMMANDS[command].module}")
        function = getattr(module, COMMANDS[command].function)
        run = lambda: function([])  # noqa: E731
    else:
        path = str(resource_folder("recipes") / f"{script}.py")
        run = lambda: runpy.run_path(path, run_name="__main__")  # noqa: E731
    with patch.object(argparse.ArgumentParser, "parse_known_args", record), patch.object(sys, "argv", [command]):
        try:
            run()
        except _Parsed:
            return sorted(names - {"config", "help"})
    raise RuntimeError(f"{command} has parsed nothing")


def all_options() -> dict:
    """What `options.json` holds: names that all commands take which train are there once."""
    commands = {name: options_of(name) for name in COMMANDS if name not in NOT_CHECKED}
    trains = [set(names) for names in commands.values() if "num_train_epochs" in names]
    shared = set.intersection(*trains)
    for name, names in commands.items():
        if shared <= set(names):
            commands[name] = [option for option in names if option not in shared or option == "num_train_epochs"]
    versions = {library: version(library) for library in LIBRARIES}
    return {"versions": versions, "every trainer": sorted(shared), "commands": commands}


def page() -> str:
    """What docs/config.md holds."""
    parts = [HEAD]
    for heading, about, lines in sections():
        head = f"## {heading}\n\n{about}\n\n| field | default | meaning |\n|---|---|---|"
        parts.append("\n".join([head, *lines]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    OPTIONS.write_text(json.dumps(all_options(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
