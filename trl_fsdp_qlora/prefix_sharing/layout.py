"""From a padded batch to one packed row, and back.

A packed row holds each prompt once and no padding:

    [ single rows | prompt 1 | prompt 2 | … | c_11 … c_1G | c_21 … c_2G | … ]

Every stretch is a *segment*: a run of columns `[first, first + length)` of one row of the padded batch. A shared prompt
is its first P-1 tokens; each of its completions starts with a copy of the prompt's last token, because that position
is where the first completion token is predicted, and stops before the last token to be scored, which is only ever a
target. So a group costs (P-1) + sum of its completion lengths. A prompt that occurs once is one plain causal segment
with its completion ("single row"), with nothing to merge.

Where completions begin alike and it pays, the row is a *nested* one instead ([`nested.nested_row`]): each group is one
stretch that holds every prefix once.

Positions are the columns of the padded batch: what stock TRL's forward uses, so every rotary table entry is the same.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..scoring.transfer import to_device
from .batch import BatchFacts, read_batch
from .nested import NestedRow, nested_row


@dataclass(eq=False)
class PackedLayout:
    """One packed row of T tokens: what the model is called with, where each result goes, who attends to whom.

    Layers find it in [`scope.current`].

    Segments lie in row order: `num_singles` single rows, then `num_families` shared prompts, then the completions of
    each family in the same order (`children_per_family`). A completion attends to its family's prompt and, causally, to
    itself; everything else attends causally to itself only.

    Attributes:
        input_ids, position_ids: `(1, T)`.
        score_index_N, score_targets_N, scatter_index_N: the N scored positions of the row, the token each has to
            predict, and where its result belongs in the flattened `(B, C)`.
        multiplicity_1T: how many tokens of the padded batch a token stands for (the router loss of MoE models counts
            with it).
        starts, lengths: offset in the row and token count of each segment.
        tokens, stock_tokens: T, and the B * (P + C) positions that a padded forward computes.
        end_T: for a nested row, the place behind the last token that sees each one: token q attends to k where
            k <= q < end_T[k]. Its groups count as single rows. `None` for every other row.
        backend: `"auto"` or the name of the attention backend to use.
        layer_calls: backend name for each attention layer that saw this layout, in order, recomputation included.
        problems: where this is a list, a layer that cannot be computed notes why and gives zeros, so that this rank meets
            the others in every collective of the forward; where it is `None`, such a layer raises.
        is_computed: the forward is over; what runs from now on is a recomputation, and has no way back.
        own_masks: of prompts with images, see [`images.own_masks`].
        cache: index tensors that a backend derived from the layout, kept for the next layer.
        row_T, column_T: where in the padded batch each token stands, on the host.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    score_index_N: torch.Tensor
    score_targets_N: torch.Tensor
    scatter_index_N: torch.Tensor
    multiplicity_1T: torch.Tensor
    starts: np.ndarray
    lengths: np.ndarray
    num_singles: int
    num_families: int
    children_per_family: np.ndarray
    completion_shape: tuple[int, int]
    tokens: int
    stock_tokens: int
    row_T: np.ndarray
    column_T: np.ndarray
    end_T: np.ndarray | None = None
    backend: str = "auto"
    layer_calls: list[str] = field(default_factory=list)
    problems: list[str] | None = None
    is_computed: bool = False
    own_masks: dict = field(default_factory=dict)
    cache: dict = field(default_factory=dict)

    @property
    def root_rows(self) -> np.ndarray:
        """The row of the padded batch that each segment without a prefix was taken from, in row order."""
        return self.row_T[self.starts[: self.num_roots]]

    @property
    def num_roots(self) -> int:
        """Segments without a prefix: single rows and shared prompts."""
        return self.num_singles + self.num_families

    @property
    def children_start(self) -> int:
        """Offset of the first completion segment; T where nothing is shared."""
        return int(self.starts[self.num_roots]) if len(self.starts) > self.num_roots else self.tokens

    def scatter(self, values_N: torch.Tensor) -> torch.Tensor:
        """Put one value per scored position back to `(B, C)`, zeros elsewhere; differentiable."""
        flat = values_N.new_zeros(self.completion_shape[0] * self.completion_shape[1])
        return flat.index_copy(0, self.scatter_index_N, values_N).view(self.completion_shape)


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    score_mask_BC: torch.Tensor | None = None,
    whole_rows: bool = False,
    facts: BatchFacts | None = None,
    pairs_per_token: float | None = None,
) -> PackedLayout:
    """Pack a padded batch into one row.

    Args:
        input_ids, attention_mask: `(B, P + C)`, prompts left-padded, completions right-padded.
        logits_to_keep: C.
        score_mask_BC: completion tokens whose log-probability is wanted; the completion mask where absent. What lies
            behind the last of them in a completion stays out of the row, and a completion without any stays out
            altogether. A batch without any gives a row of one token, so that the forward still happens.
        whole_rows: keep every token of the batch in the row (the router loss of MoE models counts all of them).
        facts: what [`read_batch`] found, where it was already called.
        pairs_per_token: compute equal beginnings of completions once, if the tokens saved are worth the wider
            attention mask: how many query-key pairs cost a layer as much as one token does outside of attention. `None`
            shares prompts only.

    Raises:
        UnpackableBatch: see [`read_batch`].
    """
    rows, width = input_ids.shape
    prompt_width = width - logits_to_keep
    if facts is None:
        with_ids = pairs_per_token is not None
        facts = read_batch(input_ids, attention_mask, logits_to_keep, score_mask_BC, with_ids)
    scored_BC = facts.scored_BC
    if whole_rows:
        forward_B = facts.completion_lengths_B + 1
    else:
        # Index of the last scored token plus one: the number of positions that predict the tokens up to it.
        forward_B = np.where(scored_BC.any(1), logits_to_keep - scored_BC[:, ::-1].argmax(1), 0)

    row = _choose_row(facts, forward_B, prompt_width, pairs_per_token)
    is_nested = isinstance(row, NestedRow)
    source_T = row.row_T * width + row.column_T
    tokens = len(source_T)
    scored_row_N, scored_token_N = scored_BC.nonzero()
    score_index_N = row.index_BC[scored_row_N, scored_token_N]
    target_N = scored_row_N * width + prompt_width + scored_token_N
    scatter_N = scored_row_N * logits_to_keep + scored_token_N

    # One transfer for all of them.
    parts = [source_T, row.column_T, row.weight_T, score_index_N, target_N, scatter_N]
    sent = to_device(torch.from_numpy(np.concatenate(parts).astype(np.int64)), input_ids.device)
    source, column, weight, score_index, target, scatter_index = sent.split([len(part) for part in parts])
    flat_ids = input_ids.reshape(-1)
    return PackedLayout(
        input_ids=flat_ids[source].unsqueeze(0),
        position_ids=column.unsqueeze(0),
        score_index_N=score_index,
        score_targets_N=flat_ids[target],
        scatter_index_N=scatter_index,
        multiplicity_1T=weight.float().unsqueeze(0),
        starts=row.starts,
        lengths=row.lengths,
        num_singles=len(row.lengths) if is_nested else row.num_singles,
        num_families=0 if is_nested else len(row.children_per_family),
        children_per_family=np.zeros(0, int) if is_nested else row.children_per_family,
        completion_shape=(rows, logits_to_keep),
        tokens=tokens,
        stock_tokens=rows * width,
        row_T=row.row_T,
        column_T=row.column_T,
        end_T=row.end_T if is_nested else None,
    )


