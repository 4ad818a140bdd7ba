"""Accuracy of a model on problems with a right answer: greedy pass@1 and sampled pass@k, on every rank.

An answer is compared with the right one, or a user's own function decides.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from datasets import Dataset
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from ...compat.transformers import tokenizer_of
from ...engines.decode.completions import over_ranks
from ...utils.stats import format_accuracy, wilson_interval
from ..data import reasoning_gym
from ..data.answers import (
    Gold,
    answers_match,
    completion_text,
    extract_answer,
    last_resort,
    parse_gold,
    required_answer,
)
from .drawing import Answer, Draw, MeasuringTrainer
from .measurement import Measurement

# Options that `generate` would otherwise take from the model's own config (Qwen2.5's has a repetition penalty).
NEUTRAL = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0}


@dataclass
class Evaluation:
    """Result of [`evaluate`].

    `correct` of `n` problems were right. `pass_at_1` and `pass_at_k` are the fractions, `pass_at_k` is `None` if
    nothing was sampled, and `interval` is Wilson's 95% of `pass_at_1`.

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


def format_result(result: Mapping[str, float | None]) -> str:
    """One line for an [`Evaluation`] as a dict, as records have it."""
    n = result["n"]
    correct = result["correct"]
    strict = result["strict"]
    lenient = result["lenient"]
    text = f"greedy pass@1 {format_accuracy(correct, n)}"
    # If no answer is in a marked place, the problems ask for none, and the first figure is enough.
    if strict is not None and (strict or lenient != correct):
        text += f", strict {100 * strict / n:.1f}%, lenient {100 * lenient / n:.1f}%"
    if result["samples"]:
        text += f", pass@{result['samples']} {100 * result['pass_at_k']:.1f}%"
    return text


class Verdict(NamedTuple):
    """A model's answer: its text, the tokens that it wrote, and what a function or an environment decided."""

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


def score_problem(greedy: Verdict, samples: Sequence[Verdict], gold: Gold | None, answer_format: str) -> Scored:
    """Compare a problem's completions with its answer, or take the verdicts.

    Args:
        greedy, samples: the greedy completion and the sampled ones, which may be none.
        gold: the right answer, or a function that accepts answers, see [`answers_match`].
    """

    def is_right(completion: Verdict, answer: str | None) -> bool:
        if completion.is_right is not None:
            return completion.is_right
        return answers_match(answer, gold=gold)

    answer = extract_answer(greedy.text, answer_format, gold)
    passed = False
    for sample in samples:
        its_answer = extract_answer(sample.text, answer_format, gold)
        passed = passed or is_right(sample, its_answer)
    return Scored(
        correct=is_right(greedy, answer),
        strict=is_right(greedy, required_answer(greedy.text, answer_format)),
        lenient=is_right(greedy, last_resort(greedy.text, gold)),
        tokens=greedy.tokens,
        passed_at_k=float(passed),
    )


class _Problems:
    """The rows of a data set, with their right answers if these decide."""

    def __init__(self, dataset: Dataset, measurement: Measurement):
        self.dataset = dataset
        self.has_images = "images" in dataset.column_names
        without_images = dataset.remove_columns("images") if self.has_images else dataset
        self.rows = without_images.to_list()
        self.golds: list[Gold | None] = [None] * len(self.rows)
        if measurement.compares_answers:
            self.golds = [_right_answer(row, index) for index, row in enumerate(self.rows)]

    def batch(self, indices: Sequence[int], repeats: int) -> list[dict]:
        """The rows of a batch, each `repeats` times, with their pictures, which are read again each time."""
        rows = []
        for index in indices:
            row = self.rows[index]
            if self.has_images:
                images = self.dataset[index]["images"]
                row = {**row, "images": images}
            rows += [row] * repeats
        return rows


def _right_answer(row: dict, index: int) -> Gold:
    if row.get("entry"):
        return reasoning_gym.accepts(row["entry"])
    return parse_gold(row["answer"], index)


def _verdicts(rows: Sequence[dict], answers: Sequence[Answer], measurement: Measurement) -> list[Verdict]:
    """The answers to `rows`, with the verdict of the judge or of the environment if there is one."""
    decisions: list[bool | None] = [None] * len(rows)
    completions = [answer.completion for answer in answers]
    if measurement.judge is not None:
        decisions = measurement.judge.verdicts(rows, completions)
    elif measurement.agent is not None:
        decisions = [measurement.agent.is_right(answer.environment) for answer in answers]
    verdicts = []
    for answer, decision in zip(answers, decisions, strict=True):
        text = completion_text(answer.completion)
        verdicts.append(Verdict(text, answer.tokens, decision))
    return verdicts


