"""A limit on a tool's time. Everything else about tools is TRL's."""

import asyncio
import functools
import inspect
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger

if TYPE_CHECKING:
    from trl import GRPOTrainer

logger = get_logger(__name__)

_READ = "the model reads that as an error of the tool. tool_timeout=None sets no limit"


def limited(tool: Callable, seconds: float | None) -> Callable:
    """`tool` with a time limit: a call raises `TimeoutError` after `seconds`, and TRL handles it as any tool error.

    In the main thread a signal stops a function, unless it waits in a library without returning to Python. In another
    thread the function runs in a thread of its own, for which the caller does not wait after the limit.
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
        if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
            return _in_thread(functools.partial(tool, *args, **kwargs), seconds, line)
        with _alarm(seconds, line):
            return tool(*args, **kwargs)

    return limited_function


def limited_tools(trainer: "GRPOTrainer", seconds: float | None) -> dict[str, list[dict[str, Callable]]]:
    """The tools of TRL's `trainer` with a time limit, see [`limited`], by the attributes that hold them.

    In a TRL without these attributes, tools take as long as they take.
    """
    limited_by_attribute = {}
    for attribute in ("_sync_tool_dicts", "_async_tool_dicts"):
        if not hasattr(trainer, attribute):
            continue
        limited_by_attribute[attribute] = []
        for tools in getattr(trainer, attribute):
            with_limits = {name: limited(tool, seconds) for name, tool in tools.items()}
            limited_by_attribute[attribute].append(with_limits)
    return limited_by_attribute


def _in_thread(call: Callable, seconds: float, line: str) -> Any:
    outcome: Future = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="tool", daemon=True).start()
    if not wait([outcome], seconds).done:
        logger.warning_once(f"tools: {line}; {_READ}")
        raise TimeoutError(line)
    return outcome.result()


@contextmanager
def _alarm(seconds: float, line: str) -> Iterator[None]:
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
