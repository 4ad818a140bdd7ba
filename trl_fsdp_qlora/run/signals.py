"""Signals: Ctrl-C while nothing can be tidied up yet, and ranks that end with the launcher that started them."""

import ctypes
import os
import signal
import sys
import threading

INTERRUPTED = 128 + signal.SIGINT  # what a shell makes of the signal


def stop_at_once() -> None:
    """Let Ctrl-C end this process where it stands, until [`stop_by_exception`].

    For the seconds in which libraries are imported: there is nothing to tidy up yet, and they may take a `KeyboardInterrupt`
    for a failure of their own. Where SIGINT is ignored (a job in the background), it stays ignored.
    """
    here = threading.current_thread() is threading.main_thread()  # no other may set a handler
    if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def stop_by_exception() -> None:
    """Let Ctrl-C be a `KeyboardInterrupt` again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_signal) -> None:
    say_stopped("stopped")
    os._exit(INTERRUPTED)


def say_stopped(text: str) -> None:
    """Print `text` to standard error on the first rank, below a terminal's ^C."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{chr(10) * sys.stderr.isatty()}{text}", file=sys.stderr, flush=True)


def end_with(launcher: str) -> None:
    """On Linux, let this process end when the process `launcher` that started it is killed: a GPU would stay taken."""
    if sys.platform == "linux" and str(os.getppid()) == launcher:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, cleared in what this process starts
