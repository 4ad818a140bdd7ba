"""The work of a run apart from the maths (cards, pictures, metrics, terminal lines) may fail; training continues."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_warned: set[str] = set()


@contextmanager
def nonfatal(task: str) -> Iterator[None]:
    """Turn an exception into a warning of one line, one per `task` and process.

    With `TRL_FSDP_QLORA_TRACEBACK=1` its traceback follows. It is also a decorator; the function then returns `None`.
    Never use it around a collective: the rank that continues would leave the others waiting.

    Args:
        task: names the failed work in the warning: `"the model card"`.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # the output's reader is gone, and a command ends as `| head` expects
    except Exception as error:
        if task not in _warned:
            _warned.add(task)
            reason = " ".join(str(error).split())
            traceback = os.environ.get("TRL_FSDP_QLORA_TRACEBACK") == "1"
            logger.warning(
                "%s failed (%s: %s); the run continues", task, type(error).__name__, reason, exc_info=traceback
            )
