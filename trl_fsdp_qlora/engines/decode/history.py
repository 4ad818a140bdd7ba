"""Episodes whose history the chat template renders before every turn, as a server of the model does.

TRL's loop appends: a turn is generated from everything that was sampled and read before. A server gets messages. It
renders them by the tokenizer's own chat template at each turn, and many templates leave out of the history what the
model thought in earlier turns. With `history: template` each turn of TRL's loop is generated from the rendered
messages. If their tokens continue the row of the turn before, the row continues; what was sampled keeps the token ids
that the engine returned. If they part from it, a row begins.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...compat import trl as trls
from ...errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import GRPOTrainer

NOT_AS_SERVED = "the chat template strips earlier thinking: what is trained is not what is served; history: template"


class RenderedHistory:
    """What the model saw before each turn of each episode of a tool loop.

    Args:
        trainer: a `GRPOTrainer` whose `_tokenize_prompts` renders as a server does.
        prompts: the messages of each episode, which TRL's loop appends to.
        prompt_ids: the tokens of the first turns' prompts.

    Attributes:
        seen: for each episode the tokens of each turn's prompt.
    """

    def __init__(self, trainer: "GRPOTrainer", prompts: list[list[dict]], prompt_ids: list[list[int]]):
        self.trainer = trainer
        self.prompts = prompts
        self.seen = [[list(ids)] for ids in prompt_ids]
        self._messages = [len(messages) for messages in prompts]  # of each episode when its last turn began

    def turn_of(self, generate_turn: Callable[..., tuple]) -> Callable[..., tuple]:
        """`generate_turn`, a `_generate_single_turn`, that generates from the rendered messages."""

        def generate(_appended, images, fields, **options):
            if images is not None:
                raise UserError("history: template renders no images yet; history: append does")
            return generate_turn(self.next_prompts(), images, fields, **options)

        return generate

    def next_prompts(self) -> list[list[int]]:
        """The rendered prompts of the episodes that have a next turn: those to which TRL appended messages."""
        episodes = [i for i, messages in enumerate(self.prompts) if len(messages) > self._messages[i]]
        # TRL renders each episode with the tools of its environment, so it gets all episodes.
        rendered, images, _ = self.trainer._tokenize_prompts(self.prompts)
        if images is not None:
            raise UserError("history: template renders no images yet; history: append does")
        for episode in episodes:
            self.seen[episode].append(list(rendered[episode]))
            self._messages[episode] = len(self.prompts[episode])
        return [list(rendered[episode]) for episode in episodes]

    def rows(
        self, completion_ids: list[list[int]], tool_mask: list[list[int]], logprobs: list[list[float]] | None
    ) -> list[list[dict]]:
        """The rows of each episode.

        Args:
            completion_ids, tool_mask, logprobs: as TRL's loop returns them; the mask is 0 at what tools returned.
        """
        episodes = []
        for number, seen in enumerate(self.seen):
            values = completion_ids[number] if logprobs is None else logprobs[number]
            sampled = _sampled_turns(completion_ids[number], values, tool_mask[number])
            rows: list[dict] = []
            # The last turn may have no token: the budget was spent before it.
            for prompt, turn in zip(seen, sampled, strict=False):
                ids = [token for token, _ in turn]
                if not rows or prompt[: len(rows[-1]["input_ids"])] != rows[-1]["input_ids"]:
                    rows.append({"input_ids": [], "sampled_mask": [], "logprobs": None if logprobs is None else []})
                row = rows[-1]
                history = prompt[len(row["input_ids"]) :]
                row["input_ids"] += history + ids
                row["sampled_mask"] += [0] * len(history) + [1] * len(ids)
                if logprobs is not None:
                    row["logprobs"] += [value for _, value in turn]
            episodes.append(rows)
        return episodes


def _sampled_turns(ids: list[int], values: list, mask: list[int]) -> list[list[tuple[int, float]]]:
    """The sampled tokens of a completion with their values, turn by turn: what tools returned is between turns."""
    turns: list[list[tuple[int, float]]] = []
    was_sampled = False
    for token, value, is_sampled in zip(ids, values, mask, strict=True):
        if is_sampled:
            if not was_sampled:
                turns.append([])
            turns[-1].append((token, value))
        was_sampled = bool(is_sampled)
    return turns


_THOUGHT = "what the model thought before it called"


def strips_thinking(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the chat template leaves what the model thought before a call out of the history of later turns.

    Args:
        tokenizer: one that reads calls, see [`trl_fsdp_qlora.compat.trl_rollouts.with_response_schema`].
    """
    written = tokenizer(f"<think>\n{_THOUGHT}\n</think>\n\n", add_special_tokens=False)["input_ids"]
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Look."},
        {**trls.parse_response(tokenizer, written, prefix=[]), "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "nothing"},
    ]
    return _THOUGHT not in tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
