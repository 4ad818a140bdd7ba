"""Start N gloo processes the way torchrun does, and end them all when one fails or hangs.

Ranks are children of a fork server that has imported torch, transformers and TRL, which takes a process several seconds.
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
from functools import partial
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


class _Rank:
    """A script in a child of the fork server, with `Popen`'s names; its errors go to the log as well or to a file."""

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        errors: Path | None = None,
        cwd: Path = REPOSITORY,
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.distributed.preload"])
        given = (script, arguments, dict(environment), (str(log), errors and str(errors)), str(cwd))
        self.process = context.Process(target=_run_script, args=given)
        self.process.start()
        self.pid, self.wait = self.process.pid, self.process.join

    def poll(self) -> int | None:
        return self.process.exitcode

    returncode = property(poll)


def _run_script(
    script: str, arguments: Sequence[str], environment: dict[str, str], streams: tuple[str, str | None], cwd: str
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
    output, errors = (name and os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in streams)
    for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, errors or output)):
        os.dup2(source, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), str(REPOSITORY)]
    runpy.run_path(script, run_name="__main__")


def _from_shell(words: Sequence[str], environment: Mapping[str, str], log: Path, errors: Path, cwd: Path):
    with log.open("wb") as output, errors.open("wb") as complaints:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": complaints}
        return subprocess.Popen(words, **streams, env=environment, cwd=cwd, start_new_session=True)


def _end_all(processes: Sequence) -> None:
    """Kill what is left of each process's group and of its descendants, which a launcher may have put into others."""
    for process in processes:
        try:
            children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        except psutil.NoSuchProcess:
            children = []
        for end in (lambda pid=process.pid: os.killpg(pid, signal.SIGKILL), *(child.kill for child in children)):
            try:
                end()
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        process.wait()


def _run(
    starts: Sequence[Callable[[Path], object]],
    timeout: float,
    check: bool,
    grace: float = 10,
    meanwhile: Callable[[Sequence], None] | None = None,
) -> list[tuple[int, str]]:
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(len(starts))]
        processes, timed_out = [], False
        try:
            for start, log in zip(starts, logs, strict=True):
                log.touch()
                processes.append(start(log))
            if meanwhile is not None:
                meanwhile(processes)
            # On a machine that others use too, or on an emulated device, all of them last longer.
            deadline = time.monotonic() + timeout * float(os.environ.get("TEST_PATIENCE", "1"))
            while any(process.poll() is None for process in processes):
                if any(process.poll() not in (None, 0) for process in processes):
                    deadline = min(deadline, time.monotonic() + grace)
                if time.monotonic() > deadline:
                    timed_out = True
                    break
                time.sleep(0.05)
        finally:
            _end_all(processes)
        codes = [process.returncode for process in processes]
        results = [(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]
    if check and (timed_out or any(codes)):
        lines = (f"--- rank {rank}, exit code {code} ---\n{text}" for rank, (code, text) in enumerate(results))
        report = "\n".join(lines)
        raise AssertionError(f"{'ended by the launcher' if timed_out else 'a rank failed'}\n{report}")
    return results


def _completed(start: Callable[..., object], words: Sequence[str], cwd: Path, timeout: float):
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "errors.txt"
        [(code, output)] = _run([partial(start, errors=errors, cwd=cwd)], timeout, check=False)
        return subprocess.CompletedProcess(words, code, output, errors.read_text(errors="replace"))


def run_script(script: str | Path, *arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess:
    """`python SCRIPT ARGUMENTS` in one process, which need not import torch and TRL first; output and errors apart."""
    words = [str(REPOSITORY / script), *map(str, arguments)]
    return _completed(partial(_Rank, words[0], words[1:], rank_environment(None)), words, cwd, timeout)


def run_code(code: str, *arguments: str, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess:
    """`python -c CODE ARGUMENTS`, see [`run_script`]; not for what has to find nothing imported."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "code.py"
        script.write_text(code, encoding="utf-8")
        return run_script(script, *arguments, cwd=cwd, timeout=timeout)


def run_launcher(
    *words: str,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
    from_shell: bool = False,
) -> subprocess.CompletedProcess:
    """`accelerate ...` (without `launch`), `torchrun ...` or `trl-fsdp-qlora ...`; what it has started ends with it.

    Launcher and ranks have imported everything already, see agent.py. With `from_shell`, which is for accelerate alone, they
    are started as a user's shell does: where a GPU is used, or the command line that the system knows of is asked for.
    """
    words, variables = list(map(str, words)), rank_environment(environment)
    start = partial(_Rank, AGENT, words, variables)
    if from_shell:
        words = [sys.executable, "-m", "accelerate.commands.launch", *words[1:]]
        start = partial(_from_shell, words, variables)
    return _completed(start, words, cwd, timeout)


def accelerate_launch(
    config: str, script: str, *arguments: str, cwd: Path, timeout: float = 300, from_shell: bool = False
) -> subprocess.CompletedProcess:
    """`accelerate launch` with one of our configs, see [`run_launcher`]."""
    words = ["accelerate", "--config_file", REPOSITORY / "accelerate_configs" / f"{config}.yaml"]
    words += ["--main_process_port", "0"] if config.startswith("ddp") else []
    return run_launcher(*words, REPOSITORY / script, *arguments, cwd=cwd, timeout=timeout, from_shell=from_shell)


def launch(
    script: str | Path,
    *arguments: str | Path,
    processes: int = 2,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
    grace: float = 10,
    meanwhile: Callable[[Sequence], None] | None = None,
) -> list[tuple[int, str]]:
    """`(exit code, output)` of a Python script on each of `processes` gloo ranks with torchrun's environment variables.

    When one fails, the others have `grace` seconds to end by themselves and are then killed, which gives a negative code. With
    `check` a code that is not zero raises. `meanwhile` is called with the processes that were started.
    """
    port, starts = str(free_port()), []
    for rank in map(str, range(processes)):
        values = (rank, rank, str(processes), str(processes), "127.0.0.1", port)
        variables = dict(zip(TORCHRUN, values, strict=True)) if processes > 1 else {}
        path = str(REPOSITORY / script)  # as it is where it is absolute
        given = rank_environment({**variables, **(environment or {})})
        starts.append(partial(_Rank, path, list(map(str, arguments)), given))
    return _run(starts, timeout, check, grace, meanwhile)
