"""From a padded batch to one packed row, and back.

A packed row holds each prompt once and no padding:

    [ single rows | prompt 1 | prompt 2 | … | c_11 … c_1G | c_21 … c_2G | … ]

Every stretch is a *segment*: a run of columns `[first, first + length)` of one row of the padded batch. A shared prompt
is its first P-1 tokens; each of its completions starts with a copy of the prompt's last token, because that position
is where the first completion token is predicted, and stops before the last token to be scored, which is only ever a
target. So a group costs (P-1) + sum of its completion lengths. A prompt that occurs once is one plain causal segment
with its completion ("single row"), with nothing to merge.

Positions are the columns of the padded batch: what stock TRL's forward uses, so every rotary table entry is the same.
"""

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(eq=False)
class PackedLayout:
    """One packed row of T tokens: what the model is called with, where each result goes, who attends to whom.

    It travels as a keyword argument of the model down to the attention function (never through a global, which
    gradient checkpointing would miss when it recomputes a layer during backward).

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
        backend: `"auto"` or the name of the attention backend to use.
        layer_calls: backend name for each attention layer that saw this layout, in order, recomputation included.
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
    num_families: int
    children_per_family: np.ndarray
    completion_shape: tuple[int, int]
    tokens: int
    stock_tokens: int
    backend: str = "auto"
    layer_calls: list[str] = field(default_factory=list)
    cache: dict = field(default_factory=dict)

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


class SealedLayout:
    """A layout on its way through module calls.

    FSDP2 rebuilds every dataclass among a module's arguments to cast the tensors in it, which would lose
    `layer_calls`; of any other object it keeps its hands off.
    """

    def __init__(self, layout: PackedLayout):
        self.layout = layout


class UnpackableBatch(ValueError):
    """The masks do not describe left-padded prompts followed by right-padded completions."""


@dataclass
class BatchFacts:
    """The padded batch as the host sees it, read from the device in one transfer."""

    prompt_lengths_B: np.ndarray
    completion_lengths_B: np.ndarray
    scored_BC: np.ndarray
    new_prompt_B: np.ndarray  # row b has another prompt than row b - 1

    def rows(self, part: slice, scored: bool = True) -> "BatchFacts":
        """The facts of a stretch of rows; with `scored=False` as if nothing in them were to be scored."""
        scored_BC = self.scored_BC[part]
        return BatchFacts(
            self.prompt_lengths_B[part],
            self.completion_lengths_B[part],
            scored_BC if scored else np.zeros_like(scored_BC),
            self.new_prompt_B[part],
        )


def read_batch(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, score_mask_BC: torch.Tensor | None
) -> BatchFacts:
    """Lengths, scored positions and equal neighbouring prompts of a padded batch `(B, P + C)`; one host sync.

    Raises:
        UnpackableBatch: a mask has holes, or a row has no prompt token.
    """
    rows, width = input_ids.shape
    prompt_width = width - logits_to_keep
    mask = attention_mask.bool()
    # Two rows share their prompt when padding and tokens agree; what stands under the padding does not matter.
    prompt = input_ids[:, :prompt_width].masked_fill(~mask[:, :prompt_width], -1)
    new_prompt = torch.ones(rows, 1, dtype=torch.bool, device=mask.device)
    new_prompt[1:, 0] = (prompt[1:] != prompt[:-1]).any(1)
    parts = [mask, new_prompt]
    if score_mask_BC is not None:
        parts.append(score_mask_BC.bool())
    host = torch.cat(parts, dim=1).cpu().numpy()
    host_mask, new_prompt_B = host[:, :width], host[:, width]
    prompt_mask, completion_mask = host_mask[:, :prompt_width], host_mask[:, prompt_width:]
    if (prompt_mask[:, 1:] < prompt_mask[:, :-1]).any() or (completion_mask[:, 1:] > completion_mask[:, :-1]).any():
        raise UnpackableBatch("the attention mask is not left padding, prompt, completion, right padding")
    prompt_lengths_B = prompt_mask.sum(1)
    if (prompt_lengths_B == 0).any():
        raise UnpackableBatch("a row has no prompt token to predict its first completion token from")
    scored_BC = completion_mask if score_mask_BC is None else completion_mask & host[:, width + 1 :]
    return BatchFacts(prompt_lengths_B, completion_mask.sum(1), scored_BC, new_prompt_B)


def pack(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    score_mask_BC: torch.Tensor | None = None,
    whole_rows: bool = False,
    facts: BatchFacts | None = None,
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

    Raises:
        UnpackableBatch: see [`read_batch`].
    """
    rows, width = input_ids.shape
    prompt_width = width - logits_to_keep
    if facts is None:
        facts = read_batch(input_ids, attention_mask, logits_to_keep, score_mask_BC)
    scored_BC = facts.scored_BC
    if whole_rows:
        forward_B = facts.completion_lengths_B + 1
    else:
        # Index of the last scored token plus one: the number of positions that predict the tokens up to it.
        forward_B = np.where(scored_BC.any(1), logits_to_keep - scored_BC[:, ::-1].argmax(1), 0)

    row_S, first_S, length_S, sizes = _segments(facts, forward_B, prompt_width)
    num_singles, children_per_family = sizes
    weight_S = np.ones(len(row_S))
    weight_S[num_singles : num_singles + len(children_per_family)] = children_per_family
    if len(row_S) == 0:  # nothing is scored: one token, connected to the model, so that every rank meets every other
        row_S, first_S, length_S = (np.array([x]) for x in (0, prompt_width - 1, 1))
        num_singles, children_per_family, weight_S = 1, np.zeros(0, int), np.zeros(1)

    starts = np.cumsum(length_S) - length_S
    tokens = int(length_S.sum())
    segment_T = np.repeat(np.arange(len(row_S)), length_S)
    column_T = np.arange(tokens) - starts[segment_T] + first_S[segment_T]
    source_T = row_S[segment_T] * width + column_T

    # Token t of row b stands in column P + t and is predicted one column before.
    shift_B = np.zeros(rows, int)
    is_prompt = np.zeros(len(row_S), bool)
    is_prompt[num_singles : num_singles + len(children_per_family)] = True
    shift_B[row_S[~is_prompt]] = (starts - first_S)[~is_prompt]
    scored_row_N, scored_token_N = scored_BC.nonzero()
    score_index_N = shift_B[scored_row_N] + prompt_width + scored_token_N - 1
    target_N = scored_row_N * width + prompt_width + scored_token_N
    scatter_N = scored_row_N * logits_to_keep + scored_token_N

    # One transfer for all indices.
    host = torch.from_numpy(np.concatenate([source_T, column_T, score_index_N, target_N, scatter_N]).astype(np.int64))
    scored = len(score_index_N)
    source, column, score_index, target, scatter_index = host.to(input_ids.device, non_blocking=True).split(
        [tokens, tokens, scored, scored, scored]
    )
    flat_ids = input_ids.reshape(-1)
    return PackedLayout(
        input_ids=flat_ids[source].unsqueeze(0),
        position_ids=column.unsqueeze(0),
        score_index_N=score_index,
        score_targets_N=flat_ids[target],
        scatter_index_N=scatter_index,
        multiplicity_1T=torch.from_numpy(weight_S[segment_T]).to(input_ids.device, torch.float32).unsqueeze(0),
        starts=starts,
        lengths=length_S,
        num_singles=num_singles,
        num_families=len(children_per_family),
        children_per_family=children_per_family,
        completion_shape=(rows, logits_to_keep),
        tokens=tokens,
        stock_tokens=rows * width,
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
