"""Episodes of several rows between the rollout and TRL's batch.

A row is `{"input_ids": [...], "sampled_mask": [0 or 1 for each id], "logprobs": [one for each sampled id] or None}`.
An episode of one row is what TRL's own completion is: a prompt, and a completion in which a mask marks what was
sampled. If any episode has more rows, an episode's sampled tokens are its completion, and the rows are in the batch
under [`trl_fsdp_qlora.compat.trl_rollouts.ROWS`].
"""

import functools
from collections.abc import Callable
from itertools import chain, compress, groupby, takewhile
from operator import itemgetter
from typing import TypedDict

import torch

from ...compat.trl_rollouts import ROWS, Generated
from ...errors import UserError
from ...prefix_sharing.ranks import reduced_over_ranks
from ..step.rows import Row


class SampledRow(TypedDict):
    """A row as a `rollout_func` returns it."""

    input_ids: list[int]
    sampled_mask: list[int]
    logprobs: list[float] | None  # of the sampled tokens


Rows = list[SampledRow]  # of an episode


def with_rows(rollout_func: Callable) -> Callable:
    """A `rollout_func` that returns what TRL asks for also if the user's returns `rows` alone."""

    @functools.wraps(rollout_func)
    def filled(prompts: list, *args, **kwargs) -> dict[str, list | None]:
        output = rollout_func(prompts, *args, **kwargs)
        if ROWS not in output:
            return output
        episodes = checked_rows(output[ROWS], len(prompts))
        completions = completions_of(episodes)
        masks = completions.pop("masks")
        if any(0 in mask for mask in masks):
            completions["env_mask"] = masks
        return {**output, **completions, ROWS: episodes}

    return filled


def checked_rows(episodes: object, count: int) -> list[Rows]:
    """The rows of `count` episodes as a `rollout_func` returned them; those without a sampled token are left out.

    Raises:
        UserError: the episode, the row and the field that are wrong.
    """
    if not isinstance(episodes, list) or len(episodes) != count:
        entries = len(episodes) if isinstance(episodes, list) else type(episodes).__name__
        raise UserError(f"rollout_func: rows has one list for each of {count} prompts, and not {entries}")
    checked = []
    for number, episode in enumerate(episodes):
        where = f"rollout_func: rows of episode {number}"
        if not isinstance(episode, list):
            raise UserError(f"{where}: a list of rows is needed, and not {type(episode).__name__}")
        rows = []
        for i, row in enumerate(episode):
            checked_row = _checked_row(row, f"{where}, row {i}")
            if 1 in checked_row["sampled_mask"]:
                rows.append(checked_row)
        if not rows:
            raise UserError(f"{where}: sampled_mask has no 1, so there is nothing to train on")
        checked.append(rows)
    have_logprobs = {row["logprobs"] is not None for row in chain.from_iterable(checked)}
    if len(have_logprobs) > 1:
        raise UserError("rollout_func: logprobs of some rows are None: either all rows have them or none has")
    return checked


def _checked_row(row: object, where: str) -> SampledRow:
    if not isinstance(row, dict) or not {"input_ids", "sampled_mask"} <= row.keys():
        raise UserError(f"{where}: a dictionary with input_ids and sampled_mask is needed")
    ids = _plain(row["input_ids"])
    mask = _plain(row["sampled_mask"])
    logprobs = _plain(row.get("logprobs"))
    are_ids = isinstance(ids, list) and all(type(token) is int for token in ids)
    if not are_ids or not ids:
        raise UserError(f"{where}: input_ids is no list of token ids")
    if not isinstance(mask, list) or len(mask) != len(ids):
        entries = len(mask) if isinstance(mask, list) else type(mask).__name__
        raise UserError(f"{where}: sampled_mask has one entry for each of {len(ids)} input_ids, and not {entries}")
    mask = [int(sampled) for sampled in mask]
    if mask[0]:
        raise UserError(f"{where}: sampled_mask has a 1 for the first token, which no token predicts")
    count = sum(mask)
    if logprobs is not None and len(logprobs) != count:
        raise UserError(f"{where}: logprobs has one entry for each of {count} sampled ids, and not {len(logprobs)}")
    return {"input_ids": ids, "sampled_mask": mask, "logprobs": logprobs}


