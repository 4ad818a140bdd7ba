"""Equal beginnings of token sequences, at any depth: a forest of segments.

Each row of a batch is a sequence of tokens. If rows are sorted by their tokens, rows that begin alike are neighbours,
and the length of the longest common prefix (LCP) of each row with the row before it describes the whole prefix tree.
Every node of that tree at which rows part *could* be computed once for all of them. [`choose_nodes`] takes the nodes
that save enough tokens.

A *segment* is a run of tokens `[depth, depth + length)` that a set of rows shares and that is computed once. A segment
attends to itself, causally, and to all of its ancestors. The packed row has the segments in *stretches*, first those
of inner segments, then those of leaves, one for each level:

    [ inner, level 0 | inner, level 1 | … | leaves, level 0 | leaves, level 1 | … ]

A segment's level is the number of its ancestors. An inner segment has descendants, a leaf has none. Inside a stretch,
segments with a common ancestor are neighbours, in the order of the ancestors in the row. So in each stretch
at most one run of tokens attends to an ancestor, and the tokens that attend to it are a few such runs
([`Forest.queries`]).

Suffixes of shapes: B rows of a batch, L tokens of a row, T tokens of the packed row, S segments.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

# A level beyond the first is used if it saves at least this number of tokens ...
MIN_SAVED_BY_LEVEL = 8
# ... plus this fraction of the tokens that are computed below it, which attend to the level in a call of their own.
MIN_SAVED_FRACTION = 0.02


class Node(NamedTuple):
    """Sorted rows `[first, last]` share their first `depth` tokens; not all of them share more."""

    depth: int
    first: int
    last: int

    @property
    def rows(self) -> int:
        return self.last - self.first + 1


def parents_first(node: Node) -> tuple[int, int, int]:
    """The key by which nodes of one prefix tree are sorted so that a node comes before the nodes inside it."""
    return node.first, -node.last, node.depth


@dataclass
class Forest:
    """Segments in the order of the packed row.

    Attributes:
        starts, lengths: index of the segment's first token in the row, and number of its tokens.
        depths: number of tokens that come before a segment in its sequences.
        parents: index of the parent segment; -1 for none.
        levels: number of ancestors.
        is_leaf: whether no other segment attends to it.
        source: a row of the batch that holds the segment's tokens.
        trees: index of the root segment.
        index_BL: the index in the packed row at which token t of row b is computed; -1 if it is not. Tokens are
            counted from the first real token of a row.
        kept: number of segments, at the end of the list, that an earlier pass computed. They are not part of the
            packed row. Their keys and values follow those of the row, so their indices come after the row's last
            token.
        offset_S: the offset from which the positions of each segment's tree are counted; `None` if the offsets of the
            batch's rows apply.
        filling: number of tokens at the end of the last segment that fill the row up, see [`Forest.lengthened`].
    """

    starts: np.ndarray
    lengths: np.ndarray
    depths: np.ndarray
    parents: np.ndarray
    levels: np.ndarray
    is_leaf: np.ndarray
    source: np.ndarray
    trees: np.ndarray
    index_BL: np.ndarray
    kept: int = 0
    offset_S: np.ndarray | None = None
    filling: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens of the packed row."""
        return int(self.lengths[: self.computed].sum())

    @property
    def segments(self) -> int:
        return len(self.lengths)

    @property
    def computed(self) -> int:
        """Number of segments of the packed row; the other segments are kept."""
        return self.segments - self.kept

    def stretches(self) -> list[slice]:
        """Returns the runs of neighbouring segments that are all inner ones, or all leaves, of one level."""
        is_leaf = self.is_leaf[: self.computed]
        levels = self.levels[: self.computed]
        leaf_changes = is_leaf[1:] != is_leaf[:-1]
        level_changes = levels[1:] != levels[:-1]
        return runs_between(leaf_changes | level_changes)

    def descendants(self) -> list[dict[int, np.ndarray]]:
        """Returns for each level the computed segments below each of its segments, by that segment, both in order."""
        ancestor_S = np.arange(self.segments)  # each segment's ancestor at the level, or itself if it is not below it
        by_level = []
        for level in reversed(range(int(self.levels.max(initial=0)))):
            ancestor_S = np.where(self.levels[ancestor_S] > level, self.parents[ancestor_S], ancestor_S)
            below = np.flatnonzero(self.levels[: self.computed] > level)
            by_ancestor = np.argsort(ancestor_S[below], kind="stable")
            below = below[by_ancestor]
            ancestors, firsts = np.unique(ancestor_S[below], return_index=True)
            groups = np.split(below, firsts[1:])
            descendants = dict(zip(ancestors.tolist(), groups, strict=True))
            by_level.append(descendants)
        by_level.reverse()
        return by_level

    def queries(self) -> list[dict[int, np.ndarray]]:
        """Returns for each level of ancestors that has any the tokens that attend to each of them, both in order.

        The tokens are indices in the row, in a few runs of neighbours.
        """
        ends = self.starts + self.lengths
        levels = []
        for level in self.descendants():
            queries = {}
            for ancestor, segments in level.items():
                runs = []
                for segment in segments.tolist():
                    runs.append(np.arange(self.starts[segment], ends[segment]))
                queries[ancestor] = np.concatenate(runs)
            if queries:
                levels.append(queries)
        return levels

    def path(self, segment: int) -> list[int]:
        """Returns a segment's ancestors, outermost first."""
        path = []
        ancestor = int(self.parents[segment])
        while ancestor >= 0:
            path.append(ancestor)
            ancestor = int(self.parents[ancestor])
        path.reverse()
        return path

    def part(self, segments: np.ndarray) -> tuple["Forest", list[int]]:
        """Returns the forest of a pass over the same rows that computes only some segments, in increasing order.

        The ancestors of these segments are kept from earlier passes. The indices that the kept segments have in this
        forest are returned, too.
        """
        computed = segments.tolist()
        ancestors: set[int] = set()
        for segment in computed:
            ancestors.update(self.path(segment))
        kept = sorted(ancestors.difference(computed))
        order = np.array([*computed, *kept], dtype=int)
        # By segment of this forest: the segment of the pass, -1 for none.
        segment_of_pass = np.full(self.segments, -1)
        segment_of_pass[order] = np.arange(len(order))
        lengths = self.lengths[order]
        starts = np.cumsum(lengths) - lengths
        parents = self.parents[order]

        index_BL = self.index_BL.copy()
        row, column = (index_BL >= 0).nonzero()
        index = index_BL[row, column]
        old_segment = np.repeat(np.arange(self.segments), self.lengths)[index]
        index_in_segment = index - self.starts[old_segment]
        segment = segment_of_pass[old_segment]
        is_needed = segment >= 0
        index_of_pass = starts[segment] + index_in_segment
        index_BL[row, column] = np.where(is_needed, index_of_pass, -1)
        source = np.zeros(len(order), dtype=int)
        needed_segment = segment[is_needed]
        needed_row = row[is_needed]
        # Backwards, so that the first row that holds a segment is its source.
        source[needed_segment[::-1]] = needed_row[::-1]
        offset_S = None
        if self.offset_S is not None:
            offset_S = self.offset_S[order]
        forest = Forest(
            starts=starts,
            lengths=lengths,
            depths=self.depths[order],
            parents=np.where(parents >= 0, segment_of_pass[parents], -1),
            levels=self.levels[order],
            is_leaf=self.is_leaf[order],
            source=source,
            trees=segment_of_pass[self.trees[order]],
            index_BL=index_BL,
            kept=len(kept),
            offset_S=offset_S,
        )
        return forest, kept

    def lengthened(self, tokens: int) -> "Forest":
        """Returns the forest with `tokens` more tokens at the end of the last segment, which has to be a leaf.

        The new tokens are in no row, and no other token attends to them.
        """
        starts = self.starts.copy()
        lengths = self.lengths.copy()
        lengths[self.computed - 1] += tokens
        starts[self.computed :] += tokens
        index_BL = self.index_BL.copy()
        is_kept_BL = index_BL >= self.tokens
        index_BL[is_kept_BL] += tokens
        return replace(self, starts=starts, lengths=lengths, index_BL=index_BL, filling=tokens)


