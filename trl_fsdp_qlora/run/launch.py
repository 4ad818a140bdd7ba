"""`accelerate launch` whose own traceback does not follow what a script has said, and whose exit status is the script's."""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import NoReturn

import psutil

from .accelerate_configs import accelerate_config

USER_ERROR = 2  # exit status of a script that has said in one line what its user did wrong
_ENDING = 60.0  # seconds that processes have to end after Ctrl-C


def launch(words: Sequence[str], goes_on: str | None = None) -> int:
    """Run what `accelerate launch` with these words runs.

    SIGTERM is passed on to the processes of the run, and on Linux they end with this one, however it ends.

    Args:
        words: as for `accelerate launch`; `--config_file` also takes the name of one of this package's configs.
        goes_on: the command that goes on with the run, said where SIGTERM ends it.

    Returns:
        The exit status: the script's; with several ranks, of the one that failed first. 128 + the signal where a signal
        ended it.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # It reports each rank that ended, with a number in the place of the reason.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("accelerate.commands.launch").addFilter(_tells_more_than_threads)
    parser = launch_command_parser()
    parser.error = _refuse  # its own has two hundred lines of usage
    if not words:
        parser.error("no script; trl-fsdp-qlora launch --config_file ddp my_script.py")
    terminated = False

    def terminate(*_signal) -> None:
        nonlocal terminated
        terminated = True
        children = psutil.Process().children()
        for child in children:
            child.terminate()
        if not children:
            raise SystemExit(_terminated(goes_on))

    before = signal.signal(signal.SIGTERM, terminate)  # torchrun sets its own
    os.environ["TRL_FSDP_QLORA_LAUNCHER"] = str(os.getpid())
    try:
        launch_command(parser.parse_args(_with_paths(words)))
    except CalledProcessError as ended:
        stopped = terminated and ended.returncode == -signal.SIGTERM
        return _terminated(goes_on) if stopped else _status({0: ended.returncode})
    except ChildFailedError as ended:
        return _status({rank: failure.exitcode for rank, failure in ended.failures.items()})
    except SignalException as stopped:
        return _terminated(goes_on) if stopped.sigval == signal.SIGTERM else 128 + stopped.sigval
    except KeyboardInterrupt:
        psutil.wait_procs(psutil.Process().children(), timeout=_ENDING)  # they say themselves where they stopped
        return 128 + signal.SIGINT
    except (ValueError, OSError, ImportError) as error:
        print(f"error: accelerate launch: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    finally:
        signal.signal(signal.SIGTERM, before)
        del os.environ["TRL_FSDP_QLORA_LAUNCHER"]
    return 0


def _terminated(goes_on: str | None) -> int:
    print("stopped by SIGTERM" + (f"; go on with: {goes_on}" if goes_on else ""), file=sys.stderr, flush=True)
    return 128 + signal.SIGTERM


def _tells_more_than_threads(record: logging.LogRecord) -> bool:
    """Whether accelerate says more than that it chose the number of threads, in three lines, before every run on a CPU."""
    chosen = record.getMessage()
    return chosen.count("\t`--") != 1 or "`--num_cpu_threads_per_process`" not in chosen


def _refuse(reason: str) -> NoReturn:
    print(f"error: accelerate launch: {' '.join(reason.split())}", file=sys.stderr)
    raise SystemExit(USER_ERROR)


def _with_paths(words: Sequence[str]) -> list[str]:
    """`words` with the path of a config of this package where `--config_file` names one.

    Raises:
        ValueError: it is neither a file nor such a name; has the nearest.
    """
    words = list(words)
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        if before == "--config_file" and not Path(word).exists():
            words[place] = str(accelerate_config(word))
        if word.endswith(".py"):  # what follows is the script's
            break
    return words


def _status(exit_codes: dict[int, int]) -> int:
    """Of a whole run, from those of its failed ranks; a launcher ends the others by a signal, so that counts last."""
    codes = exit_codes.values()
    if USER_ERROR in codes:
        return USER_ERROR
    own = [code for code in codes if code > 0]
    if own:
        return own[0]
    rank, code = next(
        (item for item in exit_codes.items() if item[1] != -signal.SIGTERM), next(iter(exit_codes.items()))
    )
    print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return 128 - code
