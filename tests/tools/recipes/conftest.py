import runpy
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.fixture
def called(monkeypatch):
    """A function that runs `recipes/NAME.py` as `__main__` with command-line arguments, in this process."""

    def run(name: str, words: str | list[str]) -> None:
        arguments = words.split() if isinstance(words, str) else words
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")

    return run
