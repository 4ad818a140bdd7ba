"""Before the first packed pass of each kind, a few rows are also computed as in stock TRL.

This file chooses the rows and cuts them into forwards; [`verdict.compare`] computes both ways and decides. When passes
are compared, and what follows from a difference, is decided in `sharing.py`.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .attention.call import UnsupportedAttention
from .batch import IGNORED_LABEL, Batch, Sequences, UnpackableBatch
from .dropout import attention_reason, without_dropout
from .packed_model import PackedModel
from .passes import Forward, cut_rows
from .ranks import reduced_over_ranks
from .row import PassRecord
from .verdict import HIDDEN_STATES, LOG_PROBABILITY, ROWS_FP32, ROWS_HALF, compare, cut_sample

NOTHING_TO_COMPARE = "nothing to compare"
# Every second row that is compared stands this many columns further left.
MOVED_BY = 2


@dataclass(frozen=True, eq=False)
class TwoWays:
    """The two ways to compute rows.

    Attributes:
        padded: returns the log-probabilities `(n, L - 1)` of a batch as in stock TRL; if it has no labels, the
            [`projections`] `(n, L)` of its last hidden states.
        packed: returns them from one forward.
    """

    padded: Callable[[Batch], torch.Tensor]
    packed: Callable[[Batch, Forward], torch.Tensor]


def projections(hidden_BLH: torch.Tensor) -> torch.Tensor:
    """Returns a number of order 1 for each last hidden state, for comparisons: its direction along a random vector.

    Hidden states differ in length by model and by token, and log-probabilities, for which the limits of a comparison
    are made, do not.
    """
    random_H = torch.randn(hidden_BLH.shape[-1], generator=torch.Generator().manual_seed(0))
    return functional.normalize(hidden_BLH.float(), dim=-1) @ random_H.to(hidden_BLH.device)


def difference(
    packed_model: PackedModel,
    model: nn.Module,
    ways: TwoWays,
    batch: Batch,
    unit: float,
    tokens_per_pass: int | None,
    cannot_pack: Callable[[str], None],
) -> str | None:
    """Returns the fault of packed passes over a few rows of a batch; `None` if there is none. Collective.

    If no rank has rows that can be packed and of which anything is wanted, the result is `NOTHING_TO_COMPARE`.

    Args:
        packed_model: the model that is compared.
        model: its root module, wrappers included.
        ways: the two ways to compute rows.
        batch: the batch that is about to be computed; rows with a common prompt are neighbours.
        unit: the result of [`verdict.rounding_unit`].
        tokens_per_pass: limit of the pass, if it has one. No forward of the comparison holds more tokens.
        cannot_pack: gets the reason why the rows cannot be packed.
    """
    device = batch.input_ids.device
    # A single row is taken twice, so that something is shared.
    count_here = max(2, min(ROWS_HALF if unit else ROWS_FP32, len(batch.input_ids)))
    (count,) = reduced_over_ranks([count_here], device)
    sampled = replace(batch.rows(sampled_rows(batch, int(count))), router_loss=False)
    if packed_model.facts.sees_distances:
        sampled = in_two_columns(sampled, packed_model.images.token)

    def try_to_read(rows: Batch) -> Sequences | None:
        try:
            return packed_model.read(rows)
        except UnpackableBatch as error:
            cannot_pack(str(error))
            return None

    sequences = try_to_read(sampled)
    is_packable = sequences is not None and bool(sequences.needed_B.any())
    if not any(reduced_over_ranks([int(is_packable)], device)):
        return NOTHING_TO_COMPARE
    whole = try_to_read(batch)
    tokens = batch.input_ids.numel() if whole is None else packed_model.build_forest(whole).tokens
    if tokens_per_pass is not None:
        tokens = min(tokens, tokens_per_pass)
    rows, width = sampled.input_ids.shape
    packed_forwards = [(0, rows)]
    if is_packable:
        sampled, packed_forwards = _in_forwards(packed_model, sampled, sequences, max(tokens, width))
    cuts = cut_sample(packed_forwards, rows, width, tokens, device)
    sample = _Sample(packed_model, ways, sampled, is_packable)
    is_scored = sampled.is_wanted()
    of = HIDDEN_STATES if batch.labels is None else LOG_PROBABILITY
    embeddings = packed_model.base.get_input_embeddings()
    problem = attention_reason(packed_model.base)  # dropout may have been set since
    with without_dropout(model), packed_model.images.in_every_forward():
        for is_dense in (False, True) if packed_model.can_be_dense else (False,):
            if problem is None:
                packed = functools.partial(sample.packed, is_dense)
                problem = compare(model, packed, sample.padded, is_scored, cuts, embeddings, unit, of)
    return problem


def _in_forwards(
    packed_model: PackedModel, batch: Batch, sequences: Sequences, tokens: int
) -> tuple[Batch, list[tuple[int, int]]]:
    """Returns the batch in the order of packed forwards of at most `tokens`, and each forward's `(first, last)`.

    The rows `[first, last)` of a forward are neighbours then.
    """
    sets = cut_rows(sequences, tokens, lambda part: packed_model.build_forest(sequences.rows(part)).tokens)
    borders = np.cumsum([0, *map(len, sets)]).tolist()
    return batch.rows(np.concatenate(sets)), list(itertools.pairwise(borders))


@dataclass(eq=False)
class _Sample:
    """Rows to compare, and the two ways to compute some of them in one forward.

    Attributes:
        packed_model: the model that is compared.
        ways: the two ways.
        batch: the rows.
        is_packable: whether this rank can pack its rows, and something of them is wanted.
    """

    packed_model: PackedModel
    ways: TwoWays
    batch: Batch
    is_packable: bool

    def padded(self, part: slice) -> torch.Tensor:
        """Returns the values of some of the rows as in stock TRL, see [`TwoWays`]."""
        return self.ways.padded(self._rows(part))

    def packed(self, is_dense: bool, part: slice) -> torch.Tensor:
        """Returns them from one packed row.

        A layer that cannot be computed records the reason instead of raising, so that this rank reaches every
        collective.

        Raises:
            UnsupportedAttention: a layer cannot be computed.
        """
        if not self.is_packable:  # the other ranks' forwards may be collective, so this rank runs one, too
            return self.padded(part)
        rows = self._rows(part)
        sequences = self.packed_model.read(rows)
        record = PassRecord(problems=[])
        forest = self.packed_model.build_forest(sequences, is_dense)
        values = self.ways.packed(rows, Forward(sequences, forest, record=record))
        calls = len(record.layer_calls)
        layers = self.packed_model.facts.layers
        if not calls or calls % layers:  # differential attention calls its function twice a layer
            record.problems.append(f"prefix-aware layers ran {calls} times in a forward of {layers}")
        if record.problems:
            raise UnsupportedAttention(record.problems[0])
        return values

    def _rows(self, part: slice) -> Batch:
        return self.batch.rows(np.arange(part.start, part.stop))


def in_two_columns(batch: Batch, image_token: int | None) -> Batch:
    """Returns a batch in which every second row stands further left, without the first tokens of all rows.

    Rows that begin alike in different columns share tokens if the model sees positions only by their differences. In
    the user's first batch all rows may begin in one column, and the comparison has to notice if that is wrong. A batch
    that is too short for that, or begins with an image, is returned as it is.
    """
    columns = batch.input_ids.shape[1]
    mask = torch.ones_like(batch.input_ids) if batch.attention_mask is None else batch.attention_mask
    labels = None
    if batch.labels is not None:
        labels = batch.labels.clone()
        labels[:, : MOVED_BY + 1] = IGNORED_LABEL  # a label needs a token in front of it
    is_too_short = columns < MOVED_BY + 2 or bool((mask[:, MOVED_BY:].sum(1) < 2).any())
    # An image may have a token of its own in front.
    begins_with_image = batch.has_images and bool((batch.input_ids[:, : MOVED_BY + 2] == image_token).any())
    has_results = labels is None or bool((labels != IGNORED_LABEL).any())
    if is_too_short or begins_with_image or not has_results:
        return batch
    is_moved_B1 = torch.arange(len(mask), device=mask.device).unsqueeze(1) % 2 == 1

    def in_place(x: torch.Tensor, filling: int) -> torch.Tensor:
        kept = x[:, MOVED_BY:]
        moved = functional.pad(kept, (0, MOVED_BY), value=filling)
        return torch.where(is_moved_B1.to(x.device), moved, functional.pad(kept, (MOVED_BY, 0), value=filling))

    vision = dict(batch.vision)
    for name, x in vision.items():
        if isinstance(x, torch.Tensor) and x.shape == mask.shape:
            vision[name] = in_place(x, 0)
    return replace(
        batch,
        input_ids=in_place(batch.input_ids, 0),
        attention_mask=in_place(mask, 0),
        labels=None if labels is None else in_place(labels, IGNORED_LABEL),
        vision=vision,
    )


def sampled_rows(batch: Batch, count: int) -> np.ndarray:
    """Returns `count` row indices: half from the first row with images (or row 0) on, half from the end of the batch.

    Neighbouring rows mostly share a prompt. If the batch has fewer rows, the last row is repeated, so that ranks have
    equally many.
    """
    rows = list(range(len(batch.input_ids)))
    rows += rows[-1:] * (count - len(rows))
    first = next((row for row, images in enumerate(batch.num_images or ()) if images), 0)
    first = min(first, len(rows) - count)
    last = count // 2
    return np.array(rows[first : first + count - last] + rows[len(rows) - last :])
