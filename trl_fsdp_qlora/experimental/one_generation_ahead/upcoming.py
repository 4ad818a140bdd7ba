"""`UpcomingRows`: the rows of a generation batch before the trainer asks the data loader for them."""

from collections import deque
from collections.abc import Callable, Iterator


class UpcomingRows:
    """The micro-batches of a data loader in their order; those to come can be looked at, and are kept until then.

    So the rows that a batch was drawn for are the rows that are trained on, for any source of the loader.

    Args:
        micro_batches: iterator of the data loader, over one epoch.
        digest: of a micro-batch.

    Attributes:
        digests: of the micro-batches given since the optimizer step began, as they were read; `None` once
            they are no longer compared.
    """

    def __init__(self, micro_batches: Iterator, digest: Callable[[list[dict]], str]):
        self.micro_batches = micro_batches
        self._digest = digest
        self.digests: list[str] | None = []
        self._given: list = []  # since the optimizer step began
        self._kept: deque = deque()

    def begin_step(self) -> None:
        """Count the places of [`peek`] from the micro-batch that is given next."""
        self._given.clear()
        if self.digests is not None:
            self.digests.clear()

    def __iter__(self) -> "UpcomingRows":
        return self

    def __next__(self) -> list[dict]:
        micro_batch = self._kept.popleft() if self._kept else next(self.micro_batches)
        self._given.append(micro_batch)
        if self.digests is not None:
            self.digests.append(self._digest(micro_batch))
        return micro_batch

    def peek(self, place: int) -> list[dict] | None:
        """The micro-batch at `place`, from 0 in this optimizer step; `None` if the epoch ends before."""
        while place >= len(self._given) + len(self._kept):
            try:
                self._kept.append(next(self.micro_batches))
            except StopIteration:
                return None
        return self._given[place] if place < len(self._given) else self._kept[place - len(self._given)]
