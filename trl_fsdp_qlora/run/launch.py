"""`accelerate launch` without its own traceback behind a script's, with the script's exit status; and how a run was launched."""

import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError
from typing import NoReturn

import psutil

from ..errors import UserError
from .one_line import USER_ERROR, take
from .shipped import accelerate_config

_ENDING = 60.0  # seconds that processes have to end after Ctrl-C
# What a launcher is called in a process's words -> how it is typed.
_LAUNCHERS = {name: [name] for name in ("accelerate", "torchrun", "deepspeed", "trl-fsdp-qlora")}
_LAUNCHERS |= {"accelerate.commands.launch": ["accelerate", "launch"], "torch.distributed.run": ["torchrun"]}
_LAUNCHERS |= {"trl_fsdp_qlora": ["trl-fsdp-qlora"]}


def launch(words: Sequence[str]) -> int:
    """Run what `accelerate launch` with these words runs. On Linux its processes end with this one, however it ends.

    Args:
        words: as for `accelerate launch`; `--config_file` also takes the name of one of this package's configs.

    Returns:
        The exit status: the script's; with several ranks, of the one that failed first. 128 + the signal where one ended it.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # They report each rank that ended, with a number in the place of the reason, and the number of threads in three lines.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    parser, words = launch_command_parser(), list(words)
    parser.error = _refuse  # its own has two hundred lines of usage
    if not words:
        _refuse("no script; trl-fsdp-qlora launch --config_file ddp my_script.py")
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    for place, word in enumerate(words[1:script], 1):
        if words[place - 1] == "--config_file" and not Path(word).exists():
            words[place] = str(accelerate_config(word))
    given = parser.parse_args(words)
    os.environ["TRL_FSDP_QLORA_LAUNCHER"] = str(os.getpid())
    try:
        launch_command(given)
    except CalledProcessError as ended:
        return _status({0: ended.returncode})
    except ChildFailedError as ended:
        return _status({rank: failure.exitcode for rank, failure in ended.failures.items()})
    except SignalException as stopped:
        return 128 + stopped.sigval
    except KeyboardInterrupt:
        psutil.wait_procs(psutil.Process().children(), timeout=_ENDING)  # they say themselves where they stopped
        return 128 + signal.SIGINT
    except (ValueError, OSError, ImportError) as error:
        _refuse(str(error))
    finally:
        del os.environ["TRL_FSDP_QLORA_LAUNCHER"]
    return 0


def _refuse(reason: str) -> NoReturn:
    raise UserError(f"accelerate launch: {reason}")


def _status(exit_codes: dict[int, int]) -> int:
    """Of a whole run, from those of its failed ranks; a launcher ends the others by SIGTERM, so that counts last."""
    codes = exit_codes.values()
    if own := [code for code in codes if code > 0]:
        return USER_ERROR if USER_ERROR in own else own[0]
    rank, code = min(exit_codes.items(), key=lambda item: item[1] == -signal.SIGTERM)
    print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return 128 - code


def launch_words() -> list[str]:
    """The words of the command that started this run, the launcher's own (`--config_file`) among them.

    A launcher tells its processes nothing of how it was called, so the processes above this one are asked.
    """
    with contextlib.suppress(psutil.Error):  # another user's process, or one that has just ended
        for process in psutil.Process().parents():
            words = process.cmdline()
            for place, word in enumerate(words[:3]):  # the interpreter and `-m` may stand before it
                if typed := _LAUNCHERS.get(Path(word).name):
                    return [*typed, *words[place + 1 :]]
    return ["python", *sys.argv]


def resume_line(words: list[str]) -> str:
    """`words` as a line for a shell that goes on with the run from its last whole checkpoint."""
    flag = "--resume_from_checkpoint"
    return shlex.join([*take(words, (flag,))[1], flag, "auto"])
