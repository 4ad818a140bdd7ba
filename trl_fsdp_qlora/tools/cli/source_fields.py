"""Names of a script's options, read from the source of its config classes; none of their libraries is imported.

To import TRL takes many seconds. A typo on the command line is answered before that, with the names that stand in the
files of TRL and transformers that are installed here.
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

PARSE = "parse_recipe"  # the function that a script calls with the classes of its options


class _NotFound(Exception):
    """A class that cannot be found by reading; the parser then answers alone."""


@cache
def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise _NotFound(str(path)) from error


def _file_of(module: str) -> Path:
    """The file of a module, found without importing its package."""
    top, *parts = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        raise _NotFound(module)
    path = Path(spec.submodule_search_locations[0], *parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _module_of(node: ast.ImportFrom, module: str, path: Path) -> str:
    """The absolute name of the module that `node`, in the file `path` of `module`, imports from."""
    if not node.level:
        return node.module
    parts = module.split(".")
    package = parts if path.name == "__init__.py" else parts[:-1]
    parents = package[: len(package) - node.level + 1]
    return ".".join([*parents, *filter(None, [node.module])])


def _find_class(name: str, module: str, path: Path) -> tuple[ast.ClassDef, str, Path]:
    """The class that is called `name` in the file `path` of `module`, with the module and the file that define it."""
    imported_from = None
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, module, path
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    imported_from = _module_of(node, module, path), alias.name
    if imported_from is None:
        raise _NotFound(f"{module}.{name}")
    source, original_name = imported_from
    return _find_class(original_name, source, _file_of(source))


@cache
def _fields(name: str, module: str, path: Path) -> dict[str, str]:
    """Types, as they are written, of the fields of a dataclass by name, those of its bases first."""
    node, module, path = _find_class(name, module, path)
    types = {}
    for base in node.bases:
        if not isinstance(base, ast.Name):
            raise _NotFound(ast.unparse(base))
        types |= _fields(base.id, module, path)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            type_text = ast.unparse(statement.annotation)
            if not type_text.startswith("ClassVar"):
                types[statement.target.id] = type_text
    return types


def option_fields(script: Path) -> dict[str, str] | None:
    """By name, the types of the fields whose options `script` takes: those of the classes that it gives to [`PARSE`].

    Returns `None` if they cannot be read, for example because another version of a library keeps them elsewhere.
    """
    types = {}
    try:
        for node in ast.walk(_tree(script)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == PARSE:
                for item in node.args[0].elts:
                    types |= _fields(item.id, "__main__", script)
    except (_NotFound, RecursionError):
        return None
    return types


def written_options(script: Path) -> set[str]:
    """The options that stand as texts in the source of `script`, as in `parser.add_argument("--seed")`."""
    texts = (node.value for node in ast.walk(_tree(script)) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str) and re.fullmatch(r"--[\w-]+", text)}
