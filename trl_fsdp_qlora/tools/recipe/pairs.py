"""Preference pairs from problems with exact answers: the model's own right and wrong answers to one problem."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import TrainingArguments
from trl.data_utils import maybe_extract_prompt

from ...engines.decode.completions import generate, over_ranks
from ...errors import mistyped_path
from ...utils.files import written_whole
from ..data.answers import DatasetError, answers_match, extract_answer, parse_gold
from ..data.datasets import read_rows
from ..evaluation.accuracy import encode, generation_configs
from ..run.one_line import pop_options
from .arguments import ConfigError, ScriptArguments, option

FIELDS = ("prompt", "chosen", "rejected")


@dataclass
class DPOScriptArguments(ScriptArguments):
    """[`ScriptArguments`], and the source of the preference pairs."""

    dataset: str | None = option(
        None, "Problems to make pairs of if the file `pairs` does not exist, and to evaluate on."
    )
    pairs: str = option(
        "pairs.jsonl",
        "Preference pairs in any of TRL's formats: a file, folder, Hub id or function, as for `dataset`. A .jsonl "
        "file that does not exist is written first, from `dataset`.",
    )
    pair_problems: int | None = option(None, "Make pairs of this many training problems; of all by default.")
    pair_samples: int = option(8, "Answers that the model gives to each of them, at temperature 1.")
    max_completion_length: int = option(256, "Length limit of the model's answers, here and for `evaluate`.")


def sample_pairs(
    model: nn.Module,
    tokenizer: Any,
    prompts: Dataset,
    taught: Sequence[str | None],
    script: DPOScriptArguments,
    config: TrainingArguments,
) -> list[dict[str, Any]]:
    """Sample pairs of `prompt`, `chosen` and `rejected`, in TRL's form. The ranks share the work; all get all pairs.

    Args:
        model: an unwrapped causal language model, whole on every rank.
        prompts: `prompt`, `answer` and `row`, see [`trl_fsdp_qlora.tools.data.datasets.to_prompts`].
        taught: a right worked answer to each problem, which is chosen if none of the samples is right; or `None`.
    """
    rows = prompts.to_list()
    samples = script.pair_samples
    seed = config.seed
    _, sampling = generation_configs(model, tokenizer, script.max_completion_length, temperature=1.0, top_p=1.0)

    def draw(batch: range) -> list[list[int]]:
        ids = encode([rows[i]["prompt"] for i in batch for _ in range(samples)], tokenizer)
        return generate(model, ids, sampling, (seed << 20) + batch.start, synced_gpus=False)

    def pair(batch: range, completions: list[list[int]]) -> list[dict | None]:
        texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in completions]
        of_problem = [texts[first : first + samples] for first in range(0, len(texts), samples)]
        return [
            pair_of_problem(rows[i], taught[i], drawn, script.answer_format, f"{seed} {i}")
            for i, drawn in zip(batch, of_problem, strict=True)
        ]

    size = max(1, script.accuracy_batch_size // samples)
    description = None if config.disable_tqdm else "preference pairs"
    pairs = over_ranks(len(rows), size, draw, pair, description=description)
    return [each for each in pairs if each is not None]


def pair_of_problem(row: dict, work: str | None, texts: list[str], answer_format: str, seed: str) -> dict | None:
    """A pair of one problem, from the `texts` of its samples; `work` is its worked answer, if there is one.

    It is `None` if there is no right answer, or no wrong one.
    """
    gold = parse_gold(row["answer"], row["row"])
    texts = [text for text in dict.fromkeys(texts) if text]
    right = [text for text in texts if answers_match(extract_answer(text, answer_format, gold), gold)]
    wrong = [text for text in texts if text not in right]
    if not right and work is not None:
        right = [work]
    if not right or not wrong:
        return None
    choose = random.Random(seed).choice
    chat = not isinstance(row["prompt"], str)

    def answer(text: str) -> Any:
        return [{"role": "assistant", "content": text}] if chat else f" {text}"

    return {"prompt": row["prompt"], "chosen": answer(choose(right)), "rejected": answer(choose(wrong))}


def write_pairs(path: str | Path, pairs: list[dict]) -> None:
    """Write one pair per line; the file appears when it is whole."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with written_whole(Path(path)) as scratch:
        scratch.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs), encoding="utf-8")


def must_be_made(source: str, words: Sequence[str] = ()) -> bool:
    """Whether `pairs` names a file of JSON lines that does not exist yet, which is then made.

    Raises:
        ConfigError: the command line `words` names it, so its user has such a file.
    """
    if not source.endswith(".jsonl") or Path(source).is_file():
        return False
    if "--pairs" in pop_options(words, ("--pairs",))[0]:
        hint = mistyped_path(source) or "; a recipe's own file, its key `pairs`, is made of its `dataset`"
        raise ConfigError(f"--pairs {source}: there is no such file{hint}")
    return True


def read_pairs(source: str | Path, split: str = "train") -> Dataset:
    """Read preference pairs in any of TRL's formats: texts or conversations, with a prompt or without one.

    Each pair then has a `prompt`, and the other columns of its source. Without a prompt it is what both answers begin
    with. A text as a prompt of two conversations that begin with it (as in `ultrafeedback_binarized`) is left out.

    Args:
        source: a file, a folder or a name on the Hub, or a function by import path, as the field `dataset` of a
            recipe.
        split: of a folder or the Hub.

    Raises:
        DatasetError: it cannot be read, or holds no pairs.
    """
    rows = read_rows(str(source), split)
    dataset = rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows))
    if not len(dataset) or not {"chosen", "rejected"} <= set(dataset.column_names):
        raise DatasetError(
            f"{source} holds no pairs: each row is `chosen` and `rejected`, two texts or two conversations, and may "
            "have a `prompt`, which is one of them, too"
        )
    return dataset.map(_with_prompt, keep_in_memory=True)


def _with_prompt(row: dict) -> dict:
    """A pair of TRL's explicit format, from a row in any format."""
    pair = {name: row[name] for name in FIELDS if row.get(name) is not None}
    if isinstance(pair.get("prompt"), list) and isinstance(pair["chosen"], str):
        answers = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
        return pair | answers
    return maybe_extract_prompt(pair)