def _plain(value: object) -> object:
    """A tensor or an array as a list; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def completions_of(episodes: list[Rows]) -> dict[str, list | None]:
    """Prompts and completions of episodes as TRL's `_generate` has them, with `masks` of what was sampled.

    If each episode has one row, its completion is the row behind the prompt. Otherwise the completion of an episode is
    what was sampled in its rows.
    """
    have_one_row = all(len(rows) == 1 for rows in episodes)
    columns: dict[str, list | None] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "masks": []}
    for rows in episodes:
        first = rows[0]
        prompt_tokens = first["sampled_mask"].index(1)
        ids, mask, logprobs = _completion_in(first) if have_one_row else _sampled_in(rows)
        columns["prompt_ids"].append(first["input_ids"][:prompt_tokens])
        columns["completion_ids"].append(ids)
        columns["masks"].append(mask)
        columns["logprobs"].append(logprobs)
    if episodes[0][0]["logprobs"] is None:
        columns["logprobs"] = None
    return columns


def _sampled_in(rows: Rows) -> tuple[list[int], list[int], list[float]]:
    """What was sampled in the rows of an episode, a mask of ones, and the log-probabilities, if there are any."""
    ids: list[int] = []
    logprobs: list[float] = []
    for row in rows:
        ids.extend(compress(row["input_ids"], row["sampled_mask"]))
        logprobs.extend(row["logprobs"] or ())
    return ids, [1] * len(ids), logprobs


def _completion_in(row: SampledRow) -> tuple[list[int], list[int], list[float]]:
    """The tokens of a row from the first sampled one to the last, with their masks and log-probabilities."""
    sampled_mask = row["sampled_mask"]
    start = sampled_mask.index(1)
    end = len(sampled_mask) - sampled_mask[::-1].index(1)
    mask = sampled_mask[start:end]
    sampled_logprobs = iter(row["logprobs"] or ())
    # TRL wants one for each token; those of tokens that were not sampled are not read.
    logprobs = [next(sampled_logprobs, 0.0) if sampled else 0.0 for sampled in mask]
    return row["input_ids"][start:end], mask, logprobs


def agreed_rows(generated: Generated, device: torch.device) -> list[list[Row]] | None:
    """The rows of this rank's episodes; `None` if no rank has an episode of several rows. Collective.

    Raises:
        UserError: completions are not what was sampled in the rows.
    """
    episodes = generated.extra_fields.get(ROWS)
    has_several = episodes is not None and any(len(rows) > 1 for rows in episodes)
    if not any(reduced_over_ranks([int(has_several)], device)):
        return None
    if not has_several:
        only_rows = []
        for prompt, completion in zip(generated.prompt_ids, generated.completion_ids, strict=True):
            sampled_mask = [0] * len(prompt) + [1] * len(completion)
            only_rows.append([_row(prompt + completion, sampled_mask)])
        return only_rows
    if completions_of(episodes)["completion_ids"] != generated.completion_ids:
        raise UserError(
            "the completions of a generation batch are not what was sampled in the rows of its episodes: something "
            "changed completion_ids after they were drawn"
        )
    return [[_row(row["input_ids"], row["sampled_mask"]) for row in rows] for rows in episodes]


def _row(input_ids: list[int], sampled_mask: list[int]) -> Row:
    return {
        "input_ids": torch.tensor(input_ids),
        "sampled_mask": torch.tensor(sampled_mask, dtype=torch.bool),
    }


def text_of_rows(rows: list[Row], decode: Callable[[list[int]], str]) -> str:
    """What each row of an episode saw and what was sampled in it, for a person; a common beginning is left out."""
    lines = []
    before: list[int] = []
    for number, row in enumerate(rows, 1):
        ids = row["input_ids"].tolist()
        sampled = row["sampled_mask"].tolist()
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False))
        common = sum(1 for _ in equal)
        head = f"--- row {number}: {len(ids)} tokens"
        if common:
            head = f"{head}, the first {common} as in row {number - 1}"
        lines.append(head)
        behind = zip(ids[common:], sampled[common:], strict=True)
        for is_sampled, pairs in groupby(behind, key=itemgetter(1)):
            text = decode([token for token, _ in pairs])
            lines.append(f"[sampled] {text}" if is_sampled else f"[seen] {text}")
        before = ids
    return "\n".join(lines)
