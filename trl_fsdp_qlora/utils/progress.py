"""Progress of long work: a bar in a terminal, a line now and then in a log file."""

import sys

from tqdm.auto import tqdm

LINE_SECONDS = 30.0  # between two lines on long work, if there is no terminal for a bar


def progress(task: str, total: int, unit: str, *, initial: int = 0, hidden: bool = False, leave: bool = False) -> tqdm:
    """A context with a bar that counts `unit`s of `task` and stays if `leave`; `hidden` on all ranks but the main one.

    In a log file it prints a line every [`LINE_SECONDS`], and no line if the work ends sooner.
    """
    counter = {"total": total, "initial": initial, "desc": task, "unit": f" {unit}", "disable": hidden}
    if sys.stderr.isatty():
        return tqdm(**counter, leave=leave)
    return tqdm(
        **counter,
        leave=False,
        mininterval=LINE_SECONDS,
        maxinterval=LINE_SECONDS,
        delay=LINE_SECONDS,
        bar_format="{desc}: {n:,}/{total:,}{unit}, {remaining} left\n",
    )
