"""Figures that stay on the device until they are logged, so that no micro-batch waits for one."""

from collections.abc import Callable
from itertools import islice

import torch

# Read at the latest after so many, for runs that log never or seldom.
MOST = 1000


class DeferredSums:
    """Numbers on a device, and what to do with each set of them once the host has read them all, in one transfer."""

    def __init__(self):
        self._held: list[tuple[torch.Tensor, Callable[[list[float]], None]]] = []

    def add(self, sums_N: torch.Tensor, finish: Callable[[list[float]], None]) -> None:
        """Call `finish` with the numbers of `sums_N` in the next [`settle`].

        Args:
            sums_N: one dimension; whatever ranks have to sum is summed already.
            finish: puts them where they belong.
        """
        self._held.append((sums_N.detach(), finish))
        if len(self._held) >= MOST:
            self.settle()

    def settle(self) -> None:
        """Read everything that was added, in the order in which it was."""
        if not self._held:
            return
        held, self._held = self._held, []
        numbers = iter(torch.cat([sums_N.float() for sums_N, _ in held]).tolist())
        for sums_N, finish in held:
            finish(list(islice(numbers, len(sums_N))))
