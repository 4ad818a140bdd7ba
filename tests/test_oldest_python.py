"""`requires-python` is true on the oldest release that it allows, 3.11.0: newer syntax is ruff's job, newer library
names are here.
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What 3.11 got in patch releases (security repairs, mostly), and of 3.12 to 3.14 what is often written.
NEWER_NAMES = {
    "tarfile": {"data_filter", "tar_filter", "fully_trusted_filter", "FilterError", "LinkFallbackError"},
    "os": {"process_cpu_count", "unshare", "listdrives"},
    "os.path": {"ALLOW_MISSING", "isjunction", "isreserved", "splitroot"},
    "xml.parsers.expat": {"XMLParserType"},
    "itertools": {"batched"},
    "typing": {"override", "TypeAliasType", "TypeIs", "ReadOnly", "NoDefault", "get_protocol_members"},
    "collections.abc": {"Buffer"},
    "copy": {"replace"},
    "functools": {"Placeholder"},
    "inspect": {"BufferFlags", "markcoroutinefunction"},
    "math": {"fma", "sumprod"},
    "queue": {"ShutDown"},
    "sys": {"monitoring", "activate_stack_trampoline"},
    "types": {"get_original_bases", "CapsuleType"},
    "warnings": {"deprecated"},
}
NEWER_KEYWORDS = {
    "extract": {"filter"},
    "extractall": {"filter"},
    "unpack_archive": {"filter"},
    "parseaddr": {"strict"},
    "getaddresses": {"strict"},
    "rmtree": {"onexc"},
    "NamedTemporaryFile": {"delete_on_close"},
    "TemporaryDirectory": {"delete"},
    "add_argument": {"deprecated"},
    "glob": {"case_sensitive", "recurse_symlinks"},
    "rglob": {"case_sensitive", "recurse_symlinks"},
    "relative_to": {"walk_up"},
}
NEWER_MODULES = {"compression", "annotationlib", "concurrent.interpreters"}


def newer_features(source: str) -> list[str]:
    """Names and keywords in `source` that Python 3.11.0 does not have, each with its line."""
    used = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            used += [(node.lineno, alias.name) for alias in node.names if alias.name in NEWER_MODULES]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            newer = NEWER_NAMES.get(node.module, set())
            used += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names if alias.name in newer]
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if node.attr in NEWER_NAMES.get(owner, set()):
                used.append((node.lineno, f"{owner}.{node.attr}"))
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).rpartition(".")[2]
            newer = NEWER_KEYWORDS.get(function, set())
            used += [(node.lineno, f"{function}({word.arg}=)") for word in node.keywords if word.arg in newer]
    return [f"line {line}: {what}" for line, what in used]


def test_the_check_sees_what_came_after_3_11_0():
    assert newer_features("import tarfile\nwith tarfile.open(x) as f:\n    f.extractall(y, filter='data')") == [
        "line 3: extractall(filter=)"
    ]
    assert newer_features("from itertools import batched\nimport os\nos.path.splitroot(x)") == [
        "line 1: itertools.batched",
        "line 3: os.path.splitroot",
    ]
    assert newer_features("from itertools import chain\nf.extractall(y)\nfilter(None, x)") == []


def test_nothing_in_the_repository_is_newer_than_the_oldest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["requires-python"] == ">=3.11"
    assert project["tool"]["ruff"]["target-version"] == "py311"  # so `make lint` refuses newer syntax
    newer = {}
    for folder in ("trl_fsdp_qlora", "recipes", "benchmarks", "docs", "examples", "tests", "."):
        pattern = "*.py" if folder == "." else "**/*.py"
        for path in (ROOT / folder).glob(pattern):
            features = newer_features(path.read_text(encoding="utf-8"))
            if features:
                newer[path.relative_to(ROOT).as_posix()] = features
    assert newer == {}