def runs_between(changes: np.ndarray) -> list[slice]:
    """Returns the runs of equal neighbours in a list; `changes[i]`: whether entry i + 1 differs from entry i."""
    borders = 1 + np.flatnonzero(changes)
    edges = [0, *borders.tolist(), len(changes) + 1]
    return [slice(first, last) for first, last in itertools.pairwise(edges)]


def sort_by_prefix(tokens_BL: np.ndarray, lengths_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns an order of rows in which equal prefixes are neighbours, and the LCP of each row with the one before.

    Args:
        tokens_BL: numbers that are equal if and only if tokens are. Numbers behind the end of a row do not matter.
        lengths_B: number of tokens of each row.

    Returns:
        `(order, common)`, `(B,)` and `(B - 1,)`.
    """
    width = tokens_BL.shape[1]
    is_behind_BL = np.arange(width) >= lengths_B[:, None]
    # A number that no token has separates a row that ends from rows that continue.
    end = np.iinfo(tokens_BL.dtype).min
    tokens_BL = np.where(is_behind_BL, end, tokens_BL)
    # Any order of whole tokens will do. The order of their bytes is one.
    keys = [row.tobytes() for row in tokens_BL]
    rows = sorted(range(len(keys)), key=keys.__getitem__)
    order = np.array(rows, dtype=int)
    tokens_BL = tokens_BL[order]
    lengths_B = lengths_B[order]
    # Each row but the first is compared with the row before it.
    differs_BL = tokens_BL[1:] != tokens_BL[:-1]
    first_difference_B = np.where(differs_BL.any(1), differs_BL.argmax(1), width)
    shorter_B = np.minimum(lengths_B[1:], lengths_B[:-1])
    common_B = np.minimum(first_difference_B, shorter_B)
    return order, common_B.astype(int)


def sorted_rows(
    tokens_BL: np.ndarray, lengths_B: np.ndarray, spans_B2: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows that have tokens to compute, sorted by [`sort_by_prefix`], and their common prefixes.

    A common prefix ends before an image that it would cut.
    """
    needed = np.flatnonzero(lengths_B)
    order, common = sort_by_prefix(tokens_BL[needed], lengths_B[needed])
    rows = needed[order]
    if spans_B2 is None:
        return rows, common
    spans = spans_B2[rows]
    for i in range(len(common)):
        for first, last in spans[i : i + 2]:
            cuts_image = first < common[i] <= last
            if cuts_image:
                common[i] = first
    return rows, common


def prefix_nodes(common: np.ndarray) -> list[Node]:
    """Returns every node of a prefix tree at which rows part, from the LCPs of its sorted rows.

    Parents follow their children.
    """
    nodes = []
    open_nodes = []  # (depth, first row), in the order of increasing depth
    depths = [*common.tolist(), 0]  # at the end every node is closed
    for last, depth in enumerate(depths):
        first = last
        while open_nodes and open_nodes[-1][0] > depth:
            closed_depth, first = open_nodes.pop()
            nodes.append(Node(closed_depth, first, last))
        is_new = not open_nodes or open_nodes[-1][0] < depth
        if depth and is_new:
            open_nodes.append((depth, first))
    return nodes


def choose_nodes(nodes: list[Node], lengths: np.ndarray, min_length: int = 1) -> list[Node]:
    """Returns the nodes of a prefix tree that are computed once for their rows.

    One level costs almost nothing: of all choices with at most one node per row, the choice that saves most is taken.
    Each further node makes the tokens below it attend once more. So it has to save [`MIN_SAVED_BY_LEVEL`] plus
    [`MIN_SAVED_FRACTION`] of the tokens below it, each counted once: the turns of an agent repeat their history.

    Args:
        nodes: from [`prefix_nodes`].
        lengths: number of tokens of each sorted row.
        min_length: length of the shortest segment that others may continue.
    """
    children, parents = _links(nodes)
    tokens_below = _tokens_below(nodes, children, lengths)
    chosen = set(_best_single_level(nodes, children, min_length))

    def chosen_above(node: Node) -> Node | None:
        above = parents.get(node)
        while above is not None and above not in chosen:
            above = parents.get(above)
        return above

    def chosen_below(node: Node) -> list[Node]:
        """Returns the chosen nodes below `node` that have no other chosen node between."""
        below = []
        pending = list(children[node])
        while pending:
            child = pending.pop()
            if child in chosen:
                below.append(child)
            else:
                pending += children[child]
        return below

    # Top down, so that a node is compared with the chosen nodes above it.
    for node in reversed(nodes):
        if node in chosen:
            continue
        above = chosen_above(node)
        below = chosen_below(node)
        length = node.depth
        if above is not None:
            length -= above.depth
        lengths_below = [child.depth - node.depth for child in below]
        shortest = min([length, *lengths_below])
        if shortest < min_length:
            continue
        # The segments that would continue the node: one for each chosen node below it, one for each other row.
        segments_below = node.rows
        for child in below:
            segments_below -= child.rows - 1
        saved = (segments_below - 1) * length
        price = MIN_SAVED_BY_LEVEL + MIN_SAVED_FRACTION * tokens_below[node]
        if saved >= price:
            chosen.add(node)
    return [node for node in nodes if node in chosen]


def _links(nodes: list[Node]) -> tuple[dict[Node, list[Node]], dict[Node, Node]]:
    """Returns the children of each node, and the parent of each node that has one, from [`prefix_nodes`]."""
    children: dict[Node, list[Node]] = {node: [] for node in nodes}
    parents: dict[Node, Node] = {}
    waiting: list[Node] = []  # nodes without a parent so far, in row order
    for node in nodes:
        while waiting and waiting[-1].first >= node.first:
            child = waiting.pop()
            children[node].append(child)
            parents[child] = node
        waiting.append(node)
    return children, parents


def _tokens_below(nodes: list[Node], children: dict[Node, list[Node]], lengths: np.ndarray) -> dict[Node, int]:
    """Returns the number of tokens that the rows of each node have behind it, each beginning counted once."""
    total = np.cumsum(lengths)
    tokens_before_row = [0, *total.tolist()]

    def behind(depth: int, rows: Node) -> int:
        """Returns the number of tokens that the rows of a node have behind the first `depth` ones."""
        tokens_of_rows = tokens_before_row[rows.last + 1] - tokens_before_row[rows.first]
        return tokens_of_rows - rows.rows * depth

    tokens: dict[Node, int] = {}
    for node in nodes:  # children before their parents
        tokens[node] = behind(node.depth, node)
        for child in children[node]:
            # In place of the child's rows: its own tokens once, and those below it.
            tokens[node] -= behind(node.depth, child)
            tokens[node] += child.depth - node.depth
            tokens[node] += tokens[child]
    return tokens


def _best_single_level(nodes: list[Node], children: dict[Node, list[Node]], min_length: int) -> list[Node]:
    """Returns the nodes, at most one for each row, that save the most tokens together."""
    # For each subtree the most tokens that it can save, and the nodes that save them.
    best: dict[Node, tuple[int, list[Node]]] = {}
    roots = set(nodes)
    for node in nodes:
        roots.difference_update(children[node])
        saved = 0
        if node.depth >= min_length:
            saved = (node.rows - 1) * node.depth
        saved_below = 0
        chosen_below: list[Node] = []
        for child in children[node]:
            saved_by_child, chosen_by_child = best[child]
            saved_below += saved_by_child
            chosen_below += chosen_by_child
        if saved and saved >= saved_below:
            best[node] = saved, [node]
        else:
            best[node] = saved_below, chosen_below
    chosen: list[Node] = []
    for root in roots:
        _, chosen_in_tree = best[root]
        chosen += chosen_in_tree
    return chosen


def build_forest(
    tokens_BL: np.ndarray,
    lengths_B: np.ndarray,
    spans_B2: np.ndarray | None = None,
    min_length: int = 1,
) -> Forest:
    """Returns the forest of a batch of sequences.

    Args:
        tokens_BL: see [`sort_by_prefix`].
        lengths_B: number of tokens of each row that have to be computed; 0 leaves the row out. At least one row has
            some.
        spans_B2: tokens `[first, last]` of a row that are not separated (those of its images); (0, -1) for none.
        min_length: length of the shortest segment that others may continue.
    """
    rows, common = sorted_rows(tokens_BL, lengths_B, spans_B2)
    lengths = lengths_B[rows]
    nodes = choose_nodes(prefix_nodes(common), lengths, min_length)
    return segments_of(rows, lengths, nodes, tokens_BL.shape)


def segments_of(rows: np.ndarray, lengths: np.ndarray, nodes: list[Node], shape: tuple[int, int]) -> Forest:
    """Returns the forest in which `nodes` are computed once, for sorted `rows` of the batch and their `lengths`."""
    pieces, parent_of_piece = _pieces(lengths, nodes)
    order = _row_order(pieces, parent_of_piece)
    ends, first, last = np.array(pieces, dtype=int)[order].T
    segment_of_piece = np.empty(len(order), dtype=int)
    segment_of_piece[order] = np.arange(len(order))
    parent_piece = parent_of_piece[order]
    has_parent = parent_piece >= 0
    parents = np.where(has_parent, segment_of_piece[parent_piece], -1)
    depths = np.where(has_parent, ends[parents], 0)
    segment_lengths = ends - depths
    segment_ends = np.cumsum(segment_lengths)
    starts = segment_ends - segment_lengths
    levels = np.zeros(len(order), dtype=int)
    trees = np.arange(len(order))
    index_BL = np.full(shape, -1)
    # In the order of the pieces, parents come before their children.
    for segment in segment_of_piece.tolist():
        parent = parents[segment]
        if parent >= 0:
            levels[segment] = levels[parent] + 1
            trees[segment] = trees[parent]
        rows_of_segment = rows[first[segment] : last[segment] + 1]
        columns = slice(depths[segment], ends[segment])
        index_BL[rows_of_segment, columns] = np.arange(starts[segment], segment_ends[segment])
    return Forest(
        starts=starts,
        lengths=segment_lengths,
        depths=depths,
        parents=parents,
        levels=levels,
        is_leaf=_is_leaf(parents),
        source=rows[first],
        trees=trees,
        index_BL=index_BL,
    )


def _pieces(lengths: np.ndarray, nodes: list[Node]) -> tuple[list[Node], np.ndarray]:
    """Returns the segments of sorted rows before their places in the packed row are known.

    Each is given by the node in which it ends. A node of the prefix tree has one, and so have the tokens that a row
    shares with no other.

    Args:
        lengths: number of tokens of each row.
        nodes: those that are computed once.

    Returns:
        The pieces, parents first, and the index of each one's parent; -1 for none.
    """
    pieces: list[Node] = []
    parents: list[int] = []
    path: list[int] = []  # the pieces that contain the current one
    innermost_of_row = np.full(len(lengths), -1)
    for node in sorted(nodes, key=parents_first):
        while path and pieces[path[-1]].last < node.first:
            path.pop()
        parent = path[-1] if path else -1
        parents.append(parent)
        innermost_of_row[node.first : node.last + 1] = len(pieces)
        path.append(len(pieces))
        pieces.append(node)
    for row, length in enumerate(lengths.tolist()):
        parent = int(innermost_of_row[row])
        depth = pieces[parent].depth if parent >= 0 else 0
        if length > depth:
            pieces.append(Node(length, row, row))
            parents.append(parent)
    return pieces, np.array(parents, dtype=int)


def _is_leaf(parents: np.ndarray) -> np.ndarray:
    """Returns which segments are leaves. A node without any segment below it (equal rows) is a leaf, too."""
    segments = np.arange(len(parents))
    return ~np.isin(segments, parents)


def _row_order(pieces: list[Node], parents: np.ndarray) -> np.ndarray:
    """Returns the pieces in the order of the packed row, see the module docstring."""
    is_leaf = _is_leaf(parents)
    # Roots of equal length are neighbours, and so are siblings, so that they can be computed as one batch. At equal
    # length the order of the sorted rows decides.
    path_keys: list[tuple] = []
    for piece, parent in zip(pieces, parents.tolist(), strict=True):  # parents before their children
        key_of_parent = ()
        length = piece.depth
        if parent >= 0:
            key_of_parent = path_keys[parent]
            length -= pieces[parent].depth
        path_keys.append((*key_of_parent, (length, piece.first)))

    def place(piece: int) -> tuple:
        level = len(path_keys[piece])
        return bool(is_leaf[piece]), level, path_keys[piece]

    order = sorted(range(len(pieces)), key=place)
    return np.array(order, dtype=int)
