"""Accuracy of a model on problems with a right answer: greedy pass@1 and sampled pass@k, on every rank.

An answer is compared with the right one, or a user's own function decides.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from accelerate import PartialState
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin
from trl.data_utils import is_conversational

from ...compat import trl as trls
from ...compat.transformers import tokenizer_of
from ...engines.decode.completions import generate, over_ranks
from ...engines.decode.turns import KeptTurns
from ...fsdp2_qlora.generation import FREE_SHARE, free_bytes
from ...utils.nonfatal import nonfatal
from ...utils.plain import name_of
from ...utils.stats import format_accuracy, wilson_interval
from ..data import reasoning_gym
from ..data.answers import (
    answers_match,
    completion_text,
    extract_answer,
    last_resort,
    parse_gold,
    required_answer,
)
from .episodes import Agent, run_episodes

# Options that `generate` would otherwise take from the model's own config (Qwen2.5's has a repetition penalty).
NEUTRAL = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0}


@dataclass
class Evaluation:
    """Result of [`evaluate`].

    Accuracies are fractions of `n` problems, `None` if nothing was sampled; `interval` is Wilson's 95%.

    Two more counts of right greedy completions separate format from arithmetic. `strict` accepts an answer only in the
    places that [`required_answer`] reads, `lenient` what [`last_resort`] finds anywhere. They are `None` if a function
    or an environment decides.

    `first_right` is the row of the first problem whose greedy completion is right, `None` if none is: an example.
    """

    n: int
    correct: int
    pass_at_1: float
    interval: tuple[float, float]
    samples: int
    pass_at_k: float | None
    seconds: float
    tokens_per_completion: float
    strict: int | None = None
    lenient: int | None = None
    first_right: int | None = None

    def as_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        return format_result(self.as_dict())


def format_result(result: dict[str, Any]) -> str:
    """One line for an [`Evaluation`] as a dict, as records have it."""
    n, correct, strict, lenient = (result[name] for name in ("n", "correct", "strict", "lenient"))
    text = f"greedy pass@1 {format_accuracy(correct, n)}"
    # If no answer is in a marked place, the problems ask for none, and the first figure is enough.
    if strict is not None and (strict or lenient != correct):
        text += f", strict {100 * strict / n:.1f}%, lenient {100 * lenient / n:.1f}%"
    if result["samples"]:
        text += f", pass@{result['samples']} {100 * result['pass_at_k']:.1f}%"
    return text


@dataclass
class Judge:
    """A user's own function that decides what is right.

    It gets what a reward gets in TRL: `prompts`, `completions` and the dataset's columns, each as a list. An answer is
    right if its value is at least 1. If the function fails, a warning has the reason, and its completions are wrong.
    """

    function: Callable[..., Sequence[float | None]]

    def verdicts(self, rows: Sequence[dict], completions: Sequence[Any]) -> list[bool]:
        name = name_of(self.function)
        with nonfatal(f"accuracy_function {name}"):
            columns = {column: [row[column] for row in rows] for column in rows[0] if column != "prompt"}
            values = self.function(prompts=[row["prompt"] for row in rows], completions=completions, **columns)
            values = list(asyncio.run(values) if inspect.iscoroutine(values) else values)
            if len(values) != len(rows):
                raise ValueError(f"{len(values)} values for {len(rows)} completions; it must return one each")
            return [value is not None and bool(value >= 1) for value in values]
        return [False] * len(rows)


class Completed(NamedTuple):
    """A model's answer: its text, the tokens that it wrote, and the verdict of a function or an environment."""

    text: str
    tokens: int
    is_right: bool | None = None


class Scored(NamedTuple):
    """Counts of one problem, which [`evaluate`] sums.

    `passed_at_k` is of the sampled completions, all others of the greedy one.
    """

    correct: bool
    strict: bool
    lenient: bool
    tokens: int
    passed_at_k: float


