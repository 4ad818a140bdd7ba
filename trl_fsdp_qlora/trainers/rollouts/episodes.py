"""Episodes of several rows between the rollout and TRL's batch.

A row is `{"input_ids": [...], "sampled_mask": [0 or 1 for each id], "logprobs": [one for each sampled id] or None}`.
An episode of one row is what TRL's own completion is: a prompt, and a completion in which a mask marks what was
sampled. If any episode has more rows, an episode's sampled tokens are its completion, and the rows are in the batch
under [`trl_fsdp_qlora.compat.trl_rollouts.ROWS`].
"""

import functools
from collections.abc import Callable
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch

from ...compat.trl_rollouts import ROWS, Generated
from ...errors import UserError
from ...prefix_sharing.ranks import reduced_over_ranks
from ..step.rows import Row

Rows = list[dict[str, Any]]  # of an episode


def with_rows(rollout_func: Callable) -> Callable:
    """A `rollout_func` that returns what TRL asks for also if the user's returns `rows` alone."""

    @functools.wraps(rollout_func)
    def filled(prompts: list, *args, **kwargs) -> dict[str, Any]:
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


def checked_rows(episodes: Any, count: int) -> list[Rows]:
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
        rows = [_checked_row(row, f"{where}, row {i}") for i, row in enumerate(episode)]
        rows = [row for row in rows if 1 in row["sampled_mask"]]
        if not rows:
            raise UserError(f"{where}: sampled_mask has no 1, so there is nothing to train on")
        checked.append(rows)
    with_logprobs = {row["logprobs"] is not None for row in chain.from_iterable(checked)}
    if len(with_logprobs) > 1:
        raise UserError("rollout_func: logprobs of some rows are None: either all rows have them or none has")
    return checked


def _checked_row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict) or not {"input_ids", "sampled_mask"} <= row.keys():
        raise UserError(f"{where}: a dictionary with input_ids and sampled_mask is needed")
    ids, mask, logprobs = (_plain(row.get(name)) for name in ("input_ids", "sampled_mask", "logprobs"))
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise UserError(f"{where}: input_ids is no list of token ids")
    if not isinstance(mask, list) or len(mask) != len(ids):
        entries = len(mask) if isinstance(mask, list) else type(mask).__name__
        raise UserError(f"{where}: sampled_mask has one entry for each of {len(ids)} input_ids, and not {entries}")
    mask = [int(sampled) for sampled in mask]
    if mask[0]:
        raise UserError(f"{where}: sampled_mask has a 1 for the first token, which no token predicts")
    if logprobs is not None and len(logprobs) != sum(mask):
        raise UserError(
            f"{where}: logprobs has one entry for each of {sum(mask)} sampled ids, and not {len(logprobs)}"
        )
    return {"input_ids": ids, "sampled_mask": mask, "logprobs": logprobs}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def completions_of(episodes: list[Rows]) -> dict[str, Any]:
    """Prompts and completions of episodes as TRL's `_generate` has them, with `masks` of what was sampled.

    If each episode has one row, its completion is the row behind the prompt. Otherwise the completion of an episode is
    what was sampled in its rows.
    """
    have_one_row = all(len(rows) == 1 for rows in episodes)
    columns: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "masks": []}
    for rows in episodes:
        prompt = rows[0]["sampled_mask"].index(1)
        ids = [
            token
            for row in rows
            for token, sampled in zip(row["input_ids"], row["sampled_mask"], strict=True)
            if sampled
        ]
        mask = [1] * len(ids)
        logprobs = list(chain.from_iterable(row["logprobs"] or () for row in rows))
        if have_one_row:
            end = len(rows[0]["sampled_mask"]) - rows[0]["sampled_mask"][::-1].index(1)
            ids, mask = (rows[0][name][prompt:end] for name in ("input_ids", "sampled_mask"))
            sampled_logprobs = iter(logprobs)
            logprobs = [next(sampled_logprobs, 0.0) if sampled else 0.0 for sampled in mask]
        columns["prompt_ids"].append(rows[0]["input_ids"][:prompt])
        columns["completion_ids"].append(ids)
        columns["masks"].append(mask)
        columns["logprobs"].append(logprobs)
    if episodes[0][0]["logprobs"] is None:
        return {**columns, "logprobs": None}
    return columns


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
        pairs = zip(generated.prompt_ids, generated.completion_ids, strict=True)
        return [[_row(prompt + ids, [0] * len(prompt) + [1] * len(ids))] for prompt, ids in pairs]
    if completions_of(episodes)["completion_ids"] != generated.completion_ids:
        raise UserError(
            "the completions of a generation batch are not what was sampled in the rows of its episodes: something "
            "changed completion_ids after they were drawn"
        )
    return [[_row(row["input_ids"], row["sampled_mask"]) for row in rows] for rows in episodes]


def _row(input_ids: list[int], sampled_mask: list[int]) -> Row:
    return {"input_ids": torch.tensor(input_ids), "sampled_mask": torch.tensor(sampled_mask, dtype=torch.bool)}


def text_of_rows(rows: list[Row], decode: Callable[[list[int]], str]) -> str:
    """What each row of an episode saw and what was sampled in it, for a person; a common beginning is left out."""
    lines = []
    before: list[int] = []
    for number, row in enumerate(rows, 1):
        ids = row["input_ids"].tolist()
        # Where the history parts from that of the row before.
        common = next((i for i, (new, old) in enumerate(zip(ids, before, strict=False)) if new != old), len(before))
        common = min(common, len(ids))
        shared = f", the first {common} as in row {number - 1}" if common else ""
        lines.append(f"--- row {number}: {len(ids)} tokens{shared}")
        parts = groupby(zip(ids[common:], row["sampled_mask"].tolist()[common:], strict=True), key=itemgetter(1))
        for is_sampled, tokens in parts:
            lines.append(f"[{'sampled' if is_sampled else 'seen'}] {decode([token for token, _ in tokens])}")
        before = ids
    return "\n".join(lines)
