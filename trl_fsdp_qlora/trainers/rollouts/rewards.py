"""Rewards without a value: which function gave none, and whether the whole run had none.

TRL takes `None` for a completion that a function cannot judge. Nothing can be learned from `None`, NaN and infinity
alone, by any loss.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from accelerate.logging import get_logger
from torch import nn

from ...errors import UserError
from ...utils.plain import counted

logger = get_logger(__name__)


class RewardValues:
    """Which reward functions have given any completion of this run a finite value, over all ranks."""

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self.completions = 0  # that were rewarded while a function had not given a value
        self._without_value = set(range(len(names)))
        self._warned_of: set[int] = set()

    def see(self, rewards_NK: torch.Tensor) -> None:
        """Look at the rewards of a generation batch; a line names each function that has given no value so far.

        If the dataset has several tasks, a function's own task may come later, so it is no error.
        """
        if not self._without_value:
            return  # the host waits for rewards only until every function has given a value
        completions = len(rewards_NK)
        self.completions += completions
        has_value_K = rewards_NK.isfinite().any(0).tolist()
        self._without_value -= {i for i, has_value in enumerate(has_value_K) if has_value}
        for i in sorted(self._without_value - self._warned_of):
            self._warned_of.add(i)
            judged = counted(completions, "completion")
            logger.warning(
                f"the reward function {self.names[i]} gave none of {judged} a finite value (None, NaN or infinite for "
                "all): nothing can be learned from it. Look at the columns that it reads"
            )

    def line_if_none(self) -> str | None:
        """A line if no function gave any completion a value; `None` otherwise, and if nothing was drawn."""
        if not self.completions or len(self._without_value) < len(self.names):
            return None
        return (
            f"nothing was learned: {', '.join(self.names)} gave none of {counted(self.completions, 'completion')} a "
            "finite value (None, NaN or infinite for all); look at the function and at the columns that it reads"
        )


def checked(function: Callable, name: str) -> Callable:
    """A reward function that raises an error with its `name` if what it returns cannot be rewards.

    A reward model is returned as it is.
    """
    if isinstance(function, nn.Module):
        return function

    async def awaited(**columns):
        return _checked_values(await function(**columns), name)

    def called(**columns):
        return _checked_values(function(**columns), name)

    return awaited if _is_async(function) else called


def _checked_values(values: object, name: str) -> list:
    """What a reward function returned, for TRL; TRL's own errors for a text and for one number name no function.

    Raises:
        UserError: one value for the whole batch, or texts.
    """
    wanted = "it has to return a list with one number, or None, for each completion"
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f"the reward function {name} returned {_shown(values)}: {wanted}")
    values = list(values)
    text = next((value for value in values if isinstance(value, str)), None)
    if text is not None:
        raise UserError(f"the reward function {name} returned the text {_shown(text)} as a reward: {wanted}")
    return values


def _shown(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def _is_async(function: Callable) -> bool:
    """Whether a call returns a coroutine, as TRL decides it: of functions, partials and objects with `__call__`."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)
