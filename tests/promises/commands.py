"""Commands of `trl-fsdp-qlora` in this process, so that a case takes a second: what they print, and their status."""

import contextlib
import io
import sys
import traceback
from pathlib import Path

from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.cli import scripts

# One step on the CPU of the files of `tests.tiny.save_recipe_files`.
SETTINGS = {
    "model_name_or_path": "base",
    "dataset": "data.jsonl",
    "held_out": 4,
    "use_cpu": True,
    "bf16": False,
    "max_steps": 1,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "report_to": "none",
    "save_strategy": "no",
    "output_dir": "run",
}
TINY = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]


def _launched_here(words: list[str]) -> int:
    """Run the script of a command of accelerate's in this process."""
    place = next(place for place, word in enumerate(words) if word.endswith(".py"))
    return scripts.called(Path(words[place]).stem, words[place + 1 :])


def run(*words: str | Path) -> tuple[int, str]:
    """Run a command; returns its exit status, and all that it prints.

    A command that accelerate launches runs here as one process.
    """
    text = io.StringIO()
    argv = sys.argv
    name, *rest = map(str, words)
    sys.argv = ["trl-fsdp-qlora", name, *rest]
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.ExitStack() as stack:
        stack.callback(setattr, sys, "argv", argv)
        stack.callback(setattr, scripts, "launch", scripts.launch)
        scripts.launch = _launched_here
        try:
            status = main([name, *rest])
        except SystemExit as end:
            status = end.code
        except Exception:
            traceback.print_exc()
            status = 1
    return int(status or 0), text.getvalue()


def refusal(*words: str | Path) -> str:
    """The line with which a command refuses its words; the case fails if it is not one line, or the status not 2."""
    status, text = run(*words)
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0].removeprefix("error: ")
