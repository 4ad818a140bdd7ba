"""`trl-fsdp-qlora report RUN`: writes a page with the curves and the completions of a run."""

import itertools
from pathlib import Path

from ...errors import UserError, mistyped_path
from ..report.completions import FOLDERS
from ..report.page import NAME, write_report
from ..run.one_line import OneLineParser

_OF_A_RUN = ("trainer_state.json", "metrics.json", "adapter_config.json", "checkpoint-*", *FOLDERS)


def report(words: list[str]) -> int:
    """Write the page and print its path and what it lacks; returns the exit status."""
    parser = OneLineParser("trl-fsdp-qlora report", description="A page with the curves and the completions of a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder that a run of ours or of TRL wrote")
    parser.add_argument("--output", type=Path, help=f"file to write; {NAME} in the folder by default")
    parser.add_argument("--no_completions", action="store_true", help="leave prompts and completions out")
    options = parser.parse_args(words)
    folder = options.run
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder of a run{mistyped_path(folder)}")
    matches = itertools.chain.from_iterable(map(folder.glob, _OF_A_RUN))
    if next(matches, None) is None:
        names = ", ".join(_OF_A_RUN)
        raise UserError(f"{folder} has nothing of a run: none of {names}")
    target = options.output or folder / NAME
    if target.is_dir():
        target = target / NAME
    try:
        notes = write_report(folder, target, not options.no_completions)
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror}; --output names another file") from error
    for note in notes:
        print(note)
    megabytes = target.stat().st_size / 1e6
    print(f"{target}, {megabytes:.1f} MB")
    return 0
