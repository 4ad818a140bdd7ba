"""Preference pairs of a recipe, in any of TRL's formats."""

from dataclasses import MISSING, dataclass
from pathlib import Path

from datasets import Dataset
from trl.data_utils import maybe_extract_prompt

from ...errors import mistyped_path
from ..data.answers import DatasetError
from ..data.datasets import read_rows
from ..data.import_path import is_missing_path
from .arguments import ScriptArguments, option

FIELDS = ("prompt", "chosen", "rejected")


@dataclass(kw_only=True)
class DPOScriptArguments(ScriptArguments):
    """[`ScriptArguments`], and the source of the preference pairs."""

    dataset: str | None = option(None, "Problems to measure accuracy on: those of `held_out` or `eval_split`.")
    pairs: str = option(
        MISSING, "Preference pairs in any of TRL's formats: a file, folder, Hub id or function, as for `dataset`."
    )
    max_completion_length: int = option(256, "Length limit of the model's answers, for accuracy and `evaluate`.")


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
    if is_missing_path(str(source)):
        hint = mistyped_path(source) or "; the head of a recipe has the command that makes its pairs"
        raise DatasetError(f"pairs={str(source)!r}: there is no such file or folder{hint}")
    rows = read_rows(str(source), split)
    dataset = rows if isinstance(rows, Dataset) else Dataset.from_list(list(rows))
    if not len(dataset) or not {"chosen", "rejected"} <= set(dataset.column_names):
        raise DatasetError(
            f"{source} holds no pairs: each row is `chosen` and `rejected`, two texts or two conversations, and may "
            "have a `prompt`, which is one of them, too"
        )
    answers = dataset.select_columns(["chosen", "rejected"])
    for number, row in enumerate(answers, 1):
        for name, answer in row.items():
            if not answer:
                raise DatasetError(f"{source}, row {number}: {name} is empty; complete the row or leave it out")
    return dataset.map(_with_prompt, keep_in_memory=True)


def _with_prompt(row: dict) -> dict:
    """A pair of TRL's explicit format, from a row in any format."""
    pair = {name: row[name] for name in FIELDS if row.get(name) is not None}
    is_mixed = isinstance(pair.get("prompt"), list) and isinstance(pair["chosen"], str)
    if not is_mixed:
        return maybe_extract_prompt(pair)
    for name in ("chosen", "rejected"):
        message = {"role": "assistant", "content": row[name]}
        pair[name] = [message]
    return pair