def _choose_row(
    facts: BatchFacts, forward_B: np.ndarray, prompt_width: int, pairs_per_token: float | None
) -> "_FlatRow | NestedRow":
    """The row that shares prompts only, or the nested one where it is worth its mask; arguments as in [`pack`]."""
    row = _flat_row(facts, forward_B, prompt_width)
    if pairs_per_token is None or len(row.lengths) <= 1:
        return row
    nested = nested_row(facts.completion_ids_BC, forward_B, facts.prompt_lengths_B, facts.new_prompt_B, prompt_width)
    saved = len(row.row_T) - len(nested.row_T)
    return nested if saved * pairs_per_token > nested.pairs - row.pairs else row


class _FlatRow(NamedTuple):
    """A row that shares prompts only; fields as in [`PackedLayout`] and [`nested.NestedRow`]."""

    row_T: np.ndarray
    column_T: np.ndarray
    index_BC: np.ndarray
    weight_T: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    num_singles: int
    children_per_family: np.ndarray
    pairs: int


def _flat_row(facts: BatchFacts, forward_B: np.ndarray, prompt_width: int) -> _FlatRow:
    row_S, first_S, length_S, (num_singles, children_per_family) = _segments(facts, forward_B, prompt_width)
    weight_S = np.ones(len(row_S))
    weight_S[num_singles : num_singles + len(children_per_family)] = children_per_family
    if len(row_S) == 0:  # nothing is scored: one token, connected to the model, so that every rank meets every other
        row_S, first_S, length_S = (np.array([x]) for x in (0, prompt_width - 1, 1))
        num_singles, children_per_family, weight_S = 1, np.zeros(0, int), np.zeros(1)
    starts = np.cumsum(length_S) - length_S
    segment_T = np.repeat(np.arange(len(row_S)), length_S)
    column_T = np.arange(len(segment_T)) - starts[segment_T] + first_S[segment_T]
    # Token t of row b stands in column P + t and is predicted one column before.
    shift_B = np.zeros(len(forward_B), int)
    num_roots = num_singles + len(children_per_family)
    is_prompt = np.zeros(len(row_S), bool)
    is_prompt[num_singles:num_roots] = True
    shift_B[row_S[~is_prompt]] = (starts - first_S)[~is_prompt]
    index_BC = shift_B[:, None] + prompt_width - 1 + np.arange(facts.scored_BC.shape[1])
    prompt_of_child = np.repeat(length_S[num_singles:num_roots], children_per_family)
    pairs = int((length_S**2).sum() + (length_S[num_roots:] * prompt_of_child).sum())
    return _FlatRow(
        row_S[segment_T],
        column_T,
        index_BC,
        weight_S[segment_T],
        starts,
        length_S,
        num_singles,
        children_per_family,
        pairs,
    )


