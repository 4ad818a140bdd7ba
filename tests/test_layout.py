"""The test of a file is found by the file's name, or by the head of the test that covers it."""

import ast
import re
from pathlib import Path

import trl_fsdp_qlora

PACKAGE = Path(trl_fsdp_qlora.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
# A file -> why no test is found for it.
WITHOUT: dict[str, str] = {}


def heads() -> dict[Path, str]:
    """The docstring of each file of tests."""
    return {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in files_of_tests()}


def files_of_tests() -> list[Path]:
    return sorted(TESTS.rglob("test_*.py"))


def covered(head: str) -> list[str]:
    """The files of the package that a head names: paths in quotes behind "Covers"."""
    return re.findall(r"`([\w/]+\.py)`", head.partition("Covers ")[2])


def has_its_name(path: Path) -> bool:
    return (TESTS / path.parent / f"test_{path.stem}.py").is_file()


def test_every_file_has_a_test_by_name_or_by_head():
    named = {name for head in heads().values() for name in covered(head)}
    without = [path.as_posix() for path in FILES if not has_its_name(path) and path.as_posix() not in named]
    assert without == sorted(WITHOUT)


def test_a_head_names_files_that_are_there_and_have_no_test_of_their_name():
    """So a file has one place in which its test is looked for, after it was renamed too."""
    wrong = {}
    for path, head in heads().items():
        wrong[path.name] = [name for name in covered(head) if Path(name) not in FILES or has_its_name(Path(name))]
        assert head, f"{path} has no head"
    assert {name: files for name, files in wrong.items() if files} == {}
