"""math-verify in a process of its own, with a deadline: `\\boxed{9^{9^{9^9}}}` costs a run two seconds, not its life.

[`MathVerify`] is the trainer's side; run as a script, this file is the worker. It imports nothing but the standard
library here, and math-verify there, so that a worker is up in about a second.

A worker ends with the run however that ends: its input closes, or the process that started it is no longer its parent,
and while it computes the kernel counts its processor time.
"""

import atexit
import functools
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

CPU_SECONDS = 2.0  # of one comparison; an ordinary one takes 0.01 to 0.3
WALL_SECONDS = 20.0  # the same on a machine that is busy with other things
START_SECONDS = 120.0  # for importing SymPy from a cold disk
MEMORY_BYTES = 8 << 30  # address space of a worker: a power can fill the memory before the time is up


class MathVerifyError(RuntimeError):
    """math-verify is installed and cannot be started."""


def installed() -> bool:
    """Whether math-verify can be imported; does not import it (SymPy takes a second)."""
    return importlib.util.find_spec("math_verify") is not None


class MathVerify:
    """Asks a worker whether expressions are equal; started when first asked, again after it was killed.

    What takes longer than the deadline is answered with `None` ("could not be decided") and said, at the first, tenth,
    hundredth … time. May be called from several threads; a forked child starts its own worker.

    Args:
        cpu_seconds: processor time of one question.
        wall_seconds: the longest wait for an answer.
    """

    def __init__(self, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS):
        self.cpu_seconds = cpu_seconds
        self.wall_seconds = wall_seconds
        self.gave_up = 0
        self._forget()
        atexit.register(self.close)
        # A forked child (a DataLoader's, `Dataset.map`'s) has no worker; its copies of our pipes are closed with this.
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._worker: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def parses(self, text: str) -> bool | None:
        """Whether math-verify finds an expression in `text`; `None` where it does not come to an end."""
        return self._ask([text])

    def equal(self, gold: str, given: str) -> bool | None:
        """Whether math-verify takes `given` for `gold`; `None` where it does not come to an end."""
        return self._ask([gold, given])

    def _ask(self, texts: list[str]) -> bool | None:
        with self._lock:
            # A worker may die of what earlier questions left in its memory; then a fresh one decides.
            for _ in range(2):
                started_anew = self._start()
                answer = self._exchange(texts)
                if answer is not None:
                    return answer == "true"
                out_of_time = self._stop()
                if out_of_time or started_anew:
                    break
            self._say_gave_up(texts[-1])
            return None

    def _start(self) -> bool:
        """Have a worker; whether it was started now."""
        if self._worker is not None:
            return False
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        # -P: the folder of this file, which has a `datasets.py`, is not where the worker imports from.
        command = [sys.executable, "-P", __file__, str(os.getpid()), str(self.cpu_seconds)]
        self._worker = subprocess.Popen(
            command,
            bufsize=0,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        reply = self._read(START_SECONDS)
        if reply != "ready":
            self._stop()
            raise MathVerifyError(
                f"math-verify is installed but its process did not start within {START_SECONDS:.0f} s: "
                f"{reply or 'no answer'}. `python -c 'import math_verify'` shows why."
            )
        return True

    def _exchange(self, texts: list[str]) -> str | None:
        try:
            self._worker.stdin.write(json.dumps(texts).encode() + b"\n")
        except BrokenPipeError:
            return None
        return self._read(self.wall_seconds)

    def _read(self, seconds: float) -> str | None:
        """One line of the worker; `None` where it ended or `seconds` went by."""
        ready = select.select([self._worker.stdout], [], [], seconds)[0]
        line = self._worker.stdout.readline() if ready else b""
        return line.decode().strip() or None

    def _stop(self) -> bool:
        """End the worker; whether it was at a question for too long."""
        worker, self._worker = self._worker, None
        try:
            # Closed output and no exit status yet: it is on its way out. Open output: it is still computing.
            code = worker.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
            code = None
        worker.stdin.close()
        worker.stdout.close()
        return code is None or code == -signal.SIGPROF

    def _say_gave_up(self, text: str) -> None:
        self.gave_up += 1
        if self.gave_up in (1, 10, 100, 1000, 10_000):
            logger.warning(
                "math-verify did not come to an end on %r and was stopped; such an answer scores 0 (%d so far)",
                text if len(text) <= 80 else text[:77] + "...",
                self.gave_up,
            )

    def close(self) -> None:
        """End the worker, if this process has one."""
        if self._worker is not None:
            self._worker.kill()
            self._stop()


# --- the worker ----------------------------------------------------------------------------------------------------


def serve(parent: int, cpu_seconds: float) -> None:
    """Answer questions from stdin, one JSON list per line, with `true` or `false`, until the parent is gone."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; its end closes our input
    _limit_memory()
    try:
        decide = _decider()
    except Exception as error:  # said by the other side, which has a logger
        replies.write(f"{type(error).__name__}: {error}".replace("\n", " ") + "\n")
        return
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    replies.write("ready\n")
    for texts in _questions(parent):
        # Nothing handles SIGPROF, so the kernel ends this process when the time is used up, also within one long
        # multiplication that never returns to the interpreter.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            answer = decide(texts)
        except MemoryError:
            os._exit(1)  # of what earlier questions left, perhaps: a fresh worker is asked again
        except Exception:  # SymPy may raise anything on what a model writes; such an expression equals nothing
            answer = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(answer) + "\n")


def _decider() -> Callable[[list[str]], bool]:
    import math_verify

    # No limits of its own: they work in a main thread only, and not within one long multiplication.
    parse = functools.lru_cache(maxsize=1024)(functools.partial(math_verify.parse, parsing_timeout=None))

    def decide(texts: list[str]) -> bool:
        if len(texts) == 1:
            return bool(parse(texts[0]))
        return bool(math_verify.verify(parse(texts[0]), parse(texts[1]), timeout_seconds=None))

    # An API that changed must not make every answer wrong; and what is asked first finds SymPy's tables filled.
    if not decide([r"$\frac{1}{2}$", "$0.5$"]) or decide([r"$\frac{1}{2}$", "$0.6$"]):
        raise RuntimeError("this version of math-verify does not find that 1/2 is 0.5")
    return decide


def _questions(parent: int) -> Iterator[list[str]]:
    buffer = b""
    while True:
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            yield json.loads(line)
        # A forked sibling may hold our input open after the parent was killed, so its end alone is not enough.
        while not select.select([0], [], [], 5.0)[0]:
            if os.getppid() != parent:
                return
        more = os.read(0, 1 << 16)
        if not more:
            return
        buffer += more


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system: the time limits alone
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES if hard < 0 else min(MEMORY_BYTES, hard), hard))


if __name__ == "__main__":
    serve(int(sys.argv[1]), float(sys.argv[2]))
