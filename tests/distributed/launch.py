"""Start N gloo processes the way torchrun does, and end them all when one fails or hangs."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class LaunchFailed(AssertionError):
    """A rank failed or the run took too long; the message holds every rank's output."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), environment.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    environment["TOKENIZERS_PARALLELISM"] = "false"
    return {**environment, **(extra or {})}


def _end_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def run_group(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], timeout: float, check: bool = True
) -> list[tuple[int, str]]:
    """Run commands side by side, each in a process group of its own, with a common deadline.

    When one fails, the others get ten seconds to end by themselves and are then killed.

    Args:
        commands: `(arguments, environment)` of each rank.
        timeout: seconds for all of them.
        check: raise where a rank's exit code is not zero.

    Returns:
        `(exit code, output)` of each rank; a rank that was killed here has a negative code.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank{rank}.txt" for rank in range(len(commands))]
        processes = []
        for (arguments, environment), log in zip(commands, logs, strict=True):
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        arguments,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                        env=environment,
                        cwd=REPOSITORY,
                        start_new_session=True,
                    )
                )
        deadline, timed_out = time.monotonic() + timeout, False
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() not in (None, 0) for process in processes):
                    deadline = min(deadline, time.monotonic() + 10)
                if time.monotonic() > deadline:
                    timed_out = True
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                _end_group(process)
        results = [
            (process.returncode, log.read_text(errors="replace")) for process, log in zip(processes, logs, strict=True)
        ]
    if check and (timed_out or any(code != 0 for code, _ in results)):
        report = "\n".join(
            f"--- rank {rank}, exit code {code} ---\n{text}" for rank, (code, text) in enumerate(results)
        )
        raise LaunchFailed(f"{'ended by the launcher' if timed_out else 'a rank failed'}\n{report}")
    return results


def launch(
    script: str | Path,
    *arguments: str,
    processes: int = 2,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> list[tuple[int, str]]:
    """Run a Python script on `processes` gloo ranks with torchrun's environment variables. See [`run_group`]."""
    port = free_port()
    commands = []
    for rank in range(processes):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        if processes == 1:
            variables = {}
        commands.append(
            ([sys.executable, str(script), *arguments], rank_environment({**variables, **(environment or {})}))
        )
    return run_group(commands, timeout, check)