def score_problem(greedy: Completed, drawn: list[Completed], gold: Any, answer_format: str) -> Scored:
    """Compare a problem's completions with its answer, or take the verdicts.

    Args:
        greedy, drawn: the greedy completion and the sampled ones, which may be none.
        gold: the right answer, or a function that accepts answers, see [`answers_match`].
    """

    def is_right(completion: Completed, answer: str | None) -> bool:
        return answers_match(answer, gold=gold) if completion.is_right is None else completion.is_right

    answer = extract_answer(greedy.text, answer_format, gold)
    return Scored(
        correct=is_right(greedy, answer),
        strict=is_right(greedy, required_answer(greedy.text, answer_format)),
        lenient=is_right(greedy, last_resort(greedy.text, gold)),
        tokens=greedy.tokens,
        passed_at_k=float(any(is_right(each, extract_answer(each.text, answer_format, gold)) for each in drawn)),
    )


def encode_images(rows: list[dict], processor: ProcessorMixin) -> tuple[list[list[int]], dict[str, Any]]:
    """Token ids of prompts with pictures, and the model's other inputs for them."""
    prompts = [trls.prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in rows]
    encoded = processor.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
    vision = {name: encoded[name] for name in encoded if name not in ("input_ids", "attention_mask")}
    return encoded["input_ids"], {**vision, "num_images": [len(row["images"]) for row in rows]}


def as_completions(prompt: Any, texts: Sequence[str]) -> list[Any]:
    """Completions as reward functions get them: messages if the prompt is a conversation, else the texts."""
    if not is_conversational({"prompt": prompt}):
        return list(texts)
    return [[{"role": "assistant", "content": text}] for text in texts]


