"""A launcher in a child of the fork server, as on a shell: `agent.py torchrun ...`, `accelerate ...`,
`trl-fsdp-qlora ...`.

The scripts that it starts are forks of it, with the environment, output and session that it gives them: they need not
import torch and TRL again, which takes each several seconds.
"""

import gc
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

_POPEN = subprocess.Popen
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_SIGNALS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
_SIGNALS[signal.SIGQUIT] = signal.SIG_DFL


class Fork(_POPEN):
    """`subprocess.Popen`, but `python [-u] SCRIPT.py WORDS` is a fork of this process that runs SCRIPT."""

    def _execute_child(self, args, *further):
        words = [] if isinstance(args, (str, bytes, os.PathLike)) else [os.fsdecode(word) for word in args]
        script = [word for word in words[1:] if word != "-u"]
        if not script or words[0] != sys.executable or not script[0].endswith(".py"):
            return super()._execute_child(args, *further)
        bound = inspect.signature(super()._execute_child).bind(args, *further).arguments
        process = multiprocessing.get_context("fork").Process(target=_child, args=(script, bound))
        sys.stdout.flush()  # or it is written twice
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(process._bootstrap())
        self._child_created = True
        self._close_pipe_fds(*(bound[end] for end in _PIPES))


def _child(script: list[str], bound: dict) -> None:
    """Run `script` as a process that `Popen` has started with the arguments `bound`."""
    _leave_parent(bound)
    sys.stdout.reconfigure(write_through=True)  # -u, and harmless without
    sys.argv = script
    sys.path[0] = str(Path(script[0]).parent)
    runpy.run_path(script[0], run_name="__main__")


def _leave_parent(bound: dict) -> None:
    """Nothing of the launcher but what it has imported: signals, open files, the environment and `Popen` are a
    script's own.
    """
    for number, handler in _SIGNALS.items():
        signal.signal(number, handler)
    if bound["start_new_session"]:
        os.setsid()
    for stream, source in enumerate((bound["p2cread"], bound["c2pwrite"], bound["errwrite"])):
        if source != -1:
            os.dup2(source, stream)
    gc.freeze()  # what would close, on its collection, a number that is another file's by then
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    resource_tracker._resource_tracker._fd = resource_tracker._resource_tracker._pid = None
    if bound["env"] is not None:
        os.environ.clear()
        os.environ.update(bound["env"])
    if bound["cwd"] is not None:
        os.chdir(bound["cwd"])
    subprocess.Popen = subprocess_handler.Popen = _POPEN


def main() -> int | None:
    sys.argv = sys.argv[1:]
    subprocess.Popen = subprocess_handler.Popen = Fork
    if sys.argv[0] == "torchrun":
        from torch.distributed.run import main as launcher
    elif sys.argv[0] == "accelerate":
        from accelerate.commands.launch import main as launcher
    else:
        from trl_fsdp_qlora.__main__ import main as launcher
    return launcher()


if __name__ == "__main__":
    sys.exit(main())
