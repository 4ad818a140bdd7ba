"""From a padded batch to one packed row, and back.

A packed row holds each prompt once and no padding:

    [ single rows | prompt 1 | prompt 2 | … | c_11 … c_1G | c_21 … c_2G | … ]

Every stretch is a *segment*: a run of columns `[first, first + length)` of one row of the padded batch. A shared prompt
is its first P-1 tokens; each of its completions starts with a copy of the prompt's last token, because that position
is where the first completion token is predicted, and stops before the last token to be scored, which is only ever a
target. A prompt that occurs once is one plain causal segment with its completion ("single row"). Where completions begin
alike and it pays, the row is a *nested* one instead ([`nested.nested_row`]).

Positions are the columns of the padded batch: what stock TRL's forward uses, so every rotary table entry is the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from ..scoring.transfer import to_device
from .nested import Row, groups_of, nested_row


class UnpackableBatch(ValueError):
    """The masks do not describe left-padded prompts followed by right-padded completions."""


@dataclass
class BatchFacts:
    """The padded batch as the host sees it, read from the device in one transfer."""

    prompt_lengths_B: np.ndarray
    completion_lengths_B: np.ndarray
    scored_BC: np.ndarray
    new_prompt_B: np.ndarray  # row b has another prompt than row b - 1
    completion_ids_BC: np.ndarray | None = None  # where they were asked for
    image_keys_BN: np.ndarray | None = None  # what rows with the same images have in common

    @property
    def starts_group_B(self) -> np.ndarray:
        """`new_prompt_B`, and the first row whatever stands before it in a larger batch."""
        return self.new_prompt_B | (np.arange(len(self.new_prompt_B)) == 0)

    @property
    def forward_B(self) -> np.ndarray:
        """Positions of each completion that predict its tokens up to the last scored one."""
        return np.where(self.scored_BC.any(1), self.scored_BC.shape[1] - self.scored_BC[:, ::-1].argmax(1), 0)

    def rows(self, part: slice, scored: bool = True) -> "BatchFacts":
        """The facts of some neighbouring rows; with `scored=False` as if nothing in them were to be scored."""
        facts = BatchFacts(**{name: None if x is None else x[part] for name, x in vars(self).items()})
        facts.scored_BC = facts.scored_BC & scored
        return facts


def read_batch(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    score_mask_BC: torch.Tensor | None,
    with_ids: bool = False,
    images: tuple[torch.Tensor, int] | None = None,
) -> BatchFacts:
    """Lengths, scored positions and equal neighbouring prompts of a padded batch `(B, P + C)`; one host sync.

    Args:
        input_ids, attention_mask, logits_to_keep, score_mask_BC: as in [`layout.pack`].
        with_ids: completions' tokens as well, which nested rows are made from.
        images: numbers `(B, N)` that rows with the same images have in common, and the token that stands for an image.

    Raises:
        UnpackableBatch: a mask has holes, a row has no prompt token, or an image's token stands where completions begin.
    """
    rows, width = input_ids.shape
    prompt_width = width - logits_to_keep
    mask = attention_mask.bool()
    # Two rows share their prompt when padding and tokens agree; what stands under the padding does not matter.
    prompt = input_ids[:, :prompt_width].masked_fill(~mask[:, :prompt_width], -1)
    new_prompt = torch.ones(rows, 1, dtype=torch.bool, device=mask.device)
    new_prompt[1:, 0] = (prompt[1:] != prompt[:-1]).any(1)
    parts = {"mask": mask, "new_prompt": new_prompt}
    if images is not None:
        new_prompt[1:, 0] |= (images[0][1:] != images[0][:-1]).any(1)
        # Each completion has a copy of the prompt's last token, and no pixels of its own.
        parts["misplaced"] = ((input_ids == images[1]) & mask)[:, prompt_width - 1 :]
        parts["image_keys"] = images[0]
    if score_mask_BC is not None:
        parts["scored"] = score_mask_BC.bool()
    if with_ids:
        parts["ids"] = input_ids[:, prompt_width:]
    # In one transfer; what is true or false becomes a number beside others.
    host = torch.cat(list(parts.values()), dim=1).cpu().numpy()
    ends = np.cumsum([part.shape[1] for part in parts.values()])
    read = dict(zip(parts, np.split(host, ends[:-1], axis=1), strict=True))
    if images is not None and read["misplaced"].any():
        raise UnpackableBatch("an image's token stands at a prompt's end or in a completion")
    host_mask, new_prompt_B = read["mask"].astype(bool), read["new_prompt"][:, 0].astype(bool)
    prompt_mask, completion_mask = host_mask[:, :prompt_width], host_mask[:, prompt_width:]
    if (prompt_mask[:, 1:] < prompt_mask[:, :-1]).any() or (completion_mask[:, 1:] > completion_mask[:, :-1]).any():
        raise UnpackableBatch("the attention mask is not left padding, prompt, completion, right padding")
    prompt_lengths_B = prompt_mask.sum(1)
    if (prompt_lengths_B == 0).any():
        raise UnpackableBatch("a row has no prompt token to predict its first completion token from")
    scored_BC = completion_mask if score_mask_BC is None else completion_mask & read["scored"].astype(bool)
    return BatchFacts(
        prompt_lengths_B, completion_mask.sum(1), scored_BC, new_prompt_B, read.get("ids"), read.get("image_keys")
    )


def cut_rows(facts: BatchFacts, budget: int, rows_at_once: int | None) -> list[tuple[int, int]]:
    """Cut a batch into stretches of rows whose packed tokens stay within `budget`, between groups where possible.

    With `rows_at_once` the stretches are just that many rows each (a router loss is a mean over stock's stretches).
    """
    rows = len(facts.new_prompt_B)
    if rows_at_once is not None:
        return [(i, min(i + rows_at_once, rows)) for i in range(0, rows, rows_at_once)]
    group_starts, forward_B = np.flatnonzero(facts.starts_group_B), facts.forward_B
    cuts, first, used = [], 0, 0
    for start, end in zip(group_starts, [*group_starts[1:], rows], strict=True):
        prompt = int(facts.prompt_lengths_B[start])
        if used and used + prompt + forward_B[start:end].sum() > budget:
            cuts.append((first, start))
            first, used = start, 0
        used += prompt
        for row in range(start, end):
            if row > first and used + forward_B[row] > budget:
                cuts.append((first, row))
                first, used = row, prompt
            used += int(forward_B[row])
    cuts.append((first, rows))
    return [(int(a), int(b)) for a, b in cuts]


@dataclass(eq=False)
class PackedLayout:
    """One packed row of T tokens: what the model is called with, where each result goes, who attends to whom.

    Layers find it in [`scope.current`]. Segments lie in row order: `num_singles` single rows, then a shared prompt for each
    family, then the completions of each family in the same order (`children_per_family`). A completion attends to its
    family's prompt and, causally, to itself; everything else attends causally to itself only.

    Attributes:
        input_ids, position_ids: `(1, T)`.
        score_index_N, score_targets_N, scatter_index_N: the N scored positions of the row, the token each has to
            predict, and where its result belongs in the flattened `(B, C)`.
        multiplicity_1T: how many tokens of the padded batch a token stands for (the router loss of MoE models counts
            with it).
        starts, lengths: offset in the row and token count of each segment.
        completion_shape, width: `(B, C)` and P + C of the padded batch.
        row_T, column_T: where in it each token stands, on the host.
        end_T: for a nested row, the place behind the last token that sees each one: token q attends to k where
            k <= q < end_T[k]. Its groups count as single rows. `None` for every other row.
        backend: `"auto"` or the name of the attention backend to use.
        layer_calls: backend name for each attention layer that saw this layout, in order, recomputation included.
        problems: where this is a list, a layer that cannot be computed notes why and gives zeros, so that this rank meets
            the others in every collective of the forward; where it is `None`, such a layer raises.
        is_computed: the forward is over; what runs from now on is a recomputation, and has no way back.
        own_masks: of prompts with images, see `images.py`.
        cache: index tensors that a backend derived from the layout, kept for the next layer.
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
    children_per_family: np.ndarray
    completion_shape: tuple[int, int]
    width: int
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
    def tokens(self) -> int:
        return len(self.row_T)

    @property
    def num_roots(self) -> int:
        """Segments without a prefix: single rows and shared prompts."""
        return self.num_singles + len(self.children_per_family)

    @property
    def prompt_of_child(self) -> np.ndarray:
        """The segment of each completion's prompt, for those that share one."""
        return np.repeat(np.arange(self.num_singles, self.num_roots), self.children_per_family)

    @property
    def children_start(self) -> int:
        """Offset of the first completion segment; T where nothing is shared."""
        return int(self.starts[self.num_roots]) if len(self.starts) > self.num_roots else self.tokens

    def take(self, x_BL: torch.Tensor) -> torch.Tensor:
        """What the padded batch has at each token of the row: `(..., 1, T)` of `(..., B, P + C)`."""
        source_T = torch.from_numpy(self.row_T * x_BL.shape[-1] + self.column_T)
        return x_BL.flatten(-2)[..., to_device(source_T, x_BL.device)].unsqueeze(-2)

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
        input_ids, attention_mask, logits_to_keep: `(B, P + C)`, prompts left-padded, completions right-padded; C.
        score_mask_BC: completion tokens whose log-probability is wanted; the completion mask where absent. What lies
            behind the last of them stays out of the row. A batch without any gives one token, so that the forward still happens.
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
    forward_B = facts.completion_lengths_B + 1 if whole_rows else facts.forward_B
    row = _flat_row(facts, forward_B, prompt_width)
    if pairs_per_token is not None and facts.completion_ids_BC is not None and len(row.lengths) > 1:
        groups = facts.prompt_lengths_B, facts.new_prompt_B, prompt_width
        nested = nested_row(facts.completion_ids_BC, forward_B, *groups)
        saved = len(row.row_T) - len(nested.row_T)
        row = nested if saved * pairs_per_token > nested.pairs - row.pairs else row
    scored_row_N, scored_token_N = facts.scored_BC.nonzero()
    # One transfer for all of them.
    parts = [
        row.row_T * width + row.column_T,
        row.column_T,
        row.weight_T,
        row.index_BC[scored_row_N, scored_token_N],
        scored_row_N * width + prompt_width + scored_token_N,
        scored_row_N * logits_to_keep + scored_token_N,
    ]
    sent = to_device(torch.from_numpy(np.concatenate(parts).astype(np.int64)), input_ids.device)
    source, column, weight, score_index, target, scatter_index = sent.split([len(part) for part in parts])
    flat_ids = input_ids.reshape(-1)
    segments = ("starts", "lengths", "num_singles", "children_per_family", "row_T", "column_T", "end_T")
    return PackedLayout(
        input_ids=flat_ids[source].unsqueeze(0),
        position_ids=column.unsqueeze(0),
        score_index_N=score_index,
        score_targets_N=flat_ids[target],
        scatter_index_N=scatter_index,
        multiplicity_1T=weight.float().unsqueeze(0),
        completion_shape=(rows, logits_to_keep),
        width=width,
        **{name: getattr(row, name) for name in segments},
    )


def _flat_row(facts: BatchFacts, forward_B: np.ndarray, prompt_width: int) -> Row:
    """The row that shares prompts only; segments of equal length lie side by side, so that backends can batch them as views."""
    prompt_B, singles, families = facts.prompt_lengths_B, [], []
    for rows in groups_of(forward_B > 0, facts.new_prompt_B):
        # A prompt of one token has nothing in front of its completions' own copy, so nothing to share.
        if len(rows) > 1 and prompt_B[rows[0]] > 1:
            families.append(rows)
        else:
            singles.extend(rows)
    singles.sort(key=lambda row: prompt_B[row] + forward_B[row])
    families.sort(key=lambda rows: prompt_B[rows[0]])
    children_per_family = np.array([len(rows) for rows in families], int)
    num_singles, num_roots = len(singles), len(singles) + len(families)
    row_S = np.array([*singles, *(rows[0] for rows in families), *(row for rows in families for row in rows)], int)
    first_S, length_S, weight_S = prompt_width - prompt_B[row_S], prompt_B[row_S] - 1, np.ones(len(row_S), int)
    length_S[:num_singles] += forward_B[row_S[:num_singles]]
    weight_S[num_singles:num_roots] = children_per_family
    first_S[num_roots:], length_S[num_roots:] = prompt_width - 1, forward_B[row_S[num_roots:]]
    if len(row_S) == 0:  # nothing is scored: one token, connected to the model, so that every rank meets every other
        row_S, first_S, length_S, weight_S = (np.array([x]) for x in (0, prompt_width - 1, 1, 0))
        num_singles = num_roots = 1
    starts = np.cumsum(length_S) - length_S
    segment_T = np.repeat(np.arange(len(row_S)), length_S)
    column_T = np.arange(len(segment_T)) - starts[segment_T] + first_S[segment_T]
    # Token t of row b stands in column P + t and is predicted one column before; not in the prompt's segment.
    shift_B = np.zeros(len(forward_B), int)
    own_S = np.r_[:num_singles, num_roots : len(row_S)]
    shift_B[row_S[own_S]] = (starts - first_S)[own_S]
    index_BC = shift_B[:, None] + prompt_width - 1 + np.arange(facts.scored_BC.shape[1])
    prompt_of_child = np.repeat(length_S[num_singles:num_roots], children_per_family)
    pairs = int((length_S**2).sum() + (length_S[num_roots:] * prompt_of_child).sum())
    segments = starts, length_S, num_singles, children_per_family
    return Row(row_S[segment_T], column_T, weight_S[segment_T], index_BC, pairs, *segments)


def fold(x: torch.Tensor, start: int, count: int, length: int) -> torch.Tensor:
    """`count` neighbouring stretches of a `(1, H, T, D)` tensor as a batch `(count, H, length, D)`; a view."""
    return x[0].narrow(1, start, count * length).unflatten(1, (count, length)).transpose(0, 1)


def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Row positions `index` `(n, length)` of a `(1, H, T, D)` tensor as `(n, H, length, D)`."""
    return x[0].transpose(0, 1).index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def join(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat`, without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def equal_runs(starts: Iterable[int], lengths: Iterable[int]) -> list[tuple[int, int, int]]:
    """Neighbouring segments of equal length as `(start, count, length)`; as many as there are `starts`."""
    runs = []
    for start, length in zip(map(int, starts), map(int, lengths), strict=False):
        if runs and runs[-1][2] == length:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
        else:
            runs.append((start, 1, length))
    return runs


def padded(starts: np.ndarray, lengths: np.ndarray, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Segments of unequal length as a batch: their `(n, longest)` places in a row of `tokens`, and the flat ones that are real."""
    within = np.arange(lengths.max())
    index = np.minimum(starts[:, None] + within, tokens - 1)
    return torch.from_numpy(index), torch.from_numpy(np.flatnonzero(within < lengths[:, None]))


def cumulative(lengths, device: torch.device) -> tuple[torch.Tensor, int]:
    """What kernels for stretches of unequal length take: `(n + 1,)` cumulative lengths, int32, and the longest."""
    total = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return to_device(torch.from_numpy(total), device), int(max(lengths, default=0))


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask `(queries, keys)` of who is seen, as numbers `(1, 1, queries, keys)` that are added to scores."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
