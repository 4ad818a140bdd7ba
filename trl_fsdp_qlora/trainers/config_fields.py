"""The fields that a config class adds, for its docstring and for docs/config.md.

Both are written from the one text next to each field.
"""

import dataclasses
import inspect
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

Config = TypeVar("Config", bound=type)

# Fields of this package's configs that hold a word, with `on` or `off` among the choices.
SWITCHES = ("prefix_sharing", "mlp_tokens_per_tile", "phase_metrics", "vllm_share_base")


def spelled(value: object, known: Collection = ("on", "off")) -> Any:
    """`value`; a truth value becomes the word of `known` that YAML has read as one.

    `prefix_sharing: off`, for example, arrives as `False`.
    """
    if not isinstance(value, bool):
        return value
    words = ("on", "yes") if value else ("off", "no")
    return next((word for word in words if word in known), value)


def option(default: object, help: str, choices: Sequence[str] | None = None) -> Any:
    """A dataclass field with the one text that `--help`, the docstring and docs/config.md use.

    `default` may be `dataclasses.MISSING`; `choices` are the values that the command line accepts.
    """
    metadata: dict[str, str | list[str]] = {"help": help}
    if choices is not None:
        metadata["choices"] = list(choices)
    return dataclasses.field(default=default, metadata=metadata)


def own_fields(cls: type) -> list[dataclasses.Field]:
    """Fields that the dataclass `cls` defines, in its order; those of TRL's that it defines again included."""
    items = {item.name: item for item in dataclasses.fields(cls)}
    return [items[name] for name in _annotations(cls) if name in items]


def _annotations(cls: type) -> dict[str, type | str]:
    """The types of the fields that `cls` defines, and of a class that extends TRL's those of our mixins, too."""
    stock = vars(cls).get("STOCK")
    ours = (cls,)
    if stock is not None:
        ours = cls.__mro__[: cls.__mro__.index(stock)]
    annotations = {}
    for base in reversed(ours):
        annotations.update(inspect.get_annotations(base))
    return annotations


def type_name(cls: type, item: dataclasses.Field) -> str:
    """`str`, `int | None`, `list[float] | None`, as written in `cls`; transformers' parser rewrites a field's type."""
    annotation = _annotations(cls)[item.name]
    return annotation.__name__ if type(annotation) is type else str(annotation)


def default_of(item: dataclasses.Field) -> object:
    """The default of a field; `dataclasses.MISSING` if it has none."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def documented(cls: Config) -> Config:
    """Class decorator, above `@dataclass`: append the class's own fields to its docstring, from `metadata["help"]`."""
    lines = [(cls.__doc__ or "").rstrip(), "", "    Parameters:"]
    indent = " " * 12
    for item in own_fields(cls):
        default = default_of(item)
        about = f"`{type_name(cls, item)}`"
        if default is not dataclasses.MISSING:
            about += f", *optional*, defaults to `{default!r}`"
        lines.append(f"        {item.name} ({about}):")
        lines.append(textwrap.fill(item.metadata["help"], 100, initial_indent=indent, subsequent_indent=indent))
    lines.append("    ")
    cls.__doc__ = "\n".join(lines)
    return cls
