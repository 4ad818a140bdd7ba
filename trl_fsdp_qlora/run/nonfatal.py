"""What a run does beside the maths (cards, pictures, metrics, lines on a terminal) may fail, and training goes on."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

_warned: set[str] = set()


@contextmanager
def nonfatal(what: str) -> Iterator[None]:
    """Turn an exception into a warning, one per `what` and process. Also a decorator; the function then returns `None`.

    Never around a collective: the rank that goes on would leave the others waiting.

    Args:
        what: could not be done, for the warning: `"the model card"`.
    """
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads on, and a command ends as `| head` expects
    except Exception as error:
        if what not in _warned:
            _warned.add(what)
            reason = " ".join(str(error).split())
            logger.warning("%s failed (%s: %s); the run goes on", what, type(error).__name__, reason, exc_info=True)
