"""How far something is that takes more than a few seconds: a bar on a terminal, elsewhere a line now and then."""

import sys
import time

from tqdm.auto import tqdm

from .terminal import duration

LINE_SECONDS = 30.0  # between two lines where there is no terminal; what ends sooner prints none


class ProgressLines:
    """What stands for tqdm's bar in a log file, where a bar would leave one line per refresh.

    Args:
        what: is counted, as `V*`.
        total: of it.
        unit: of `total`, in the plural.
        initial: done before.
        clock: seconds since any moment.
    """

    def __init__(self, what: str, total: int, unit: str, initial: int = 0, clock=time.monotonic):
        self.what, self.total, self.unit, self.initial, self.clock = what, total, unit, initial, clock
        self.n, self._began, self._printed = initial, clock(), clock()

    def update(self, done: int = 1) -> None:
        """Count `done` more; prints to standard error when the last line is [`LINE_SECONDS`] old."""
        self.n += done
        now = self.clock()
        if now - self._printed >= LINE_SECONDS and self.initial < self.n < self.total:
            self._printed = now
            left = duration((now - self._began) * (self.total - self.n) / (self.n - self.initial))
            print(f"{self.what}: {self.n:,}/{self.total:,} {self.unit}, {left} left", file=sys.stderr, flush=True)

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(self, *_raised) -> None:
        """Nothing is left to tidy up; a bar's is."""


def progress(what: str, total: int, unit: str, *, initial: int = 0, hidden: bool = False, leave: bool = False):
    """A context with a bar or [`ProgressLines`], which have `update` and `n`.

    Args:
        what, total, unit, initial: see [`ProgressLines`].
        hidden: neither; on every rank but the main one.
        leave: the bar stays when it is done.
    """
    if hidden or sys.stderr.isatty():
        return tqdm(total=total, initial=initial, desc=what, unit=f" {unit}", disable=hidden, leave=leave)
    return ProgressLines(what, total, unit, initial)
