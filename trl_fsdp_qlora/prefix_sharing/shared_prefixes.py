"""Which beginnings several passes share, and the forest of a pass in which they are segments.

A call that runs in one pass needs nothing of this file: there `forest.py` finds what its rows share.

A beginning that several passes need is a [`SharedPrefix`]; `passes.py` computes it in a forward of its own. A token
that predicts a label belongs to the pass that scores the label. So a shared beginning ends one token before the first
label of its rows.

Suffixes of shapes: B rows of a step or of a pass, L tokens of a row, T tokens of the packed row, S segments.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .batch import Sequences, from_column
from .forest import Forest, Node, choose_nodes, parents_first, prefix_nodes, segments_of, sorted_rows


@dataclass
class SharedPrefix:
    """A beginning that rows of several passes share.

    Attributes:
        depth: number of its tokens, those of its parent included.
        rows: the rows of the step that begin with it, in any order.
        parent: index of the longest kept beginning that it continues; -1 for none.
        first, last: the first and the last pass that need it.
        offset: the offset from which positions are counted, see [`forest.Forest`].
    """

    depth: int
    rows: np.ndarray
    parent: int
    first: int
    last: int
    offset: int


def shared_prefixes(
    sequences: Sequences, pass_B: np.ndarray, min_saved: int, min_length: int = 1
) -> list[SharedPrefix]:
    """Returns the beginnings that are worth a trunk, parents before their children.

    Args:
        sequences: the rows of an optimizer step.
        pass_B: the pass that scores each row.
        min_saved: number of tokens that a beginning has to save over all passes.
        min_length: length of the shortest segment that others may continue.
    """
    needed_B = sequences.needed_B
    has_label_B = sequences.scored_BL.any(1)
    first_label_B = np.where(has_label_B, sequences.scored_BL.argmax(1), needed_B)
    # Each pass computes the token that predicts its first label.
    before_labels_B = np.minimum(first_label_B - 1, needed_B)
    lengths_B = np.maximum(before_labels_B, 0)
    if not lengths_B.any():
        return []
    rows, common = sorted_rows(sequences.tokens_BL, lengths_B, sequences.spans_B2)
    nodes = choose_nodes(prefix_nodes(common), lengths_B[rows], min_length)
    kept: list[SharedPrefix] = []
    path: list[int] = []  # indices of the kept nodes that contain the current one
    last_row: list[int] = []  # of each kept node, in the sorted order
    for node in sorted(nodes, key=parents_first):
        while path and last_row[path[-1]] < node.first:
            path.pop()
        rows_of_node = rows[node.first : node.last + 1]
        passes = np.unique(pass_B[rows_of_node])
        parent = -1
        length = node.depth
        offset = int(sequences.offsets_B[rows_of_node[0]])
        if path:
            parent = path[-1]
            length -= kept[parent].depth
            offset = kept[parent].offset
        saved = (len(passes) - 1) * length
        if saved < min_saved or length < min_length:
            continue
        prefix = SharedPrefix(
            depth=node.depth,
            rows=rows_of_node,
            parent=parent,
            first=int(passes[0]),
            last=int(passes[-1]),
            offset=offset,
        )
        path.append(len(kept))
        kept.append(prefix)
        last_row.append(node.last)
    return kept


def build_pass_forest(
    sequences: Sequences,
    kept: list[SharedPrefix],
    rows: np.ndarray,
    build_forest: Callable[[Sequences], Forest],
    min_length: int,
) -> tuple[Forest, dict[int, int]]:
    """Returns the forest of all segments of some rows of the step, including those that other passes compute.

    Tokens that rows share behind the same kept beginning are computed once, as in any pass.

    Args:
        sequences: all rows of the step.
        kept: its kept beginnings, as segments of the forest.
        rows: the rows of the pass.
        build_forest: returns the forest of rows that share nothing with other passes.
        min_length: length of the shortest segment that others may continue.

    Returns:
        The forest, and the segment of each kept node with which rows of the pass begin.
    """
    subset = sequences.rows(rows)
    needed_B = subset.needed_B
    rows_of_node = _rows_of_nodes(kept, rows) if needed_B.any() else {}
    if not rows_of_node:
        return build_forest(subset), {}
    # Parents come first, so the longest of a row's kept beginnings is its last one.
    node_B = np.full(len(rows), -1)
    depth_B = np.zeros(len(rows), dtype=int)
    for node, rows_with_it in rows_of_node.items():
        node_B[rows_with_it] = node
        depth_B[rows_with_it] = kept[node].depth
    order, common = _tails_sorted(subset, needed_B, node_B, depth_B)
    lengths = needed_B[order]
    depths = depth_B[order]
    nodes = []
    for tail in choose_nodes(prefix_nodes(common), lengths - depths, min_length):
        depth_of_tail = int(depths[tail.first])
        nodes.append(tail._replace(depth=depth_of_tail + tail.depth))
    rank_in_order = np.full(len(rows), -1)
    rank_in_order[order] = np.arange(len(order))
    for node, rows_with_it in rows_of_node.items():
        ranks = rank_in_order[rows_with_it]
        first = int(ranks.min())
        last = int(ranks.max())
        nodes.append(Node(kept[node].depth, first, last))
    forest = segments_of(order, lengths, nodes, subset.tokens_BL.shape)

    segment_T = np.repeat(np.arange(forest.segments), forest.lengths)
    root_row_S = forest.source[forest.trees]
    offset_S = subset.offsets_B[root_row_S]
    segment_of: dict[int, int] = {}
    for node, rows_with_it in rows_of_node.items():
        last_token = kept[node].depth - 1
        index_in_row = forest.index_BL[rows_with_it[0], last_token]
        segment = int(segment_T[index_in_row])
        segment_of[node] = segment
        is_in_tree = forest.trees == forest.trees[segment]
        offset_S[is_in_tree] = kept[node].offset
    return replace(forest, offset_S=offset_S), segment_of


def _rows_of_nodes(kept: list[SharedPrefix], rows: np.ndarray) -> dict[int, list[int]]:
    """Returns for each kept node with which rows of a pass begin the indices of these rows in the pass."""
    index_in_pass = {row: index for index, row in enumerate(rows.tolist())}
    rows_of_node: dict[int, list[int]] = {}
    for number, node in enumerate(kept):
        for row in node.rows.tolist():
            if row in index_in_pass:
                rows_of_node.setdefault(number, []).append(index_in_pass[row])
    return rows_of_node


def _tails_sorted(
    sequences: Sequences, needed_B: np.ndarray, node_B: np.ndarray, depth_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sort the rows that have tokens by their kept beginning and the tokens behind it.

    Args:
        sequences: the rows of a pass.
        needed_B: number of tokens of each row that have to be computed.
        node_B, depth_B: the longest kept beginning of each row, -1 for none, and the number of its tokens.

    Returns:
        The order, and the number of tokens behind the kept beginning that each row shares with the row before it.
    """
    tails_BL = from_column(sequences.tokens_BL, depth_B)
    # A number before the tail distinguishes the kept beginnings. All indices are larger by one behind it.
    mark_B1 = node_B[:, None].astype(tails_BL.dtype)
    marked_BL = np.concatenate([mark_B1, tails_BL], axis=1)
    tail_B = needed_B - depth_B
    lengths_B = np.where(needed_B > 0, 1 + tail_B, 0)
    spans_B2 = None
    if sequences.spans_B2 is not None:
        spans_B2 = sequences.spans_B2 - depth_B[:, None] + 1
        ends_before_tail_B = spans_B2[:, 1] < 1
        spans_B2[ends_before_tail_B] = (0, -1)
    order, common = sorted_rows(marked_BL, lengths_B, spans_B2)
    common_tokens = np.maximum(common - 1, 0)
    with_row_before = np.array([0, *common_tokens.tolist()])
    # In the order of the kept beginnings, those that continue one another are neighbours.
    by_node = np.argsort(node_B[order], kind="stable")
    return order[by_node], with_row_before[by_node][1:]