def encode(prompts: list, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Token ids of prompts, which are all texts or all conversations."""
    if not is_conversational({"prompt": prompts[0]}):
        return tokenizer(prompts)["input_ids"]
    encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
    return encoded["input_ids"]


def evaluate(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    dataset,
    *,
    max_new_tokens: int = 256,
    batch_size: int = 32,
    samples: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    answer_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    description: str = "evaluate",
    synced_gpus: bool = False,
    agent: Agent | None = None,
    max_tool_turns: int | None = None,
    judge: Judge | None = None,
) -> Evaluation:
    """Measure `model` on every problem of `dataset` exactly once, with any number of ranks.

    Batches are fixed by the dataset and dealt to the ranks in turn. The samples of a batch depend on `seed` and the
    batch alone, so the result does not depend on the number of ranks. It works without an initialised process group.

    Args:
        model: an unwrapped causal language model (not a DDP wrapper); its training mode is restored.
        tokenizer: a tokenizer with a pad token, or a processor if `dataset` has a column `images`.
        dataset: `prompt` and `answer`, and `entry` if a generator verifies, see
            [`trl_fsdp_qlora.tools.data.datasets.to_prompts`]. With a `judge`, or an environment that owns its reward,
            no answer is needed.
        max_new_tokens: length limit of a completion, in tokens.
        batch_size: completions per batch, per rank; sampled completions of a problem are batched together.
        samples: k of pass@k; 0 measures greedy decoding only.
        temperature, top_p, seed: for the samples. Penalties of the model's own generation config are left out.
        answer_format: see [`trl_fsdp_qlora.tools.data.answers.extract_answer`].
        progress, description: show a bar on the main rank.
        synced_gpus: a forward is collective (weights sharded over the ranks), so every rank generates as often as the
            slowest.
        agent: the tools and the environment of an episode, whose last answer is compared with the right one. If an
            environment owns its reward, the reward decides instead. `max_new_tokens` is then the length of an episode
            after its prompt, results of tools included, and a completion's tokens are those that the model wrote.
        max_tool_turns: largest number of an episode's tool turns; any number if `None`.
        judge: decides in place of the answer, and of the environment.

    Returns:
        [`Evaluation`], the same on every rank.

    Raises:
        trl_fsdp_qlora.tools.data.answers.UnparsableGoldAnswer: a gold answer has no value; raised before generation.
    """
    started = time.perf_counter()
    with_images = "images" in dataset.column_names
    rows = (dataset.remove_columns("images") if with_images else dataset).to_list()
    is_decided = judge is not None or (agent is not None and agent.owns_reward)
    golds: list[Any] = [None] * len(rows)
    if not is_decided:
        golds = [
            reasoning_gym.accepts(row["entry"]) if row.get("entry") else parse_gold(row["answer"], index)
            for index, row in enumerate(rows)
        ]
    greedy, sampled = generation_configs(model, tokenizer_of(tokenizer), max_new_tokens, temperature, top_p)

    def complete_episodes(batch_rows: list[dict], config: GenerationConfig, seed: int | None) -> list[Completed]:
        limit = FREE_SHARE * free_bytes(PartialState().device)
        turns = KeptTurns(limit, math.inf if max_tool_turns is None else max_tool_turns)

        def next_turn(ids: list[list[int]], turn: int) -> list[list[int]]:
            turns.number = turn
            turn_seed = None if seed is None else seed + (turn << 40)
            return generate(model, ids, config, turn_seed, synced_gpus=synced_gpus, turns=turns)

        episodes = run_episodes(
            agent,
            batch_rows,
            tokenizer,
            next_turn,
            max_length=max_new_tokens,
            max_tool_turns=max_tool_turns,
            synced_gpus=synced_gpus,
        )
        if judge is None:
            verdicts = [agent.is_right(episode.environment) for episode in episodes]
        else:
            verdicts = judge.verdicts(batch_rows, [episode.messages for episode in episodes])
        return [
            Completed(completion_text(episode.messages), episode.drawn, verdict)
            for episode, verdict in zip(episodes, verdicts, strict=True)
        ]

    def complete(batch: range, config: GenerationConfig, repeats: int, seed: int | None = None) -> list[Completed]:
        repeated = [i for i in batch for _ in range(repeats)]
        if agent is not None:
            return complete_episodes([rows[i] for i in repeated], config, seed)
        if with_images:
            with_pictures = {i: dataset[i] for i in batch}  # each access reads the pictures again
            ids, vision = encode_images([with_pictures[i] for i in repeated], tokenizer)
        else:
            ids = encode([rows[i]["prompt"] for i in repeated], tokenizer)
            vision = {}
        completions = generate(model, ids, config, seed, synced_gpus=synced_gpus, vision=vision)
        texts = [tokenizer.decode(each, skip_special_tokens=True) for each in completions]
        verdicts: list[bool | None] = [None] * len(texts)
        if judge is not None:
            verdicts = judge.verdicts([rows[i] for i in repeated], as_completions(rows[0]["prompt"], texts))
        return [
            Completed(text, len(each), verdict)
            for text, each, verdict in zip(texts, completions, verdicts, strict=True)
        ]

    def draw(batch: range) -> tuple[list[Completed], list[Completed]]:
        best = complete(batch, greedy, 1)
        drawn = complete(batch, sampled, samples, (seed << 20) + batch.start) if samples else []
        return best, drawn

    def score(batch: range, completions: tuple[list[Completed], list[Completed]]) -> list[Scored]:
        best, drawn = completions
        scored = []
        for j, i in enumerate(batch):
            of_problem = drawn[j * samples : (j + 1) * samples]
            scored.append(score_problem(best[j], of_problem, golds[i], answer_format))
        return scored

    n = len(rows)
    size = max(1, batch_size // max(samples, 1))
    results = over_ranks(n, size, draw, score, synced_gpus=synced_gpus, description=description if progress else None)
    sums = Scored(*map(sum, zip(*results, strict=True)))
    return Evaluation(
        n=n,
        correct=sums.correct,
        pass_at_1=sums.correct / n,
        interval=wilson_interval(sums.correct, n),
        samples=samples,
        pass_at_k=sums.passed_at_k / n if samples else None,
        seconds=time.perf_counter() - started,
        tokens_per_completion=sums.tokens / n,
        strict=None if is_decided else sums.strict,
        lenient=None if is_decided else sums.lenient,
        first_right=next((row for row, scored in enumerate(results) if scored.correct), None),
    )


def generation_configs(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, max_new_tokens: int, temperature: float, top_p: float
) -> tuple[GenerationConfig, GenerationConfig]:
    """The generation configs for greedy and for sampled completions."""
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    of_model = model.generation_config.eos_token_id  # a token, several or none
    ends = {end, *(of_model if isinstance(of_model, list) else [of_model])} - {None}
    common = {
        "max_new_tokens": max_new_tokens,
        "pad_token_id": end if pad is None else pad,
        "eos_token_id": sorted(ends),
        **NEUTRAL,
    }
    greedy = GenerationConfig(do_sample=False, **common)
    sampled = GenerationConfig(do_sample=True, temperature=temperature, top_p=top_p, top_k=0, **common)
    return greedy, sampled
