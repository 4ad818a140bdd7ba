"""The entries of a card that a trainer cannot know by itself; `card.py`, which writes it, is imported then."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class CardInfo:
    """Facts that a trainer cannot know by itself and a recipe fills in."""

    dataset: str | None = None  # Hub id or file name of the training data
    license: str | None = None  # SPDX id
    results: dict[str, str] = field(default_factory=dict)  # such as "97.0% (n=1000, ...)", by what was measured
    # Greedy, for the Hub's metadata: `pass_at_1`, `n` and `interval`.
    accuracy: dict[str, float | Sequence[float]] | None = None
    accuracy_step: int | None = None  # optimizer step that `accuracy` is of; a card of other weights does not claim it
    data_license: str | None = None  # SPDX id of the training data
    recipe_file: str | None = None  # the YAML that was run
    settings: Sequence = ()  # dataclasses of the other arguments: data, rewards, model, adapter
    command: Sequence[str] | None = None  # the launch line's words; the card leaves secrets and machine paths out
    quickstart_prompt: str | list[dict] | None = None  # a prompt (text, or messages) for the quick start
    max_new_tokens: int = 64  # of the quick start
    method: str = "GRPO"  # the algorithm, as a reader knows it
