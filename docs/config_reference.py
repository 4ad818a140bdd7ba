"""Writes docs/config.md from the config classes: python docs/config_reference.py. Run it after a field was changed."""

import dataclasses
from pathlib import Path

from trl_fsdp_qlora.tools.cli.scripts import config_of
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.trainers.config_fields import default_of, own_fields, type_name
from trl_fsdp_qlora.trainers.methods import METHODS

PAGE = Path(__file__).with_name("config.md")
HEAD = """# Fields of the configs

```bash
trl-fsdp-qlora grpo --help      # the same texts
```

Every config takes all fields of TRL's of the same trainer ([`trl.GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig),
`trl.RLOOConfig`, `trl.DPOConfig`), with TRL's defaults and meaning. This page has what each class adds, and the fields whose default is another.
A field that several trainers have is in the first table that names them.

`python docs/config_reference.py` writes this page from the classes; do not edit it by hand.
"""
BASES = [config_of(method) for method in METHODS if method.stock]


def row(cls: type, item: dataclasses.Field) -> str:
    """The line of a field in a table."""
    default = default_of(item)
    cells = [
        f"`{item.name}`",
        f"`{type_name(cls, item)}`",
        "required" if default is dataclasses.MISSING else f"`{default!r}`",
        item.metadata["help"],
    ]
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


if __name__ == "__main__":
    parts = [HEAD]
    for heading, about, lines in sections():
        head = f"## {heading}\n\n{about}\n\n| field | type | default | meaning |\n|---|---|---|---|"
        parts.append("\n".join([head, *lines]) + "\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")
