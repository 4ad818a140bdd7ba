"""An attribute of an object that has another value inside a block.

Libraries read names of their modules, classes and objects for which they have no argument. Only `compat/` uses this,
as a contract in `pyproject.toml` checks, and each use has its reason beside it. If one method of the object reads the
attribute, a `Substitute` does without (`substitute.py`).
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

_ABSENT = object()


@contextmanager
def replaced(target: object, /, **values: object) -> Iterator[None]:
    """Set attributes of `target` inside the block, and restore them when the block ends, also by an exception.

    An attribute that `target` inherited (from its class, or a class from its base) is inherited again after the block.
    Blocks may be nested.

    Args:
        target: an object, a class or a module.
        values: the value of each attribute inside the block.

    Raises:
        AttributeError: `target` has no attribute of a name; nothing is replaced then.

    Example:

        with replaced(model, get_output_embeddings=lambda: None):
            accelerator.prepare(model)
    """
    with ExitStack() as restoring:
        for name, value in values.items():
            # What `target` holds itself, without the binding of a class's `staticmethod` or `property`.
            held = _held_by(target).get(name, _ABSENT)
            before = getattr(target, name)
            setattr(target, name, value)
            restoring.callback(_restore, target, name, held, before)
        yield


def _held_by(target: object) -> Mapping[str, object]:
    return getattr(target, "__dict__", {})  # an object with `__slots__` has none


def _restore(target: object, name: str, held: object, before: object) -> None:
    if held is not _ABSENT:
        setattr(target, name, held)
    elif name in _held_by(target):
        delattr(target, name)  # it was inherited
    else:
        setattr(target, name, before)  # kept elsewhere: by a property, in a slot, as a module's submodule
