"""`accelerate launch` that passes signals on to the run and has its exit status; and how a run was launched."""

import contextlib
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CalledProcessError
from types import MethodType
from typing import NoReturn

import psutil

from ...errors import UserError
from ...utils.resources import accelerate_config
from .one_line import USER_ERROR, OneLineParser, check_num_processes

_COMMAND = "TRL_FSDP_QLORA_COMMAND"  # the launcher's command line, for the processes that it starts


def launch(words: Sequence[str]) -> int:
    """Run `accelerate launch` with these words; SIGINT and SIGTERM are passed on to the run's processes.

    Args:
        words: as for `accelerate launch`; `--config_file` also takes the name of one of this package's configs.

    Returns:
        The script's exit status; with several ranks, that of one that failed, and 2 if any had an error that the user
            can fix; 128 + the signal if a signal ended it.

    Raises:
        UserError: an option is unknown or has no such value, there is no such config, or the config needs a package
            that is not installed.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from accelerate.utils import patch_environment
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
    if options.config_file and not Path(options.config_file).exists():
        options.config_file = str(accelerate_config(options.config_file))
    options.signals_to_handle = "SIGHUP,SIGQUIT"  # torchrun's own handlers kill a rank after 30 seconds
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _pass_on)
    try:
        with patch_environment(**{_COMMAND: shlex.join(["trl-fsdp-qlora", *sys.argv[1:]])}):
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


def _pass_on(number: int, _frame: object) -> NoReturn:
    """Pass a signal on to the run's processes, wait until they have ended, however long their step is, and end."""
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
    """The words of the command that started this run: this package's, or the script's own if another launcher ran."""
    return shlex.split(os.environ[_COMMAND]) if _COMMAND in os.environ else ["python", *sys.argv]
