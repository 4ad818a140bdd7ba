"""`accelerate launch` that passes signals on to the run and has its exit status; and how a run was launched."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError
from types import MethodType
from typing import Any, NoReturn

import psutil

from ...errors import UserError
from ...utils.plain import counted
from ...utils.resources import accelerate_config
from .one_line import USER_ERROR, OneLineParser, check_num_processes

_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "trl-fsdp-qlora")
_MODULES = ("accelerate.commands.launch", "torch.distributed.run", "trl_fsdp_qlora")  # names for `python -m`


def launch(words: Sequence[str]) -> int:
    """Run `accelerate launch` with these words; SIGINT and SIGTERM are passed on to the run's processes.

    Args:
        words: as for `accelerate launch`; `--config_file` also takes the name of one of this package's configs.

    Returns:
        The script's exit status; with several ranks, that of the first rank that failed; 128 + the signal if a signal
            ended it.

    Raises:
        UserError: the config needs a package that is not installed.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # These loggers report each rank that ended without the reason, then the signal, and the number of threads in three
    # lines.
    for name in ("agent.server.api", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    parser = launch_command_parser()
    parser.prog = "trl-fsdp-qlora launch"
    parser.error = MethodType(OneLineParser.error, parser)  # argparse's own prints 200 lines
    options = parser.parse_args(list(words))
    check_num_processes(options.num_processes)
    _warn_of_many(options.num_processes or 1, options.num_machines or 1)
    if options.config_file and not Path(options.config_file).exists():
        options.config_file = str(accelerate_config(options.config_file))
    options.signals_to_handle = "SIGHUP,SIGQUIT"  # torchrun's own handlers kill a rank after 30 seconds
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _pass_on)
    try:
        launch_command(options)
    except ImportError as error:  # accelerate's own: the config needs a package, as DeepSpeed
        raise UserError(str(error)) from error
    except CalledProcessError as ended:
        return exit_status({0: ended.returncode})
    except ChildFailedError as ended:
        return exit_status({rank: failure.exitcode for rank, failure in ended.failures.items()})
    except SignalException as stopped:
        return 128 + stopped.sigval
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _warn_of_many(processes: int, machines: int) -> None:
    """Print a line if a machine has fewer cards, or without cards fewer cores, than it gets processes."""
    import torch

    cards = torch.cuda.device_count()
    places = cards or os.cpu_count() or 1
    if -(-processes // machines) > places:
        unit = "card" if cards else "core"
        line = f"warning: --num_processes {processes}: this machine has {counted(places, unit)}"
        print(line, file=sys.stderr, flush=True)


def _pass_on(number: int, _frame: Any) -> NoReturn:
    """Hand a signal to the run's processes, wait until they have ended, however long their step is, and end."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    ranks = psutil.Process().children()
    for rank in ranks:
        with contextlib.suppress(psutil.Error):
            rank.send_signal(number)
    psutil.wait_procs(ranks)
    raise SignalException(f"stopped by {signal.Signals(number).name}", signal.Signals(number))


def exit_status(exit_codes: dict[int, int]) -> int:
    """The exit status of a run, from the exit codes of the ranks that failed.

    The launcher ends the other ranks by SIGTERM, so that signal counts only if there is nothing else.
    """
    failed = [code for code in exit_codes.values() if code > 0]
    if failed:
        return USER_ERROR if USER_ERROR in failed else failed[0]
    rank, code = min(exit_codes.items(), key=lambda item: item[1] == -signal.SIGTERM)
    print(f"error: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
    return 128 - code


def launch_words() -> list[str]:
    """The words of the command that started this run, with the launcher's own (`--config_file`) among them.

    A launcher does not pass its command line to its processes, so this reads those of the parent processes.
    """
    with contextlib.suppress(psutil.Error):  # another user's process, or a process that has just ended
        for process in psutil.Process().parents():
            words = _launcher_in(process.cmdline())
            if words:
                return words
    return ["python", *sys.argv]


def _launcher_in(words: list[str]) -> list[str]:
    """The command line `words` as a user types it if it is a launcher's; else nothing."""
    for index, word in enumerate(words[:3]):  # the interpreter and `-m` may come first
        if Path(word).name in _LAUNCHERS:
            return [Path(word).name, *words[index + 1 :]]
        if word in _MODULES:
            return ["python", "-m", *words[index:]]
    return []
