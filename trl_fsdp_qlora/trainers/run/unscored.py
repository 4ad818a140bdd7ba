"""Reward functions that return no finite value for any completion.

Nothing can be learned from `None`, NaN and infinity alone, by any loss.
"""

from collections.abc import Sequence

from accelerate.logging import get_logger

logger = get_logger(__name__)


class ScoredCompletions:
    """Counts the completions that each reward function in `names` gave a finite value, over all ranks."""

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self.drawn = 0
        self.scored = [0] * len(names)
        self._warned_of: set[str] = set()

    def add(self, counts: Sequence[float]) -> None:
        """Add the counts of a generation batch: its completions, and how many of them each function scored.

        It warns, once for each function, of a function that has scored no completion so far, and of all functions if
        none scored this batch. If the dataset has several tasks, the function's own task may come later.
        """
        drawn, *scored = map(int, counts)
        self.drawn += drawn
        self.scored = [before + now for before, now in zip(self.scored, scored, strict=True)]
        for name, count in zip(self.names, self.scored, strict=True):
            if (not count or not any(scored)) and name not in self._warned_of:
                self._warned_of.add(name)
                logger.warning(
                    f"the reward function {name} gave none of {drawn:,} completions of a batch a finite value (None, "
                    "NaN or infinite for all): nothing can be learned from it"
                )

    @property
    def nothing_scored(self) -> bool:
        """Whether no function gave any completion of this run a finite value."""
        return self.drawn > 0 and not any(self.scored)