class _Measuring:
    """A measurement of a model: what [`over_ranks`] calls for each batch of problems.

    Args:
        model, processing, measurement, synced_gpus: see [`evaluate`].
    """

    def __init__(
        self,
        model: nn.Module,
        processing: PreTrainedTokenizerBase | ProcessorMixin,
        problems: _Problems,
        measurement: Measurement,
        synced_gpus: bool,
    ):
        self.problems = problems
        self.measurement = measurement
        self._trainer = MeasuringTrainer(processing, measurement)
        greedy, sampled = generation_configs(model, tokenizer_of(processing), measurement)
        self._greedy = Draw(model, greedy, synced_gpus=synced_gpus)
        self._sampled = Draw(model, sampled, synced_gpus=synced_gpus)

    def draw(self, batch: range) -> tuple[list[Verdict], list[Verdict]]:
        """The greedy completion of each problem of a batch, and its samples, those of a problem next to each other."""
        greedy = self._drawn(batch, 1, self._greedy)
        samples = self.measurement.samples
        if not samples:
            return greedy, []
        seed = (self.measurement.seed << 20) + batch.start
        return greedy, self._drawn(batch, samples, self._sampled._replace(seed=seed))

    def _drawn(self, batch: range, repeats: int, settings: Draw) -> list[Verdict]:
        rows = self.problems.batch(batch, repeats)
        answers = self._trainer.draw(rows, settings)
        return _verdicts(rows, answers, self.measurement)

    def score(self, batch: range, completions: tuple[list[Verdict], list[Verdict]]) -> list[Scored]:
        """The counts of each problem of a batch, from what [`draw`] returned for it."""
        greedy, sampled = completions
        samples = self.measurement.samples
        scored = []
        for place, index in enumerate(batch):
            first = place * samples
            of_problem = sampled[first : first + samples]
            gold = self.problems.golds[index]
            scored.append(score_problem(greedy[place], of_problem, gold, self.measurement.answer_format))
        return scored


def _summed(results: Sequence[Scored], measurement: Measurement, seconds: float) -> Evaluation:
    """The evaluation of all problems, from the counts of each."""
    n = len(results)
    sums = Scored(*map(sum, zip(*results, strict=True)))
    evaluation = Evaluation(
        n=n,
        correct=sums.correct,
        pass_at_1=sums.correct / n,
        interval=wilson_interval(sums.correct, n),
        samples=measurement.samples,
        pass_at_k=sums.passed_at_k / n if measurement.samples else None,
        seconds=seconds,
        tokens_per_completion=sums.tokens / n,
        first_right=next((row for row, scored in enumerate(results) if scored.correct), None),
    )
    if measurement.compares_answers:
        evaluation.strict = sums.strict
        evaluation.lenient = sums.lenient
    return evaluation


def evaluate(
    model: nn.Module,
    processing: PreTrainedTokenizerBase | ProcessorMixin,
    dataset: Dataset,
    measurement: Measurement | None = None,
    *,
    synced_gpus: bool = False,
    description: str | None = None,
) -> Evaluation:
    """Measure `model` on every problem of `dataset` exactly once, with any number of ranks.

    Batches are fixed by the dataset and dealt to the ranks in turn. The samples of a batch depend on the seed and the
    batch alone, so the result does not depend on the number of ranks. It works without an initialised process group.

    Args:
        model: an unwrapped causal language model (not a DDP wrapper); its training mode is restored.
        processing: a tokenizer with a pad token, or a processor if `dataset` has a column `images`.
        dataset: `prompt` and `answer`, and `entry` if a generator verifies, see
            [`trl_fsdp_qlora.tools.data.datasets.to_prompts`]. If a judge or an environment decides, no answer is
            needed.
        measurement: lengths, samples, and what decides; by default greedy decoding, at most 256 tokens.
        synced_gpus: a forward is collective (weights sharded over the ranks), so every rank generates as often as the
            slowest.
        description: of the bar on the main rank; no bar if `None`.

    Returns:
        [`Evaluation`], the same on every rank.

    Raises:
        trl_fsdp_qlora.tools.data.answers.UnparsableGoldAnswer: a gold answer has no value; raised before generation.
    """
    started = time.perf_counter()
    measurement = measurement or Measurement()
    problems = _Problems(dataset, measurement)
    measuring = _Measuring(model, processing, problems, measurement, synced_gpus)
    problems_per_batch = max(1, measurement.batch_size // max(measurement.samples, 1))
    results = over_ranks(
        len(problems.rows),
        problems_per_batch,
        measuring.draw,
        measuring.score,
        synced_gpus=synced_gpus,
        description=description,
    )
    return _summed(results, measurement, time.perf_counter() - started)


def generation_configs(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, measurement: Measurement
) -> tuple[GenerationConfig, GenerationConfig]:
    """The generation configs for greedy and for sampled completions."""
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    of_model = model.generation_config.eos_token_id  # a token, several or none
    ends = {end, *(of_model if isinstance(of_model, list) else [of_model])} - {None}
    common = {
        "max_new_tokens": measurement.max_new_tokens,
        "pad_token_id": end if pad is None else pad,
        "eos_token_id": sorted(ends),
        **NEUTRAL,
    }
    greedy = GenerationConfig(do_sample=False, **common)
    sampling = {"temperature": measurement.temperature, "top_p": measurement.top_p, "top_k": 0}
    return greedy, GenerationConfig(do_sample=True, **sampling, **common)
