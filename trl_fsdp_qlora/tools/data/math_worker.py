"""math-verify in a process of its own, with a deadline: `\\boxed{9^{9^{9^9}}}` costs a run two seconds, not its life.

[`ask`] is the trainer's side; run as a script, this file is the worker. A `ProcessPoolExecutor` would not do: its
processes import the user's script again, and training scripts begin at their top level. A signal alone does not end
one long multiplication.
"""

import atexit
import importlib.util
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading

logger = logging.getLogger(__name__)

CPU_SECONDS = 2.0  # for one question; an ordinary question takes 0.01 to 0.3
START_SECONDS = 120.0  # for importing SymPy from a cold disk
MEMORY_BYTES = 8 << 30  # address space of the worker: a power can fill the memory before the time is up

_lock = threading.Lock()
_worker: subprocess.Popen | None = None


def installed() -> bool:
    """Whether math-verify can be imported. The check does not import it, because SymPy takes a second."""
    return importlib.util.find_spec("math_verify") is not None


def ask(*texts: str) -> bool | None:
    """Whether math-verify finds an expression in one text, or takes the second text for the first.

    It is `None` if math-verify does not finish, which is logged. That worker is ended, and the next question starts
    another one.
    """
    global _worker
    with _lock:
        if _worker is None or _worker.poll() is not None:
            # -P: the worker must not import from the folder of this file, which has a `datasets.py`.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "bufsize": 0}
            _worker = subprocess.Popen([sys.executable, "-P", __file__], env=environment, **pipes)
            if _reply(START_SECONDS) != "ready":
                end()
                raise RuntimeError("math-verify does not start: `python -c 'import math_verify'` shows why")
        _worker.stdin.write(json.dumps(texts).encode() + b"\n")
        reply = _reply(10 * CPU_SECONDS)
        if reply:
            return reply == "true"
        end()
    beginning = texts[-1] if len(texts[-1]) <= 80 else texts[-1][:77] + "..."
    logger.warning("math-verify did not end on %r and was stopped; such an answer scores 0", beginning)
    return None


def _reply(seconds: float) -> str:
    """One line from the worker; empty if the worker ended or `seconds` went by."""
    ready = select.select([_worker.stdout], [], [], seconds)[0]
    return _worker.stdout.readline().decode().strip() if ready else ""


@atexit.register
def end() -> None:
    """End the worker, if this process has one."""
    global _worker
    if _worker is not None:
        _worker.kill()
        _worker.communicate()
    _worker = None


def _serve() -> None:
    """Answer questions from stdin, one JSON list per line, until stdin is closed at the run's end."""
    import resource

    import math_verify

    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the output of a library is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run; when the run ends, our input is closed
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    replies.write("ready\n")
    for line in sys.stdin:
        # Nothing handles SIGPROF, so the kernel ends this process when the time is used up. It does so even within one
        # long multiplication that never returns to the interpreter.
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            # math-verify's own limits are off: they work by signals, in the interpreter.
            parsed = [math_verify.parse(text, parsing_timeout=None) for text in json.loads(line)]
            answer = bool(parsed[0]) if len(parsed) == 1 else math_verify.verify(*parsed, timeout_seconds=None)
        except MemoryError:
            os._exit(1)  # earlier questions may have filled the memory: the next question gets a fresh worker
        except Exception:  # SymPy may raise anything on a model's text; such an expression equals nothing
            answer = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(json.dumps(bool(answer)) + "\n")


if __name__ == "__main__":
    _serve()