def _segments(facts: BatchFacts, forward_B: np.ndarray, prompt_width: int):
    """Segments in row order as `(row, first column, length)` arrays, and `(num_singles, children_per_family)`.

    Segments of equal length are placed side by side where the order is free, so that backends can batch them as views.
    """
    prompt_B = facts.prompt_lengths_B
    kept = np.flatnonzero(forward_B > 0)
    group = np.cumsum(facts.new_prompt_B)[kept]
    _, group_start, group_of_kept, group_size = np.unique(
        group, return_index=True, return_inverse=True, return_counts=True
    )
    # A prompt of one token has nothing in front of its completions' own copy, so nothing to share.
    shared_group = (group_size > 1) & (prompt_B[kept[group_start]] > 1) if len(kept) else np.zeros(0, bool)

    single = kept[~shared_group[group_of_kept]]
    single_length = prompt_B[single] - 1 + forward_B[single]
    order = np.argsort(single_length, kind="stable")
    single, single_length = single[order], single_length[order]

    families = np.flatnonzero(shared_group)
    family_tokens = np.bincount(group_of_kept, weights=forward_B[kept], minlength=len(group_size))[families]
    head = kept[group_start[families]]
    order = np.lexsort((family_tokens, group_size[families], prompt_B[head]))
    families, head = families[order], head[order]
    children = [kept[group_start[f] : group_start[f] + group_size[f]] for f in families]
    child = np.concatenate(children) if children else np.zeros(0, int)

    row = np.concatenate([single, head, child])
    first = np.concatenate(
        [prompt_width - prompt_B[single], prompt_width - prompt_B[head], child * 0 + prompt_width - 1]
    )
    length = np.concatenate([single_length, prompt_B[head] - 1, forward_B[child]])
    return row, first, length.astype(int), (len(single), group_size[families])
