"""Work that one rank does for all of them."""

from collections.abc import Callable
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

Result = TypeVar("Result")


def on_main(do: Callable[[], Result], here: bool | None = None) -> Result:
    """Run `do` on the main rank, and return its result or raise its exception on all ranks. Every rank calls it.

    By default only the main rank runs it; with `here` each rank for which it is true. The main rank's result counts.
    """
    state = PartialState()
    outcome: list = [None, None]  # the result, and the exception
    if state.is_main_process if here is None else here:
        try:
            outcome[0] = do()
        except Exception as error:  # raised below on every rank, because no rank may be left waiting for this one
            outcome[1] = error
    if state.num_processes > 1:
        broadcast_object_list(outcome, from_process=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
