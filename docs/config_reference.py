"""Writes docs/config.md from the config classes: python docs/config_reference.py

Run it after a field was added or changed: tests/test_docs.py compares the page with the classes.
"""

import dataclasses
from pathlib import Path

from trl_fsdp_qlora.tools.cli.scripts import config_of
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.trainers.methods import METHODS
from trl_fsdp_qlora.trainers.run.config_fields import default_of, own_fields, type_name

PAGE = Path(__file__).with_name("config.md")
HEAD = """# Fields of the configs

```bash
trl-fsdp-qlora grpo --help      # the same texts, together with TRL's own fields
```

Every config takes all fields of TRL's of the same trainer ([`trl.GRPOConfig`](https://huggingface.co/docs/trl/grpo_trainer#trl.GRPOConfig),
`trl.RLOOConfig`, `trl.DPOConfig`), with TRL's defaults and meaning. This page has what each class adds, and the fields whose default is another.

`python docs/config_reference.py` writes this page from the classes; do not edit it by hand.
"""
HEIRS = " and ".join(method.title for method in METHODS if not method.stock)
SECTIONS = [
    (config_of(METHODS[0]), f"{METHODS[0].title}, and what {HEIRS} inherit."),
    *(
        (config_of(method), f"{method.title}." if method.stock else f"`{METHODS[0].config}`, and")
        for method in METHODS[1:]
    ),
    (
        ScriptArguments,
        "Data, rewards and accuracy of a recipe (`recipes/*.py`), in addition to the fields of its trainer's config.",
    ),
]


def cell(text: str) -> str:
    """`text` for a cell of a table, in which a bar would begin the next cell."""
    return text.replace("|", "\\|")


def page() -> str:
    """The text of docs/config.md."""
    parts = [HEAD]
    for cls, about in SECTIONS:
        parts.append(f"## {cls.__name__}\n\n{about}\n\n| field | type | default | meaning |\n|---|---|---|---|")
        for item in own_fields(cls):
            default = default_of(item)
            default_text = "required" if default is dataclasses.MISSING else f"`{default!r}`"
            meaning = cell(item.metadata["help"])
            parts.append(f"| `{item.name}` | `{cell(type_name(cls, item))}` | {cell(default_text)} | {meaning} |")
        parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
