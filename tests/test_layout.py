"""The test of a file is found by the file's name, or by the head of the test that covers it."""

import ast
from pathlib import Path

import trl_fsdp_qlora

PACKAGE = Path(trl_fsdp_qlora.__file__).parent
TESTS = Path(__file__).parent


def test_every_file_has_a_test_by_name_or_by_head():
    heads = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in TESTS.rglob("test_*.py")]
    named = "\n".join(heads)
    files = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    without = [
        path.as_posix()
        for path in files
        if not (TESTS / path.parent / f"test_{path.stem}.py").is_file() and f"`{path.as_posix()}`" not in named
    ]
    assert without == []
