"""Micro-batches and a sampler that keep the completions of one prompt together."""

from collections.abc import Sequence
from itertools import chain

import torch
from accelerate.logging import get_logger
from torch.utils.data import Sampler

from ...compat import trl as trls
from ...compat.trl_rollouts import DrawnRows
from ...prefix_sharing.batch import PER_IMAGE
from ...scoring.transfer import to_device

logger = get_logger(__name__)

_NUMBER = "row_number"  # of a row in the generation batch that TRL shuffles


def group_permutation(draw: torch.Tensor, group_size: int, rank_offset: int = 0) -> torch.Tensor:
    """A random order of rows in which whole groups move and rows inside a group keep their order.

    If this rank holds a group only in part, the group stays at its end of the slice.

    Args:
        draw: a permutation of the rows of this rank, from which the order is derived.
        group_size: completions per prompt.
        rank_offset: index of this rank's first row in the global batch.

    Returns:
        `LongTensor` of shape `(rows,)`.
    """
    rows = len(draw)
    head = min(-rank_offset % group_size, rows)
    whole = (rows - head) // group_size
    tail = head + whole * group_size
    starts = torch.arange(head, tail, group_size)
    order = starts[draw[starts].argsort()]
    middle = (order.unsqueeze(1) + torch.arange(group_size)).flatten()
    return torch.cat([torch.arange(head), middle, torch.arange(tail, rows)])


def micro_batches(batch: DrawnRows, group_size: int, rank: int, count: int) -> list[DrawnRows]:
    """`count` slices of this rank's part of a generation batch, with shuffled groups; otherwise as in TRL."""
    numbered, images = with_numbers(batch)
    draw = torch.randperm(len(numbered[_NUMBER]))
    size = len(draw) // count
    slices = [_taken(numbered, rows) for rows in draw[: size * count].split(size)]
    return in_whole_groups(slices, images, group_size, rank)


def with_numbers(batch: DrawnRows) -> tuple[DrawnRows, DrawnRows]:
    """A generation batch with the number of each row, for TRL to shuffle, and its images, which TRL need not move.

    Images are lists with an entry per row. TRL's batch holds the pixels once per completion, and these lists hold them
    once per prompt.
    """
    by_row = dict(trls.images_by_row(batch))
    if isinstance(by_row.get("pixel_values"), list):
        from ...prefix_sharing.image_keys import fingerprints  # text needs nothing of it

        keys = fingerprints(batch)[:, 0].tolist()
        for name in PER_IMAGE:
            if isinstance(by_row.get(name), list):
                by_row[name] = _one_copy_per_key(by_row[name], keys)
    images = {name: by_row.pop(name) for name in PER_IMAGE if name in by_row}
    return {**by_row, _NUMBER: torch.arange(len(batch["prompt_ids"]))}, images


def in_whole_groups(slices: list[DrawnRows], images: DrawnRows, group_size: int, rank: int) -> list[DrawnRows]:
    """Micro-batches of whole groups, from those that TRL has shuffled row by row.

    The order of the groups is derived from TRL's own permutation, which the rows' numbers show. So a run with the same
    seed draws the same completions as stock TRL, if transformers draws them as in stock. `joined_images` joins the
    pixels when a slice is used.

    Args:
        slices: of the batch that [`with_numbers`] returned.
        images: the other result of it.
        group_size: completions per prompt.
        rank: of this process.
    """
    numbers = [rows.pop(_NUMBER) for rows in slices]
    draw = torch.cat(numbers)
    place = draw.argsort()
    if not torch.equal(draw[place], torch.arange(len(draw))):
        logger.warning_once(
            "Rows are shuffled one by one, as in stock TRL, and not by group: this TRL leaves rows of a batch out"
        )
        return [{**rows, **_taken(images, number)} for rows, number in zip(slices, numbers, strict=True)]
    joined = {name: _joined([rows[name] for rows in slices]) for name in slices[0]}
    order = group_permutation(draw, group_size, rank_offset=rank * len(draw))
    by_group = []
    for rows in order.split(len(numbers[0])):
        by_group.append({**_taken(joined, place[rows]), **_taken(images, rows)})
    return by_group


def _is_scalar(value: torch.Tensor | Sequence | None) -> bool:
    """Whether a value of a batch is one for all of its rows."""
    return value is None or (isinstance(value, torch.Tensor) and value.ndim == 0)


def _joined(values: list):
    """A value of a batch from those of its slices."""
    if _is_scalar(values[0]):
        return values[0]
    return torch.cat(values) if isinstance(values[0], torch.Tensor) else list(chain.from_iterable(values))


def _taken(batch: DrawnRows, rows: torch.Tensor) -> DrawnRows:
    """Some rows of a batch, in their order."""
    taken = {}
    for name, value in batch.items():
        if _is_scalar(value):
            taken[name] = value
        elif isinstance(value, torch.Tensor):
            taken[name] = value[to_device(rows, value.device)]
        else:
            taken[name] = [value[row] for row in rows.tolist()]
    return taken


def _one_copy_per_key(pixels_of_rows: list[torch.Tensor], keys: list[int]) -> list[torch.Tensor]:
    """The pixels of each row; rows with equal keys have the same tensor, a copy, so that the batch can be freed."""
    copies: dict[int, torch.Tensor] = {}
    for key, pixels in zip(keys, pixels_of_rows, strict=True):
        if key not in copies:
            copies[key] = pixels.clone()
    return [copies[key] for key in keys]


def with_epochs(sampler: Sampler) -> Sampler:
    """TRL's `RepeatSampler`, with the order of epoch n also in a run that is resumed in epoch n.

    TRL's sampler draws the permutations of all epochs from one generator, so a run that is resumed in a later epoch
    begins with the first epoch's order. The order of an uninterrupted run is the same as TRL's. The sampler itself is
    not changed, and one that is not TRL's is returned as it is.
    """
    if not vars(sampler).keys() >= {"shuffle", "seed", "generator", "num_samples"}:
        return sampler

    class EpochRepeatSampler(type(sampler)):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            """Set the epoch of the next order; the Trainer and accelerate call this method before each epoch."""
            self.epoch = epoch

        def __iter__(self):
            if self.shuffle and self.seed is not None:
                self.generator.manual_seed(self.seed)
                for _ in range(self.epoch):
                    torch.randperm(self.num_samples, generator=self.generator)
            yield from super().__iter__()

    # A further object, because a user may have made the one that is given.
    further = object.__new__(EpochRepeatSampler)
    vars(further).update(vars(sampler))
    return further
