"""Micro-batches and a sampler that keep the completions of one prompt together."""

from collections.abc import Sequence

import torch
from torch.utils.data import Sampler

from ...compat import trl as trls
from ...compat.trl_rollouts import DrawnRows
from ...prefix_sharing.batch import PER_IMAGE
from ...scoring.transfer import to_device


def group_permutation(batch_size: int, group_size: int, rank_offset: int = 0) -> torch.Tensor:
    """A random order of `batch_size` rows in which whole groups move and rows inside a group keep their order.

    The function draws exactly one `torch.randperm(batch_size)` from the global generator, as TRL's shuffle does. So a
    run with the same seed generates the same completions as stock TRL, if transformers draws them as in stock. If
    this rank holds a group only in part, the group stays at its end of the slice.

    Args:
        batch_size: rows on this rank.
        group_size: completions per prompt.
        rank_offset: index of this rank's first row in the global batch.

    Returns:
        `LongTensor` of shape `(batch_size,)`.
    """
    draw = torch.randperm(batch_size)
    head = min(-rank_offset % group_size, batch_size)
    whole = (batch_size - head) // group_size
    tail = head + whole * group_size
    starts = torch.arange(head, tail, group_size)
    order = starts[draw[starts].argsort()]
    middle = (order.unsqueeze(1) + torch.arange(group_size)).flatten()
    return torch.cat([torch.arange(head), middle, torch.arange(tail, batch_size)])


def micro_batches(batch: DrawnRows, group_size: int, rank: int, count: int) -> list[DrawnRows]:
    """`count` slices of this rank's part of a generation batch, with shuffled groups; otherwise sliced as in TRL."""
    by_row = shuffled_groups(batch, group_size, rank)
    size = len(by_row["prompt_ids"]) // count

    slices = []
    for i in range(count):
        rows = slice(i * size, (i + 1) * size)
        slices.append({key: value if _is_scalar(value) else value[rows] for key, value in by_row.items()})
    return slices


def _is_scalar(value: torch.Tensor | Sequence | None) -> bool:
    """Whether a value of a batch is one for all of its rows."""
    return value is None or (isinstance(value, torch.Tensor) and value.ndim == 0)


def shuffled_groups(batch: DrawnRows, group_size: int, rank: int) -> DrawnRows:
    """This rank's part of a generation batch, with shuffled groups.

    Pixels are lists with an entry per row; `joined_images` joins them when a slice is used. TRL's batch holds the
    pixels once per completion, and this batch holds them once per prompt.
    """
    by_row = dict(trls.images_by_row(batch))
    rows = len(batch["prompt_ids"])
    if isinstance(by_row.get("pixel_values"), list):
        from ...prefix_sharing.image_keys import fingerprints  # text needs nothing of it

        keys = fingerprints(batch)[:, 0].tolist()
        for name in PER_IMAGE:
            if isinstance(by_row.get(name), list):
                by_row[name] = _one_copy_per_key(by_row[name], keys)
    order = group_permutation(rows, group_size, rank_offset=rank * rows)

    def permute(value):
        if _is_scalar(value):
            return value
        if isinstance(value, torch.Tensor):
            return value[to_device(order, value.device)]
        return [value[i] for i in order]

    return {key: permute(value) for key, value in by_row.items()}


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
