"""Everything of the user's own that a callable can reach: code, values and modules, as far as they can be followed.

Code is compared as Python compiled it, so a comment changes nothing and two lambdas on one line differ. Values are
followed as `pickle` would store them (`__reduce_ex__`), which covers slots, subclasses of built-in types and libraries'
objects. Modules of the user are followed through the names that code reads from them, installed ones count by version.
`datasets`' `Hasher` and cloudpickle store what stands in an importable module by its name alone, so a change there
would go unnoticed: the one reason for code of our own.
"""

import copyreg
import dis
import functools
import importlib
import json
import logging
import os
import sys
import sysconfig
import threading
import types
from collections import deque
from pathlib import PurePath

import numpy as np
import torch
from torch import nn

from .canonical import FingerprintError, canonical, digest, weights_digest

_STANDARD = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
_INSTALLED = {"site-packages", "dist-packages"}  # of this environment, or of another that was added to it
_THIS_PACKAGE = __package__.partition(".")[0]
_PLAIN = (type(None), bool, int, float, str, bytes)
# Nothing in them changes a reward.
_WITHOUT_STATE = (
    *(logging.Logger, logging.LoggerAdapter, threading.local, type(threading.Lock()), type(threading.RLock())),
    *(threading.Event, threading.Condition, threading.Semaphore),
)
_COMPILED = (
    *(types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
_CACHED = type(functools.cache(len))
# With these, code can reach any name of a module.
_DYNAMIC = frozenset({"getattr", "vars", "globals", "locals", "eval", "exec", "__dict__", "attrgetter", "getmembers"})
_PICKLING = ("__getstate__", "__reduce__", "__reduce_ex__")
_MODULE_OWN = frozenset(vars(types.ModuleType("m"))) | {"__file__", "__cached__", "__builtins__", "__path__"}
_CLASS_OWN = frozenset(
    {
        *("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__"),
        *("__firstlineno__", "__static_attributes__", "__dataclass_fields__", "__dataclass_params__", "_abc_impl"),
        *("__abstractmethods__", "__parameters__", "__annotations_cache__", "__annotate_func__"),
    }
)


def _is_library(module) -> bool:
    """Whether `module` is installed software, identified by a version, rather than the user's own source."""
    name = getattr(module, "__name__", "")
    if name.partition(".")[0] == _THIS_PACKAGE:
        return False  # rewards.py of this package changes without its version changing
    path = getattr(module, "__file__", None)
    if path is None:
        return name != "__main__" and not hasattr(module, "__path__") and name in sys.builtin_module_names
    target = os.path.realpath(path)
    # By both: an installer may link to its cache, and a folder of links may lead to an environment.
    if _INSTALLED & {*PurePath(path).parts, *PurePath(target).parts}:
        return True
    return any(target.startswith(root + os.sep) for root in _STANDARD)


def _version(name: str) -> list:
    top = sys.modules.get(name.partition(".")[0])
    return ["library", name, str(getattr(top, "__version__", "")), list(sys.version_info[:2])]


def _refuse(what: str) -> FingerprintError:
    return FingerprintError(
        f"{what}, on which a reward depends, cannot be followed, so a change of it could not be noticed: set "
        f"value_reward_version to a string that you change whenever the rewards change"
    )


class Reachable:
    """Turns a callable, and all that it reaches, into plain values for a digest."""

    def __init__(self, seen: dict[int, tuple[int, object]] | None = None, modules: set | None = None):
        # Numbered in the order of the walk; the object is kept, so that its id stays its own.
        self.seen: dict[int, tuple[int, object]] = dict(seen or {})
        self.modules: set[tuple[str, frozenset, bool]] = set(modules or ())

    def of(self, value):
        """`value` as something that [`canonical.digest`] takes.

        Raises:
            FingerprintError: names what cannot be followed.
        """
        if type(value) in _PLAIN:
            return canonical(value)
        if isinstance(value, types.ModuleType):
            return self._module(value, frozenset(), whole=True)
        if isinstance(value, _WITHOUT_STATE):
            return "no state"
        if isinstance(value, np.generic | torch.Tensor | PurePath) or (
            isinstance(value, np.ndarray) and value.dtype != object
        ):
            return canonical(value)
        if id(value) in self.seen:
            return ["again", self.seen[id(value)][0]]
        self.seen[id(value)] = (len(self.seen), value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value)
        return self._object(value)

    def _object(self, value):
        kind = type(value)
        if kind in (list, tuple, deque):
            return [kind.__name__, [self.of(item) for item in value]]
        if kind in (set, frozenset):
            return [kind.__name__, sorted(self._alone(item) for item in value)]
        if kind in (dict, types.MappingProxyType):
            # The order can matter to a reward and stays; equal keys have equal forms.
            return ["dict", [[self.of(key), self.of(item)] for key, item in value.items()]]
        if kind in _COMPILED:
            return self._builtin(value)
        if kind is types.CodeType:
            return self._code(value)
        if kind is types.MethodType:
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if kind in (staticmethod, classmethod):
            return [kind.__name__, self.of(value.__func__)]
        if kind is property:
            return ["property", self.of(value.fget), self.of(value.fset), self.of(value.fdel)]
        if kind is types.CellType:
            return self.of(value.cell_contents) if _filled(value) else "empty"
        if kind is _CACHED:  # what it has cached is not a part of it
            return ["lru_cache", self.of(value.__wrapped__)]
        if kind in (complex, range, slice, types.EllipsisType, types.NotImplementedType):
            return repr(value)
        if isinstance(value, nn.Module):
            return self._network(value)
        return self._instance(value)

    def _alone(self, value) -> str:
        """Digest of a member of a set: their order differs between processes, so they do not number each other."""
        return digest(Reachable(self.seen, self.modules).of(value))

    def _instance(self, value):
        """An object as `pickle` would store it, and the state that a `__getstate__` of its class may leave out."""
        kind = type(value)
        try:
            registered = copyreg.dispatch_table.get(kind)
            reduced = value.__reduce_ex__(4) if registered is None else registered(value)
        except Exception:
            raise _refuse(f"a {kind.__module__}.{kind.__qualname__}") from None
        parts = ["object", self.of(kind)]
        if isinstance(reduced, str):
            parts.append(reduced)
        else:
            make, arguments, *rest = reduced
            parts += [self.of(make), [self.of(argument) for argument in arguments]]
            parts += [self.of(rest[0]) if rest else None]
            # Iterators over items that a subclass of list or dict holds.
            parts += [[self.of(item) for item in items] for items in rest[1:3] if items is not None]
        if any(getattr(kind, name) is not getattr(object, name) for name in _PICKLING):
            parts.append(self.of(object.__getstate__(value)))
        return parts

    def _network(self, value: nn.Module):
        own = []
        for name, part in value.named_modules():
            plain = {key: item for key, item in vars(part).items() if not key.startswith("_") and key != "training"}
            if not _is_library(sys.modules.get(type(part).__module__)):
                own.append([name, self.of(type(part)), self.of(plain)])
            else:
                own.append([name, type(part).__qualname__, part.extra_repr()])
        config = value.config.to_dict() if hasattr(getattr(value, "config", None), "to_dict") else {}
        for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
            config.pop(name, None)
        config = json.loads(json.dumps(config, default=str, sort_keys=True))
        return ["network", self.of(type(value)), own, config, weights_digest(value.state_dict())]

    def _builtin(self, value):
        owner = getattr(value, "__self__", None)
        module = getattr(value, "__module__", None) or getattr(
            getattr(value, "__objclass__", None), "__module__", None
        )
        if owner is not None and not isinstance(owner, types.ModuleType):
            return ["builtin", value.__name__, self.of(owner)]
        found = sys.modules.get(module) if module else None
        if found is not None and not _is_library(found) and getattr(value, "__objclass__", None) is None:
            raise _refuse(f"{module}.{value.__qualname__}, compiled code outside the installed packages")
        return ["builtin", str(module), value.__qualname__]

    # Code

    def _function(self, function: types.FunctionType):
        parts = ["function", function.__qualname__]
        # A library's decorator holds the user's function in its closure.
        parts.append([self.of(cell) for cell in function.__closure__ or ()])
        parts.append([[name, self.of(item)] for name, item in sorted(vars(function).items())])
        if _of_library(function):
            return [*parts, _version(function.__globals__["__name__"])]
        parts.append([self.of(function.__defaults__), self.of(function.__kwdefaults__)])
        return [*parts, self._code(function.__code__), self._names(function.__code__, function.__globals__)]

    def _code(self, code: types.CodeType):
        """What runs: neither the file, nor lines, nor comments, nor docstrings' places."""
        constants = [self._code(c) if isinstance(c, types.CodeType) else self._constant(c) for c in code.co_consts]
        return [
            *("code", code.co_name, canonical(code.co_code), constants, list(code.co_names), list(code.co_varnames)),
            *(list(code.co_freevars), list(code.co_cellvars), code.co_flags, code.co_argcount),
            *(code.co_kwonlyargcount, code.co_posonlyargcount, canonical(code.co_exceptiontable)),
            list(sys.version_info[:2]),
        ]

    def _constant(self, value):
        # Not numbered: the compiler may or may not share equal constants.
        if isinstance(value, tuple):
            return ["tuple", [self._constant(item) for item in value]]
        if isinstance(value, frozenset):
            return ["frozenset", sorted(json.dumps(self._constant(item)) for item in value)]
        return canonical(value) if type(value) in _PLAIN else repr(value)

    def _names(self, code: types.CodeType, scope: dict):
        """The globals and modules that a function's code reads, by name."""
        reads = _Reads(code)
        whole = bool(reads.names & _DYNAMIC)
        parts = []
        for name in sorted(reads.globals):
            if name not in scope or name in _MODULE_OWN:
                continue
            value = scope[name]
            if isinstance(value, types.ModuleType):
                parts.append([name, self._module(value, reads.names, whole or name in reads.passed_on)])
            else:
                parts.append([name, self.of(value)])
        for target, level, items in sorted(reads.imports, key=repr):
            parts.append([target, level, self._import(target, level, items, scope, reads.names, whole)])
        return parts

    def _import(self, target: str, level: int, items: tuple, scope: dict, names: frozenset, whole: bool):
        """A module that a function's body imports: imported now, because the function does so anyway."""
        try:
            if level:
                target = importlib.util.resolve_name("." * level + target, scope.get("__package__") or "")
            module = importlib.import_module(target)
        except ImportError:
            return "not installed"
        for item in items or ():
            if item != "*" and not hasattr(module, item):
                try:
                    importlib.import_module(f"{target}.{item}")
                except ImportError:
                    continue
        # `import a.b` binds `a`.
        top = module if items else sys.modules[target.partition(".")[0]]
        return self._module(top, names | set(target.split(".")) | set(items or ()), whole or "*" in (items or ()))

    def _module(self, module: types.ModuleType, names: frozenset, whole: bool):
        """A module: the values of `names`, or of all its names where code can reach any of them."""
        names, scope = frozenset(names), vars(module)
        key = (module.__name__, names, whole)
        if key in self.modules:
            return ["module again", module.__name__]
        self.modules.add(key)
        if _is_library(module):
            # What the user set on it at run time: plain values, and functions of their own.
            found = [(name, scope[name]) for name in sorted(names & scope.keys()) if name not in _MODULE_OWN]
            own = [
                [name, self.of(value)]
                for name, value in found
                if type(value) in _PLAIN or (isinstance(value, types.FunctionType) and not _of_library(value))
            ]
            return [_version(module.__name__), own]
        if os.path.splitext(getattr(module, "__file__", None) or "")[1] in (".so", ".pyd"):
            raise _refuse(f"the module {module.__name__!r}, compiled code outside the installed packages")
        parts = []
        for name in sorted(scope if whole else names & scope.keys()):
            if name in _MODULE_OWN:
                continue
            value = scope[name]
            if isinstance(value, types.ModuleType):
                part = whole and value.__name__ == f"{module.__name__}.{name}" and name not in names
                # A package holds the submodules that anybody imported.
                parts.append([name, "submodule" if part else self._module(value, names, whole and name in names)])
            else:
                parts.append([name, self.of(value)])
        if "__getattr__" in scope:
            parts.append(self.of(scope["__getattr__"]))
        return ["module", parts]

    def _class(self, cls: type):
        module = sys.modules.get(cls.__module__)
        if _is_library(module) if module is not None else cls.__module__ in sys.stdlib_module_names:
            return ["class", cls.__qualname__, _version(cls.__module__)]
        return self._members(cls)

    def _members(self, cls: type):
        members = [(name, item) for name, item in sorted(vars(cls).items()) if name not in _CLASS_OWN]
        members = [(n, item) for n, item in members if not isinstance(item, types.GetSetDescriptorType)]
        parts = ["class", cls.__qualname__, [self.of(base) for base in cls.__bases__]]
        if type(cls) is not type:
            parts.append(self.of(type(cls)))
        return [*parts, [[name, self.of(item)] for name, item in members]]


def _of_library(function: types.FunctionType) -> bool:
    module = sys.modules.get(function.__globals__.get("__name__"))
    return module is not None and _is_library(module)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a name that is assigned after the function was made
        return False
    return True


class _Reads:
    """What a function's code reads, nested functions included.

    Attributes:
        names: every name, those of attributes too.
        globals: names of globals.
        passed_on: globals that are used in another way than by reading an attribute.
        imports: `(module, level, names)` of the imports in its body.
    """

    def __init__(self, code: types.CodeType):
        names, self.globals, self.passed_on, self.imports = set(), set(), set(), set()
        self._walk(code, names)
        self.names = frozenset(names)

    def _walk(self, code: types.CodeType, names: set) -> None:
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
        names.update(code.co_names)
        for i, step in enumerate(steps):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                self.globals.add(step.argval)
                following = steps[i + 1].opname if i + 1 < len(steps) else ""
                if not following.startswith(("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")):
                    self.passed_on.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                level, items = steps[i - 2].argval, steps[i - 1].argval
                self.imports.add((step.argval, level, items if items is None else tuple(items)))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._walk(constant, names)
