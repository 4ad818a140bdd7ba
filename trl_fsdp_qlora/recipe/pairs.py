"""Preference pairs from problems with exact answers: the model's own right and wrong answers to one problem."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn

from ..checkpoints.disk import written_whole
from ..data.answers import DatasetError, answers_match, extract_answer, parse_gold
from ..decode.completions import generate, over_ranks
from ..evaluation.accuracy import encode, generation_configs
from .arguments import ScriptArguments, option

FIELDS = ("prompt", "chosen", "rejected")


@dataclass
class DPOScriptArguments(ScriptArguments):
    """[`ScriptArguments`], and the source of the preference pairs."""

    pairs: str = option("pairs.jsonl", "File of preference pairs, one a line; written first if it does not exist.")
    pair_problems: int | None = option(None, "Make pairs of this many training problems; of all by default.")
    pair_samples: int = option(8, "Answers that the model gives to each of them, at temperature 1.")
    pairs_per_problem: int = option(2, "Pairs of one problem, at most.")
    pair_worked: bool = option(
        True,
        "Prefer the dataset's worked answer (SVAMP's equation, GSM8K's rationale) if no answer of the model is right.",
    )
    max_completion_length: int = option(256, "Length limit of the model's answers, here and for `evaluate`.")


def sample_pairs(
    model: nn.Module,
    tokenizer: Any,
    prompts: Dataset,
    taught: Sequence[str | None],
    *,
    samples: int,
    pairs_per_problem: int,
    max_new_tokens: int,
    answer_format: str,
    batch_size: int,
    seed: int = 0,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Sample pairs of `prompt`, `chosen` and `rejected`, in TRL's form. The ranks share the work; all get all pairs.

    Args:
        model: an unwrapped causal language model, whole on every rank.
        prompts: `prompt`, `answer` and `row`, see [`trl_fsdp_qlora.data.datasets.to_prompts`].
        taught: a right worked answer to each problem, which is chosen if none of the samples is right; or `None`.
        samples: completions drawn for each problem, at temperature 1.
        pairs_per_problem: largest number of pairs of one problem. An answer is in one pair only.
        max_new_tokens, answer_format, batch_size, seed, progress: as in
            [`trl_fsdp_qlora.evaluation.accuracy.evaluate`].
    """
    rows = prompts.to_list()
    _, config = generation_configs(model, tokenizer, max_new_tokens, temperature=1.0, top_p=1.0)

    def draw(batch: range) -> list[list[int]]:
        ids = encode([rows[i]["prompt"] for i in batch for _ in range(samples)], tokenizer)
        return generate(model, ids, config, (seed << 20) + batch.start, synced_gpus=False)

    def pair(batch: range, completions: list[list[int]]) -> list[list[dict]]:
        texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]
        results = []
        for j, i in enumerate(batch):
            of_problem = texts[j * samples : (j + 1) * samples]
            results.append(
                pairs_of_problem(rows[i], taught[i], of_problem, pairs_per_problem, answer_format, f"{seed} {i}")
            )
        return results

    size = max(1, batch_size // samples)
    pairs_of_ranks = over_ranks(len(rows), size, draw, pair, description="preference pairs" if progress else None)
    return [each for pairs in pairs_of_ranks for each in pairs]


def pairs_of_problem(
    row: dict, work: str | None, texts: list[str], max_pairs: int, answer_format: str, seed: str
) -> list[dict]:
    """Pairs of one problem, from the `texts` of its samples; `work` is its worked answer, if there is one."""
    gold = parse_gold(row["answer"], row["row"])
    texts = [text for text in dict.fromkeys(texts) if text]
    right = [text for text in texts if answers_match(extract_answer(text, answer_format, gold), gold)]
    wrong = [text for text in texts if text not in right]
    if not right and work is not None:
        right = [work]
    draw = random.Random(seed)
    draw.shuffle(right)
    draw.shuffle(wrong)
    chat = not isinstance(row["prompt"], str)

    def answer(text: str) -> Any:
        return [{"role": "assistant", "content": text}] if chat else f" {text}"

    chosen_and_rejected = list(zip(right, wrong, strict=False))[:max_pairs]
    return [{"prompt": row["prompt"], "chosen": answer(a), "rejected": answer(b)} for a, b in chosen_and_rejected]


def write_pairs(path: str | Path, pairs: list[dict]) -> None:
    """Write one pair per line; the file appears when it is whole."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with written_whole(Path(path)) as scratch:
        scratch.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8")


def read_pairs(path: str | Path) -> Dataset:
    """Read the pairs in a file of JSON lines.

    Raises:
        DatasetError: the file cannot be read, a line is no pair, or there is no pair.
    """
    pairs = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"pairs={path!s} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            pairs.append({name: row[name] for name in FIELDS})
        except (ValueError, KeyError, TypeError):
            raise DatasetError(f"{path}, line {number}: no JSON object with {', '.join(FIELDS)}") from None
    if not pairs:
        raise DatasetError(f"{path} holds no pairs")
    return Dataset.from_list(pairs)
