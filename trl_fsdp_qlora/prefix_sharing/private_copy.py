"""A copy of a model that shares its weights' memory: no other code sees what a comparison does to it.

A comparison runs a backward and computes without dropout, while another thread may train the same model. So it works
on a copy with modules, parameters and settings of its own. DDP counts what arrives at the live parameters, and an
optimizer may step in a hook of theirs: both see nothing of the comparison.
"""

import contextlib
import functools
import operator
import types
from copy import copy as shallow_copy
from typing import Any

from torch import nn

from ..long_rows.tiles import Tiled
from .problems import CannotPack

# The attributes in which a module has a forward of its own, or one that ours replaced.
_FORWARDS = {"forward", "own_forward", "forward_before_sharing"}


def private_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` that shares the memory of its tensors and has leaves of its own.

    Forwards that were put on its modules (a wrapper that recomputes a layer, accelerate's, a method of ours) are
    copied, too, and call the copies.

    Raises:
        CannotPack: a module has a forward that cannot be copied, and would run the module itself.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        copies[id(module)] = object.__new__(type(module))
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad and id(parameter) not in copies:
                copies[id(parameter)] = nn.Parameter(parameter.detach())  # tied weights stay tied
    for module in model.modules():
        fields = vars(copies[id(module)])
        for name, value in vars(module).items():
            copied = _copied(value, copies)
            is_container = type(copied) in (list, set) or isinstance(copied, dict)
            fields[name] = copied.copy() if copied is value and is_container else copied
        fields["_compiled_call_impl"] = None
        for name in fields.keys() & _FORWARDS:
            if fields[name] is vars(module)[name] and not isinstance(fields[name], types.FunctionType):
                raise CannotPack(f"{type(module).__name__} has a forward that cannot be copied for a comparison")
    return copies[id(model)]


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Returns a value with copies of the modules and parameters in it; the value itself if it has none.

    Args:
        value: what a module has as an attribute, or what a function of its own refers to.
        copies: the copies by the `id` of what was copied.
    """
    if id(value) in copies:
        return copies[id(value)]
    if type(value) in (list, tuple):
        parts = [_copied(x, copies) for x in value]
        return value if all(map(operator.is_, parts, value)) else type(value)(parts)
    if isinstance(value, dict):
        entries = {name: _copied(x, copies) for name, x in value.items()}
        if all(entries[name] is x for name, x in value.items()):
            return value
        copied = value.copy()
        copied.update(entries)
        return copied
    if isinstance(value, types.MethodType):
        return types.MethodType(_copied(value.__func__, copies), _copied(value.__self__, copies))
    if isinstance(value, functools.partial):
        return functools.partial(
            _copied(value.func, copies), *_copied(value.args, copies), **_copied(value.keywords, copies)
        )
    if isinstance(value, Tiled):  # it refers to the module's own forward, and to its layer and norm
        tiled = shallow_copy(value)
        vars(tiled).update({name: _copied(x, copies) for name, x in vars(value).items()})
        return tiled
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _copied_function(value, copies)
    return value


def _copied_function(function: types.FunctionType, copies: dict[int, Any]) -> types.FunctionType:
    """Returns a function that refers to copies of the modules to which `function` refers."""
    cells = tuple(types.CellType() for _ in function.__closure__)
    copy = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    vars(copy).update(vars(function))
    copies[id(function)] = copy  # it may refer to itself
    for cell, original in zip(cells, function.__closure__, strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            cell.cell_contents = _copied(original.cell_contents, copies)
    return copy
