"""Micro-batches drawn from a run's own data, as its trainer would draw them, and the tokens of their packed rows.

A plan without data assumes that every prompt is as long as the longest one, and computes it once per group. With data
the plan knows how long prompts are and what they have in common (a system prompt, worked examples).
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase
from trl import ModelConfig, apply_chat_template

from ...errors import UserError
from ...prefix_sharing.forest import build_forest
from ..evaluation.accuracy import encode
from ..recipe.arguments import ScriptArguments
from ..recipe.checks import load_tokenizer
from ..recipe.pairs import FIELDS, DPOScriptArguments, read_pairs
from ..recipe.problems import load_data
from ..recipe.script import say

# Number of micro-batches that are drawn; the one with the longest packed row is planned for.
_DRAWN = 64
_SEED = 0


class Drawn(NamedTuple):
    """The drawn micro-batch that computes most.

    Attributes:
        tokens, padded_tokens: tokens of its packed row, and of its padded rows.
        scored: positions whose log-probability is computed.
        levels: tokens of each level of the forest.
    """

    tokens: int
    padded_tokens: int
    scored: int
    levels: list[int]


@dataclass
class Data:
    """Tokenized prompts, and for preference pairs their two answers.

    Attributes:
        source: the data set's name or file, as the user wrote it.
        prompts: token ids of each prompt.
        answers: `(chosen, rejected)` of each prompt; `None` if the trainer draws completions.
    """

    source: str
    prompts: Sequence[Sequence[int]]
    answers: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None
    _drawn: dict[tuple, Drawn] = field(default_factory=dict, repr=False)

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts))

    @property
    def longest_answer(self) -> int:
        return max(len(answer) for pair in self.answers for answer in pair)

    def draw(self, rows: int, group: int, completion: int, max_length: int | None = None) -> Drawn:
        """Draw some micro-batches of `rows` rows, `group` of each prompt, and return the largest.

        Args:
            completion: tokens of each completion, if the trainer draws completions; no two have a token in common.
            max_length: the number of tokens to which pairs are truncated.
        """
        key = rows, group, completion, max_length
        if key not in self._drawn:
            candidates = [self._lay_out(indices, *key) for indices in self._micro_batches(-(-rows // group))]
            self._drawn[key] = max(candidates, key=lambda drawn: drawn.tokens)
        return self._drawn[key]

    def _micro_batches(self, prompts: int) -> list[list[int]]:
        """Indices of the prompts of each micro-batch, in the order of shuffled epochs."""
        generator = random.Random(_SEED)
        batches = []
        remaining = []
        while len(batches) < _DRAWN:
            while len(remaining) < prompts:
                epoch = list(range(len(self.prompts)))
                generator.shuffle(epoch)
                remaining += epoch
            batches.append(remaining[:prompts])
            remaining = remaining[prompts:]
        return batches

    def _lay_out(self, indices: list[int], rows: int, group: int, completion: int, max_length: int | None) -> Drawn:
        sequences = []
        scored = 0
        for i, index in enumerate(indices):
            prompt = np.asarray(self.prompts[index])
            for row in range(i * group, min((i + 1) * group, rows)):
                if self.answers is None:  # token ids that no prompt and no other row has
                    answer = -1 - row * completion - np.arange(completion)
                else:
                    answer = np.asarray(self.answers[index][row % group])
                sequences.append(np.concatenate([prompt, answer])[:max_length])
                scored += max(0, len(sequences[-1]) - len(prompt))
        lengths_B = np.array([len(sequence) for sequence in sequences])
        tokens_BL = np.zeros((rows, lengths_B.max()), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            tokens_BL[row, : len(sequence)] = sequence
        # The last token of a row is only ever a target.
        forest = build_forest(tokens_BL, np.maximum(lengths_B - 1, 1))
        levels = np.bincount(forest.levels, forest.lengths).astype(int).tolist()
        return Drawn(forest.tokens, tokens_BL.size, scored, levels)


def read_data(script: ScriptArguments, model: ModelConfig) -> Data | None:
    """Read the data that a recipe's arguments name, tokenized as by the recipe's trainer.

    If the tokens cannot be counted, the function prints a line and returns `None`.
    """
    is_paired = isinstance(script, DPOScriptArguments)
    source = script.pairs if is_paired else script.dataset
    try:
        tokenizer = load_tokenizer(model.model_name_or_path, model.model_revision, script.chat)
        if not is_paired:
            train = load_data(script)[0]
            if "images" in train.column_names:
                raise UserError("it has images, and their tokens cannot be counted")
            return Data(source, encode(list(train["prompt"]), tokenizer))
        prompts = []
        answers = []
        end = tokenizer.eos_token
        for pair in read_pairs(source):
            if isinstance(pair["prompt"], str):
                texts = {
                    "prompt": pair["prompt"],
                    "chosen": pair["chosen"].removesuffix(end) + end,
                    "rejected": pair["rejected"].removesuffix(end) + end,
                }
            else:
                texts = apply_chat_template({name: pair[name] for name in FIELDS}, tokenizer)
            prompt = tokenizer(texts["prompt"])["input_ids"]
            chosen = tokenizer(texts["prompt"] + texts["chosen"])["input_ids"]
            rejected = tokenizer(texts["prompt"] + texts["rejected"])["input_ids"]
            prompts.append(prompt)
            answers.append((chosen[len(prompt) :], rejected[len(prompt) :]))
        return Data(source, prompts, answers)
    except UserError as error:
        say(f"{source} is not counted: {error}")


def longest_privileged(contexts: Sequence[str], tokenizer: PreTrainedTokenizerBase, template: str) -> int:
    """Tokens of the longest text that the teacher of SDFT reads besides the prompt, with its template's own."""
    texts = [template.format(prompt="", privileged_context=context) for context in contexts]
    return max(map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))
