"""The fields that a config class adds, for its docstring and for docs/config.md, from the one text beside each
field.
"""

import dataclasses
import inspect
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from .plain import plain

Config = TypeVar("Config", bound=type)

# Fields of this package's configs that hold a word, `on` or `off` among the possible ones.
SWITCHES = ("prefix_sharing", "phase_metrics", "prompt_selection")


def spelled(value: Any, known: Collection[Any] = ("on", "off")) -> Any:
    """`value`, and for a truth value the word of `known` that YAML has read as one: `prefix_sharing: off` arrives as
    `False`.
    """
    words = {True: ("on", "yes"), False: ("off", "no")}.get(value, ()) if isinstance(value, bool) else ()
    return next((word for word in words if word in known), value)


def option(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    """A dataclass field with the one text that `--help`, the docstring and docs/config.md take; `default` may be
    `dataclasses.MISSING`, and `choices` are what the command line takes."""
    metadata = {"help": help} | ({} if choices is None else {"choices": list(choices)})
    return dataclasses.field(default=default, metadata=metadata)


# Attribute of a config: by field, what its checks have worked out where the user had left the default.
DERIVED = "_derived"


def left_at_default(config: Any) -> set[str]:
    """Names of the fields of `config` that have their default values; ask before its checks work others out."""
    return {item.name for item in dataclasses.fields(config) if _is_default(config, item)}


def note_derived(config: Any, names: Collection[str]) -> None:
    """Remember which of the fields `names`, once at their defaults, have other values now that the checks are done."""
    derived = {item.name for item in dataclasses.fields(config) if not _is_default(config, item)} & set(names)
    setattr(config, DERIVED, {name: getattr(config, name) for name in derived})


def _is_default(config: Any, item: dataclasses.Field) -> bool:
    try:
        return plain(getattr(config, item.name, None)) == plain(default_of(item))
    except (TypeError, ValueError):  # what JSON cannot hold was given by someone
        return False


def own_fields(cls: type) -> list[dataclasses.Field]:
    """Fields that the dataclass `cls` defines itself, in its order; inherited ones that it defines anew included."""
    items = {item.name: item for item in dataclasses.fields(cls)}
    return [items[name] for name in inspect.get_annotations(cls) if name in items]


def type_name(cls: type, item: dataclasses.Field) -> str:
    """`str`, `int | None`, `list[float] | None`, as `cls` says: transformers' parser rewrites a field's own type."""
    kind = inspect.get_annotations(cls)[item.name]
    return kind.__name__ if type(kind) is type else str(kind)


def default_of(item: dataclasses.Field) -> Any:
    """The default of a field; `dataclasses.MISSING` where it has none."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def documented(cls: Config) -> Config:
    """Class decorator, above `@dataclass`: append the class's own fields to its docstring, from `metadata["help"]`."""
    entries = []
    for item in own_fields(cls):
        default = default_of(item)
        given = "" if default is dataclasses.MISSING else f", *optional*, defaults to `{default!r}`"
        text = textwrap.fill(item.metadata["help"], 100, initial_indent=" " * 12, subsequent_indent=" " * 12)
        entries.append(f"        {item.name} (`{type_name(cls, item)}`{given}):\n{text}")
    cls.__doc__ = "\n".join([(cls.__doc__ or "").rstrip(), "", "    Parameters:", *entries, "    "])
    return cls
