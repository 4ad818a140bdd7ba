"""A packed row in which completions also share what they have in common behind the prompt.

Sorted by their tokens, completions that begin alike are neighbours, and each one has to add to the row only what goes
beyond the longest common prefix (LCP) with the one before it. Read one after the other these tails are the group's
prefix trie in preorder, so the tokens that may see token k are exactly the stretch [k, end_k) up to the end of its
subtree.
"""

from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """A row of T tokens before it is on the device.

    Attributes:
        row_T, column_T: where in the padded batch a token is copied from.
        weight_T: how many rows of the batch share a token.
        index_BC: place that predicts token t of completion b; any where the row has none.
        pairs: query-key pairs that attention computes.
        starts, lengths, num_singles, children_per_family, end_T: of [`layout.PackedLayout`].
    """

    row_T: np.ndarray
    column_T: np.ndarray
    weight_T: np.ndarray
    index_BC: np.ndarray
    pairs: int
    starts: np.ndarray
    lengths: np.ndarray
    num_singles: int
    children_per_family: np.ndarray
    end_T: np.ndarray | None = None


def groups_of(kept_B: np.ndarray, new_prompt_B: np.ndarray) -> list[np.ndarray]:
    """Those rows of each group that are kept."""
    kept = np.flatnonzero(kept_B)
    return np.split(kept, np.flatnonzero(np.diff(np.cumsum(new_prompt_B)[kept])) + 1)


def sort_by_prefix(ids_GC: np.ndarray, length_G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An order of rows in which equal prefixes are neighbours, and the LCP of each row with the one before.

    Args:
        ids_GC: token ids, -1 behind the end of a row, so that a row that ends parts from those that go on.
        length_G: tokens of each row.

    Returns:
        `(order, common)`, `(G,)` and `(G - 1,)`.
    """
    ids_GC = np.ascontiguousarray(ids_GC, dtype=np.int32)
    # Any order of whole tokens will do; that of their bytes is one.
    order = np.array(sorted(range(len(ids_GC)), key=[row.tobytes() for row in ids_GC].__getitem__), dtype=int)
    ids_GC, length_G = ids_GC[order], length_G[order]
    differs = ids_GC[1:] != ids_GC[:-1]
    common = (
        np.where(differs.any(1), differs.argmax(1), ids_GC.shape[1]) if ids_GC.shape[1] else np.zeros(len(differs))
    )
    return order, np.minimum(common, np.minimum(length_G[1:], length_G[:-1])).astype(int)


def rows_behind_subtree(common: np.ndarray, width: int) -> np.ndarray:
    """`(G, width)`: for row i and depth d, the first later row that has left i's node of depth d; G where none has.

    Args:
        common: LCP of each sorted row with the one before, see [`sort_by_prefix`].
        width: number of depths.
    """
    rows = len(common) + 1
    after = np.full((rows, width), rows)
    after[:-1] = np.where(common[:, None] < np.arange(width), np.arange(1, rows)[:, None], rows)
    return np.minimum.accumulate(after[::-1], axis=0)[::-1]


def nested_row(
    completion_ids_BC: np.ndarray,
    forward_B: np.ndarray,
    prompt_lengths_B: np.ndarray,
    new_prompt_B: np.ndarray,
    prompt_width: int,
) -> Row:
    """Lay out a batch with each prefix of a group once: every group is one single stretch, its prompt, then its trie.

    `forward_B` is how many positions of each completion the forward needs, its prompt's last token included; 0 leaves the
    completion out (not all of them). The others are as in [`layout.BatchFacts`], `prompt_width` columns before completions.
    """
    index_BC = np.full(completion_ids_BC.shape, -1)
    parts, starts, lengths, offset, pairs = [], [], [], 0, 0
    for rows in groups_of(forward_B > 0, new_prompt_B):
        forward, prompt = forward_B[rows], int(prompt_lengths_B[rows[0]])
        # Depth 0 is the prompt's last token, which all have in common; depth d the d-th completion token.
        depths = int(forward.max())
        ids = np.zeros((len(rows), depths), np.int32)
        ids[:, 1:] = completion_ids_BC[rows, : depths - 1]
        ids[np.arange(depths) >= forward[:, None]] = -1
        order, common = sort_by_prefix(ids, forward)
        rows, forward = rows[order], forward[order]
        new = forward - np.concatenate([[0], common])  # tokens that a row adds
        trie = offset + prompt - 1
        tail = trie + np.concatenate([[0], np.cumsum(new)])  # where each row's own tokens begin; the end
        # Node (row, depth), inherited from the row before up to the common depth.
        node = np.zeros((len(rows), depths), int)
        for i, start in enumerate(tail[:-1]):
            shared = int(common[i - 1]) if i else 0
            node[i, :shared] = node[i - 1, :shared]
            node[i, shared : forward[i]] = np.arange(start, start + new[i])
            predicts = min(forward[i], index_BC.shape[1])  # a whole row ends with a token that predicts nothing
            index_BC[rows[i], :predicts] = node[i, :predicts]
        adds = np.arange(depths) < forward[:, None]
        adds[1:] &= np.arange(depths) >= common[:, None]
        row_of, depth_of = adds.nonzero()  # row-major, so in the order of the packed row
        # A node of depth d holds d + 1 tokens: a row with fewer in common has left it.
        end = tail[rows_behind_subtree(common, depths + 1)[row_of, depth_of + 1]]
        length = prompt - 1 + len(row_of)
        used = np.bincount(node[np.arange(depths) < forward[:, None]] - trie, minlength=len(row_of))
        head = np.arange(prompt - 1)  # the prompt but for its last token
        of_head = head * 0 + rows[0], head + prompt_width - prompt, head * 0 + offset + length, head * 0 + len(rows)
        of_trie = rows[row_of], depth_of + prompt_width - 1, end, used
        parts.append([np.concatenate(both) for both in zip(of_head, of_trie, strict=True)])
        starts.append(offset)
        lengths.append(length)
        pairs += length * length
        offset += length
    row_T, column_T, end_T, weight_T = (np.concatenate(part) for part in zip(*parts, strict=True))
    segments = np.array(starts), np.array(lengths), len(starts), np.zeros(0, int)
    return Row(row_T, column_T, weight_T, index_BC, pairs, *segments, end_T)
