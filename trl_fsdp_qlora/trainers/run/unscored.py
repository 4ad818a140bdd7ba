"""Reward functions that return no value for any completion.

Nothing can be learned from `None` and NaN alone, whatever the loss is.
"""

from collections.abc import Sequence

from accelerate.logging import get_logger

logger = get_logger(__name__)


class ScoredCompletions:
    """Counts the completions that each reward function in `names` gave a value, over all ranks."""

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self.drawn = 0
        self.scored = [0] * len(names)
        self._named: set[str] = set()

    def add(self, counts: Sequence[float]) -> None:
        """Add the counts of a generation batch: its completions, and how many of them each function scored.

        It logs once for each function that has scored no completion so far. If the dataset has several tasks, the
        function's own task may come later.
        """
        drawn, *scored = map(int, counts)
        self.drawn += drawn
        self.scored = [before + now for before, now in zip(self.scored, scored, strict=True)]
        for name, count in zip(self.names, self.scored, strict=True):
            if not count and name not in self._named:
                self._named.add(name)
                logger.warning(
                    f"the reward function {name} gave none of {self.drawn:,} completions a value (None or NaN for "
                    "all): nothing can be learned from it"
                )

    @property
    def nothing_scored(self) -> bool:
        """Whether no function gave any completion of this run a value."""
        return self.drawn > 0 and not any(self.scored)
