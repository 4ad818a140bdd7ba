"""A time limit on an engine that hangs: seconds without progress, however long a whole rollout takes.

An engine that dies raises; one that hangs (a collective whose peer is gone, a kernel that never returns) says nothing, and every
other rank waits for this one. A thread therefore looks whether the engine's steps go on. Where they do not, it raises in the
thread that waits, and where that cannot be interrupted it ends the process, whose launcher then ends the others.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from .adapter_sync import RESUME, RolloutError

LOOK_EVERY = 1.0  # second
GRACE = 5.0  # seconds in which the waiting thread may raise
# On a CPU one step may take minutes. While the process computes, a step may be this many times as long.
SLOW_STEP = 10
_COMPUTES = 0.05  # share of the limit that is used as CPU time by a process that computes
# A signal of one's own, for which Python lets blocking calls raise; real-time signals are nobody's.
_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)


class Patience:
    """Tells whether something that is looked at now and then has stood still for too long.

    Args:
        seconds: that are too many.
        clock: seconds that only go forward.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.seconds, self.clock = seconds, clock
        self.start()

    def start(self, seen: Hashable = None) -> None:
        """Count from now on.

        Args:
            seen: what was looked at last; the next look is progress if it is something else.
        """
        self._seen, self._since = seen, self.clock()

    def is_over(self, seen: Hashable) -> bool:
        """Whether `seen` is what it was `seconds` ago."""
        now = self.clock()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since > self.seconds


class EngineStall:
    """Ends what waits for an engine in this process once that has made no step for a while.

    Args:
        seconds: without a step that are too many; 0 for no limit.
        on_cpu: the engine computes on the CPU, so CPU time is progress, too. Where it computes on a GPU this process may be busy
            waiting for it.

    Attributes:
        steps: that the engine has made; whoever runs it counts them here.
    """

    def __init__(self, seconds: float, on_cpu: bool):
        self.seconds, self.on_cpu = seconds, on_cpu
        self.steps = 0
        self._lock = threading.Lock()
        self._reason: str | None = None

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Raise [`RolloutError`] inside if the engine stands still.

        Args:
            what: the engine is to do, for the error.
        """
        if not self.seconds:
            yield
            return
        waiting = threading.current_thread()
        interruptible = waiting is threading.main_thread()
        if interruptible:
            # Left in place, since a signal that comes a moment late would otherwise end the process; it does nothing then.
            signal.signal(_SIGNAL, self._raise)
        over = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(what, waiting.ident, interruptible, over), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            with self._lock:
                over.set()
                self._reason = None

    def _watch(self, what: str, waiting: int, interruptible: bool, over: threading.Event) -> None:
        moves, steps = Patience(self.seconds), Patience(SLOW_STEP * self.seconds)
        while not over.wait(min(LOOK_EVERY, self.seconds / 4)):
            used = time.process_time() // (_COMPUTES * self.seconds) if self.on_cpu else 0
            if not moves.is_over((self.steps, used)) and not steps.is_over(self.steps):
                continue
            with self._lock:
                if over.is_set():
                    return
                reason = self._describe(what, waiting)
                if interruptible:
                    self._reason = reason
                    signal.pthread_kill(waiting, _SIGNAL)
            if not over.wait(GRACE):
                self._end(reason)
            return

    def _describe(self, what: str, waiting: int) -> str:
        frame = sys._current_frames().get(waiting)
        where = "" if frame is None else f" (it is at {frame.f_code.co_filename}:{frame.f_lineno})"
        return (
            f"vLLM did not {what}: no step of the engine has ended for {self.seconds:g} s{where}. If one may take longer, raise "
            f"vllm_stall_timeout. {RESUME}"
        )

    def _raise(self, *_) -> None:
        reason, self._reason = self._reason, None
        if reason is not None:
            raise RolloutError(reason)

    def _end(self, reason: str) -> None:
        print(f"error: {reason}. It cannot be interrupted, so this process ends", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)
