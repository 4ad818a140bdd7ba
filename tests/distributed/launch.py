"""Start N gloo processes the way torchrun does, and end them all when one fails or hangs.

Ranks are children of a fork server that has imported torch, transformers and TRL, which takes a process several
seconds.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
AGENT = str(REPOSITORY / "tests/distributed/agent.py")
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    # An engine of vLLM's in the tests' own process writes torchrun's variables, which would make a rank of any script.
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    environment = {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join([str(REPOSITORY), environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**environment, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **(extra or {})}


class Rank:
    """A script, or a module after "-m", in a child of the fork server, with `Popen`'s names.

    Its errors go to the log as well or to a file of their own. A module is a new process, as by a user's shell.
    """

    def __init__(self, script, arguments, environment, log, errors=None, cwd=REPOSITORY):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.preload"])
        of_fork = (str(script), list(map(str, arguments)), dict(environment), str(log), str(errors or ""), str(cwd))
        self.process = context.Process(target=_run_script, args=of_fork)
        self.process.start()
        self.pid = self.process.pid
        self.wait = self.process.join

    def poll(self) -> int | None:
        return self.process.exitcode

    returncode = property(poll)


def _run_script(script, arguments, environment, log, errors, cwd):
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests run in a shell's background
    output, errors = (name and os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in (log, errors))
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, errors or output)):
        os.dup2(source, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if script == "-m":
        os.execv(sys.executable, [sys.executable, script, *arguments])
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), str(REPOSITORY)]
    runpy.run_path(script, run_name="__main__")


def end_all(processes: Sequence) -> None:
    """Kill what is left of each process's group and of its descendants, which a launcher may have put into others."""
    for process in processes:
        children = []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def _patient(seconds: float) -> float:
    """On a machine that others use too, or on an emulated device, everything lasts longer."""
    return seconds * float(os.environ.get("TEST_PATIENCE", "1"))


def launch_all(
    starts: Sequence[tuple[str, Sequence, Mapping[str, str]]],
    timeout: float,
    check: bool = True,
    grace: float = 10,
    meanwhile: Callable[[Sequence], None] | None = None,
) -> list[tuple[int, str]]:
    """`(exit code, output)` of each script, arguments and environment in `starts`; see [`launch`]."""
    processes = []
    timed_out = False
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(len(starts))]
        try:
            for start, log in zip(starts, logs, strict=True):
                log.touch()
                processes.append(Rank(*start, log))
            if meanwhile is not None:
                meanwhile(processes)
            deadline = time.monotonic() + _patient(timeout)
            while any(process.poll() is None for process in processes) and not timed_out:
                if any(process.poll() not in (None, 0) for process in processes):
                    deadline = min(deadline, time.monotonic() + grace)
                timed_out = time.monotonic() > deadline
                time.sleep(0.05)
        finally:
            end_all(processes)
        results = [(p.returncode, log.read_text(errors="replace")) for p, log in zip(processes, logs, strict=True)]
    if check and (timed_out or any(code for code, _ in results)):
        lines = (f"--- rank {rank}, exit code {code} ---\n{text}" for rank, (code, text) in enumerate(results))
        raise AssertionError("\n".join(["ended by the launcher" if timed_out else "a rank failed", *lines]))
    return results


def _completed(script, words, environment, cwd, timeout) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.txt"
        errors = Path(folder) / "errors.txt"
        process = Rank(script, words, environment, output, errors, cwd)
        try:
            process.wait(_patient(timeout))
        finally:
            end_all([process])
        texts = (file.read_text(errors="replace") for file in (output, errors))
        return subprocess.CompletedProcess([script, *words], process.returncode, *texts)


def run_script(script: str | Path, *arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess:
    """`python SCRIPT ARGUMENTS` in one process, which need not import torch and TRL first; output and errors apart."""
    return _completed(REPOSITORY / script, arguments, rank_environment(None), cwd, timeout)


def run_code(code: str, *, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess:
    """`python -c CODE`, see [`run_script`]; not for what has to find nothing imported."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "code.py"
        script.write_text(code, encoding="utf-8")
        return run_script(script, cwd=cwd, timeout=timeout)


def run_launcher(
    *words: str,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
    from_shell: bool = False,
) -> subprocess.CompletedProcess:
    """`accelerate ...` (without `launch`), `torchrun ...` or `trl-fsdp-qlora ...`; what it has started ends with it.

    Launcher and ranks have imported everything already, see agent.py. With `from_shell`, which is for accelerate
    alone, they are started as a user's shell does: if a GPU is used, or the command line that the system knows of
    is read.
    """
    script, words = ("-m", ["accelerate.commands.launch", *words[1:]]) if from_shell else (AGENT, words)
    return _completed(script, words, rank_environment(environment), cwd, timeout)


def accelerate_launch(
    config: str, script: str, *arguments: str, cwd: Path, timeout: float = 300, from_shell: bool = False
) -> subprocess.CompletedProcess:
    """`accelerate launch` with one of our configs, see [`run_launcher`]."""
    words = ["accelerate", "--config_file", REPOSITORY / "accelerate_configs" / f"{config}.yaml"]
    words += [] if config == "cpu" else ["--main_process_port", free_port()]
    return run_launcher(*words, REPOSITORY / script, *arguments, cwd=cwd, timeout=timeout, from_shell=from_shell)


def launch(
    script: str | Path,
    *arguments: str | Path,
    processes: int = 2,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
    **options,
) -> list[tuple[int, str]]:
    """`(exit code, output)` of a Python script on each of `processes` gloo ranks with torchrun's environment
    variables.

    When one fails, the others have `grace` seconds to end by themselves and are then killed, which gives a negative
    code. With `check` a code that is not zero raises. `meanwhile` is called with the processes that were started.
    """
    port = str(free_port())
    starts = []
    for rank in map(str, range(processes)):
        values = (rank, rank, str(processes), str(processes), "127.0.0.1", port)
        variables = dict(zip(TORCHRUN, values, strict=True)) if processes > 1 else {}
        complete_environment = rank_environment({**variables, **(environment or {})})
        starts.append((REPOSITORY / script, arguments, complete_environment))
    return launch_all(starts, timeout, **options)
