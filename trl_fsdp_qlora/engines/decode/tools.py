"""A limit on a tool's time. Everything else about tools is TRL's."""

import asyncio
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from accelerate.logging import get_logger

logger = get_logger(__name__)

_READ = "the model reads that as an error of the tool. tool_timeout=None sets no limit"


def limited(tool: Callable, seconds: float | None) -> Callable:
    """`tool` with a time limit: a call raises `TimeoutError` after `seconds`, and TRL handles it as any tool error.

    A signal stops a function, in the main thread only. A function that waits in a library without returning to Python
    is not stopped.
    """
    if not seconds:
        return tool
    line = f"{tool.__name__} took longer than tool_timeout={seconds:g} seconds"
    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def limited_coroutine(*args, **kwargs):
            try:
                async with asyncio.timeout(seconds) as limit:
                    return await tool(*args, **kwargs)
            except TimeoutError:
                if not limit.expired():
                    raise  # the tool's own
                logger.warning_once(f"tools: {line}; {_READ}")
                raise TimeoutError(line) from None

        return limited_coroutine

    @functools.wraps(tool)
    def limited_function(*args, **kwargs):
        with _alarm(seconds, line):
            return tool(*args, **kwargs)

    return limited_function


def limited_tools(trainer: Any, attributes: tuple[str, ...], seconds: float | None) -> AbstractContextManager:
    """A context in which the tools of TRL's `trainer` have a time limit, see [`limited`].

    `attributes` are lists of `{name: tool}`; without them, tools take as long as they take.
    """
    replaced = {
        attribute: [
            {name: limited(tool, seconds) for name, tool in tools.items()} for tools in getattr(trainer, attribute)
        ]
        for attribute in attributes
        if hasattr(trainer, attribute)
    }
    return patch.multiple(trainer, **replaced) if replaced else nullcontext()


@contextmanager
def _alarm(seconds: float, line: str) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_):
        logger.warning_once(f"tools: {line}; {_READ}")
        raise TimeoutError(line)

    before = signal.signal(signal.SIGALRM, ring)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds)  # a process has one such timer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
