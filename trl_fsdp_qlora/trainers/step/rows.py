"""Rows of a trainer's micro-batch: as arguments of TRL's pass, and as a batch for prefix sharing.


An *episode* is a completion of TRL's batch. Usually it is one row: a prompt and what follows it. An agent whose
history is rendered again at each turn, or which compacts its context or calls other agents, sampled its tokens behind
several histories, so its episode has several rows. To TRL its sampled tokens are one completion. [`EpisodeRows`] is
all that differs: a pass computes the rows, and the scores of their sampled tokens take their places in TRL's batch.

Suffixes of shapes: B episodes, C columns of their completions, R rows, L columns of a row, N sampled tokens.
"""

import math
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from ...compat import trl as trls
from ...compat.trl_rollouts import ROWS, DrawnRows
from ...prefix_sharing.batch import IGNORED_LABEL, Batch
from ...prefix_sharing.ranks import reduced_over_ranks
from ...scoring.transfer import to_device

T = TypeVar("T")

# Arguments that TRL's pass takes from a batch in addition to ids and masks.
OF_IMAGES = (
    "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
# Arguments of a call with an entry per token.
OF_TOKENS = ("input_ids", "attention_mask", "labels")

# Those of a call of the model, or of TRL's pass, by their names.
Arguments = dict[str, torch.Tensor | Sequence | int | bool | None]
# `input_ids` and `sampled_mask`, both `(L,)`: what a model saw and wrote, and which of these tokens it wrote.
Row = dict[str, torch.Tensor]


class EpisodeRows:
    """The rows of B episodes, padded on the right, and the place of each sampled token in TRL's batch.

    Args:
        episodes: the rows of each episode, on the host.
        width: C, the columns of the completions in TRL's batch.
    """

    def __init__(self, episodes: Sequence[list[Row]], width: int):
        rows = [row for episode in episodes for row in episode]
        ids_of_rows = [row["input_ids"] for row in rows]
        sampled_of_rows = [row["sampled_mask"] for row in rows]
        lengths_R1 = torch.tensor([len(ids) for ids in ids_of_rows]).unsqueeze(1)
        self.episodes = len(episodes)
        self.input_ids_RL = pad_sequence(ids_of_rows, batch_first=True)
        columns = torch.arange(self.input_ids_RL.shape[1])
        self.attention_mask_RL = (columns < lengths_R1).long()

        sampled_RL = pad_sequence(sampled_of_rows, batch_first=True)
        row_N, column_N = sampled_RL.nonzero(as_tuple=True)
        rows_of_episodes = torch.tensor([len(episode) for episode in episodes])
        episode_R = torch.repeat_interleave(rows_of_episodes)
        episode_N = episode_R[row_N]
        first_N = torch.searchsorted(episode_N, episode_N)  # the first sampled token of the same episode
        place_in_episode_N = torch.arange(len(row_N)) - first_N
        self._place_N = row_N, column_N
        self._place_in_batch_N = episode_N, place_in_episode_N - width  # counted from the last column

    @property
    def width(self) -> int:
        """The tokens of the longest row."""
        return self.input_ids_RL.shape[1]

    @property
    def padded_tokens(self) -> int:
        """The tokens of a batch with one row for each episode, as long as the longest."""
        return self.episodes * self.width

    def slices(self, limit: int, device: torch.device) -> tuple[list[slice], list[slice]]:
        """Slices of all rows, of no more padded tokens than `limit`, or of one row; and slices that only fill up.

        Every rank has equally many of both together: one that needs fewer slices than another computes its last row
        again. Collective.
        """
        count = len(self.input_ids_RL)
        rows = max(1, limit // self.width)
        slices = [slice(first, first + rows) for first in range(0, count, rows)]
        most, *_ = reduced_over_ranks([len(slices)], device)
        last_row = slice(count - 1, count)
        missing = int(most) - len(slices)
        return slices, missing * [last_row]

    def arguments(self, arguments: Arguments) -> Arguments:
        """The arguments of a fused call for these rows, from those of TRL's batch."""
        labels_BT = arguments["labels"]
        device = labels_BT.device
        place_N = self._to(self._place_N, device)
        place_in_batch_N = self._to(self._place_in_batch_N, device)
        ids_RL = to_device(self.input_ids_RL, device)
        labels_RL = torch.full_like(ids_RL, IGNORED_LABEL)
        # TRL masks a completion as a whole, and its tokens have no labels then.
        labels_RL[place_N] = labels_BT[place_in_batch_N]
        return {
            **arguments,
            "input_ids": ids_RL,
            "attention_mask": to_device(self.attention_mask_RL, device),
            "labels": labels_RL,
        }

    def batch(self, batch: Batch) -> Batch:
        """The rows of a batch of TRL's."""
        return replace(batch, **self.arguments(batch.of_tokens()))

    def scores(self, output: "trls.FusedCausalLMOutput", labels_BT: torch.Tensor) -> "trls.FusedCausalLMOutput":
        """The output for TRL's batch, from the output for the rows; differentiable.

        Args:
            output: of R rows, and of any number of rows behind them.
            labels_BT: of TRL's batch.
        """
        row_N, column_N = self._to(self._place_N, labels_BT.device)
        place_in_batch_N = self._to(self._place_in_batch_N, labels_BT.device)
        values = {}
        for name in ("log_probs", "entropy"):
            values_RL = vars(output)[name]
            if values_RL is None:
                continue
            # The score of a token is in the column of the token before it, in both batches.
            values_N = values_RL[row_N, column_N - 1]
            zeros_BT = values_RL.new_zeros(len(labels_BT), labels_BT.shape[1] - 1)
            values[name] = zeros_BT.index_put(place_in_batch_N, values_N)
        return trls.FusedCausalLMOutput(**values, aux_loss=output.aux_loss)

    @staticmethod
    def _to(place_N: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, ...]:
        return tuple(to_device(x, device) for x in place_N)


def version_of(tensor: torch.Tensor) -> int:
    """The version of a tensor, which every write to it raises; 0 if it was made in inference mode and has none."""
    return 0 if tensor.is_inference() else tensor._version


def episode_rows(inputs: DrawnRows) -> EpisodeRows | None:
    """The rows of a micro-batch; `None` if each episode has one row."""
    episodes = inputs.get(ROWS)
    return None if episodes is None else EpisodeRows(episodes, inputs["completion_ids"].shape[1])


def joined(outputs: "list[trls.FusedCausalLMOutput]", count: int) -> "trls.FusedCausalLMOutput":
    """The output of slices of rows as that of all rows.

    The router loss is the mean over the first `count` slices, as TRL's of a batch that it slices; what follows them
    fills up.
    """
    first = outputs[0]
    values = {}
    for name in ("log_probs", "entropy"):
        if vars(first)[name] is not None:
            values[name] = torch.cat([vars(output)[name] for output in outputs])
    if first.aux_loss is not None:
        router_losses = torch.stack([output.aux_loss for output in outputs[:count]])
        values["aux_loss"] = router_losses.mean()
    return trls.FusedCausalLMOutput(**values)


def equally_many(batches: list[Batch]) -> list[Batch]:
    """Batches of rows with equally many rows on every rank, and equally many columns on this rank.

    The passes of an optimizer step are a number of rows each, and every rank runs equally many. Rows without tokens
    are added, which cost nothing. Collective.
    """
    device = batches[0].input_ids.device
    most_here = max(len(batch.input_ids) for batch in batches)
    most, *_ = reduced_over_ranks([most_here], device)
    count = _divisible(int(most))
    width = max(batch.input_ids.shape[1] for batch in batches)
    filling = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED_LABEL}
    equal = []
    for batch in batches:
        rows, columns = batch.input_ids.shape
        added = (0, width - columns, 0, count - rows)  # columns on the right, rows at the end
        tensors = {}
        for name, values in batch.of_tokens().items():
            tensors[name] = torch.nn.functional.pad(values, added, value=filling[name])
        equal.append(replace(batch, **tensors))
    return equal


def _divisible(rows: int) -> int:
    """The next number that has several divisors: a batch is cut into parts of equally many rows."""
    multiple = max(divisor for divisor in (1, 2, 4, 12) if divisor <= rows)
    return math.ceil(rows / multiple) * multiple


def padded_batch(inputs: DrawnRows) -> Arguments:
    """A micro-batch as the arguments of `GRPOTrainer._get_per_token_logps_and_entropies`."""
    return {
        "input_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        "logits_to_keep": inputs["completion_ids"].size(1),
        **{name: inputs[name] for name in OF_IMAGES if name in inputs},
    }


class LossRows(NamedTuple):
    """What the loss of a micro-batch scores.

    Attributes:
        inputs: those of the loss.
        scored_BC: completion tokens whose values are wanted (bool); every unmasked token if `None`.
        router_loss: whether the loss has a router loss.
    """

    inputs: DrawnRows
    scored_BC: torch.Tensor | None = None
    router_loss: bool = False

    def batch(self) -> Batch:
        """The rows as the loss's pass calls the model with them."""
        vision = padded_batch(self.inputs)
        input_ids = vision.pop("input_ids")
        attention_mask = vision.pop("attention_mask")
        width = vision.pop("logits_to_keep")
        labels = input_ids.masked_fill(attention_mask == 0, IGNORED_LABEL)
        labels[:, :-width] = IGNORED_LABEL
        if self.scored_BC is not None:
            labels[:, -width:].masked_fill_(~self.scored_BC, IGNORED_LABEL)
        vision = {name: value for name, value in vision.items() if value is not None}
        num_images = vision.pop("num_images", None)
        return Batch(input_ids, attention_mask, labels, vision, num_images, self.router_loss)


class PerBatch(Generic[T]):
    """Values that are made once of a micro-batch's tensors, so that a plan and the loss get the same objects."""

    def __init__(self):
        # By the first of the tensors: the tensors, what else the value was made of, and the value.
        self._values = WeakTensorKeyDictionary()

    def get(self, tensors: Sequence[torch.Tensor], key: Hashable, make: Callable[[], T]) -> T:
        """The value that was made of these tensors with this `key`; `make()` if there is none yet."""
        versions = [version_of(tensor) for tensor in tensors]
        key = (key, *versions)
        first, *further = tensors
        last_further, last_key, last_value = self._values.get(first, ((), None, None))
        if last_key == key and all(map(operator.is_, further, last_further)):
            return last_value
        value = make()
        self._values[first] = (further, key, value)
        return value
