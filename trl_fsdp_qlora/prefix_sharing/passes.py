"""Compute beginnings that several passes share once, with their gradient: a prompt whose group is cut in two.

A packed pass computes a beginning once for its own rows. The rows of an optimizer step may not fit into one pass (one
completion in each micro-batch, a group larger than memory). Then a forward of its own, a *trunk*, computes their
beginning. Every layer *keeps* the trunk's values that later tokens need: keys and values, or the final states of a
recurrent layer (`prefix_cache.py`).

    trunk:   [ prompt ]                       graph of the prompt, kept
    pass 0:  [ completion 0 | completion 1 ]  attends to the prompt's keys and values as constants
    pass 1:  [ completion 2 | completion 3 ]  the last pass: attends to them as part of the graph

The trunk's backward runs once, inside the backward of the last pass. Weights do not change between the passes, so the
result is that of one pass over all rows, up to the order of sums.

A token that predicts a label belongs to the pass that scores the label. So a trunk ends one token before the first
label of its rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from .batch import Sequences
from .forest import Forest, Node, choose_nodes, prefix_nodes, segments_of, sort_by_prefix, sorted_rows
from .prefix_cache import CacheView, GradAccumulator, PrefixCache, Trunk, backward_collected

# A trunk costs a forward of its own, so a beginning has to save at least this many tokens over all passes.
MIN_SAVED_TOKENS = 64


# --- which beginnings are kept ---------------------------------------------------------------------------------------


@dataclass
class SharedPrefix:
    """A beginning that rows of several passes share.

    Attributes:
        depth: number of its tokens, those of its parent included.
        rows: the rows of the step that begin with it, in any order.
        parent: index of the longest kept beginning that it goes on from; -1 for none.
        first, last: the first and the last pass that need it.
        offset: the offset from which positions are counted, see [`forest.Forest`].
    """

    depth: int
    rows: np.ndarray
    parent: int
    first: int
    last: int
    offset: int


def shared_prefixes(sequences: Sequences, pass_B: np.ndarray, min_length: int = 1) -> list[SharedPrefix]:
    """Returns the beginnings that are worth a trunk, parents before their children.

    Args:
        sequences: the rows of an optimizer step.
        pass_B: the pass that scores each row.
        min_length: length of the shortest segment that others may go on from.
    """
    needed_B = sequences.needed_B
    first_label_B = np.where(sequences.scored_BL.any(1), sequences.scored_BL.argmax(1), needed_B)
    # Each pass computes the token that predicts its first label.
    lengths_B = np.maximum(np.minimum(first_label_B - 1, needed_B), 0)
    if not lengths_B.any():
        return []
    rows, common = sorted_rows(sequences.tokens_BL, lengths_B, sequences.spans_B2)
    nodes = choose_nodes(prefix_nodes(common), lengths_B[rows], min_length)
    kept: list[SharedPrefix] = []
    path: list[int] = []  # indices of the kept nodes that contain the current one
    last_row: list[int] = []  # of each kept node, in the sorted order
    for node in sorted(nodes, key=lambda node: (node.first, -node.last, node.depth)):
        while path and last_row[path[-1]] < node.first:
            path.pop()
        parent = path[-1] if path else -1
        length = node.depth - (kept[parent].depth if path else 0)
        rows_of_node = rows[node.first : node.last + 1]
        passes = np.unique(pass_B[rows_of_node])
        if (len(passes) - 1) * length < MIN_SAVED_TOKENS or length < min_length:
            continue
        offset = kept[parent].offset if path else int(sequences.offsets_B[rows_of_node[0]])
        kept.append(SharedPrefix(node.depth, rows_of_node, parent, int(passes[0]), int(passes[-1]), offset))
        last_row.append(node.last)
        path.append(len(kept) - 1)
    return kept


@dataclass
class PassForest:
    """All segments of one pass's rows, including those that other passes compute.

    Attributes:
        forest: the forest of the pass's rows.
        segment_of: the segment of each kept node with which rows of the pass begin.
        offset_S: see [`forest.Forest`].
    """

    forest: Forest
    segment_of: dict[int, int]
    offset_S: np.ndarray

    def of_trunk(self, nodes: list[int]) -> tuple[Forest, list[int]]:
        """Returns the forest of the forward that computes some kept nodes, and the node of each kept segment in it."""
        return self._part(np.sort([self.segment_of[node] for node in nodes]))

    def of_pass(self) -> tuple[Forest, list[int]]:
        """Returns the forest of the forward that computes all else, and the node of each kept segment in it."""
        return self._part(np.setdiff1d(np.arange(self.forest.segments), list(self.segment_of.values())))

    def _part(self, segments: np.ndarray) -> tuple[Forest, list[int]]:
        rows = np.arange(len(self.forest.index_BL))
        forest, kept = self.forest.part(segments.astype(int), rows, self.offset_S)
        node_of = {segment: node for node, segment in self.segment_of.items()}
        return forest, [node_of[segment] for segment in kept]


def build_pass_forest(
    sequences: Sequences, kept: list[SharedPrefix], rows: np.ndarray, min_length: int = 1
) -> PassForest:
    """Returns the forest of some rows of the step (`sequences` has all rows), with kept beginnings as segments.

    Tokens that rows share behind the same kept beginning are computed once, as in any pass.
    """
    subset = sequences.rows(rows)
    needed_B = subset.needed_B
    if not needed_B.any():
        # One token is computed, so that the graph contains the model and this rank reaches the model's collectives.
        needed_B = (np.arange(len(rows)) == 0).astype(int)
        kept = []
    rows_of_node = _rows_of_nodes(kept, rows)
    # Parents come first, so the longest of a row's kept beginnings is its last one.
    node_B = np.full(len(rows), -1)
    depth_B = np.zeros(len(rows), dtype=int)
    for node, rows_with_it in rows_of_node.items():
        node_B[rows_with_it] = node
        depth_B[rows_with_it] = kept[node].depth
    order, common = _tails_sorted(subset, needed_B, node_B, depth_B)
    tails = needed_B[order] - depth_B[order]
    nodes = [
        tail._replace(depth=tail.depth + int(depth_B[order[tail.first]]))
        for tail in choose_nodes(prefix_nodes(common), tails, min_length)
    ]
    rank_in_order = np.full(len(rows), -1)
    rank_in_order[order] = np.arange(len(order))
    for node, rows_with_it in rows_of_node.items():
        ranks = rank_in_order[rows_with_it]
        nodes.append(Node(kept[node].depth, int(ranks.min()), int(ranks.max())))
    forest = segments_of(order, needed_B[order], nodes, subset.tokens_BL.shape)

    segment_T = np.repeat(np.arange(forest.segments), forest.lengths)
    offset_S = subset.offsets_B[forest.source[forest.trees]]
    segment_of: dict[int, int] = {}
    for node, rows_with_it in rows_of_node.items():
        segment = int(segment_T[forest.index_BL[rows_with_it[0], kept[node].depth - 1]])
        segment_of[node] = segment
        offset_S[forest.trees == forest.trees[segment]] = kept[node].offset
    return PassForest(forest, segment_of, offset_S)


def _rows_of_nodes(kept: list[SharedPrefix], rows: np.ndarray) -> dict[int, list[int]]:
    """Returns for each kept node with which rows of a pass begin the indices of these rows in the pass."""
    index_in_pass = {row: index for index, row in enumerate(rows.tolist())}
    rows_of_node = {}
    for number, node in enumerate(kept):
        rows_with_it = [index_in_pass[row] for row in node.rows.tolist() if row in index_in_pass]
        if rows_with_it:
            rows_of_node[number] = rows_with_it
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
    width = sequences.tokens_BL.shape[1]
    columns = np.minimum(np.arange(width) + depth_B[:, None], width - 1)
    tails_BL = np.take_along_axis(sequences.tokens_BL, columns, axis=1)
    # A number in front of the tail distinguishes the kept beginnings.
    marked = np.concatenate([node_B[:, None].astype(sequences.tokens_BL.dtype), tails_BL], axis=1)
    lengths_B = np.where(needed_B > 0, needed_B - depth_B + 1, 0)
    spans_B2 = None
    if sequences.spans_B2 is not None:
        spans_B2 = sequences.spans_B2 - depth_B[:, None] + 1
        spans_B2[spans_B2[:, 1] < 1] = (0, -1)
    order, common = sorted_rows(marked, lengths_B, spans_B2)
    common = np.concatenate([[0], np.maximum(common - 1, 0)])
    # In the order of the kept beginnings, those that go on from one another are neighbours.
    by_node = np.argsort(node_B[order], kind="stable")
    return order[by_node], common[by_node][1:]


def cut_rows(sequences: Sequences, tokens_per_pass: int, tokens_of: Callable[[np.ndarray], int]) -> list[np.ndarray]:
    """Cut rows, at borders between rows that share few tokens, into sets whose packed tokens stay within a limit.

    A row that is longer than the limit has a set of its own. Rows without a label are in the first set.

    Args:
        sequences: the rows.
        tokens_per_pass: the limit.
        tokens_of: returns the number of tokens of the packed row of some rows.
    """
    needed_B = sequences.needed_B
    labelled = np.flatnonzero(needed_B)
    if not len(labelled):
        return [np.arange(len(needed_B))]
    order, common = sort_by_prefix(sequences.tokens_BL[labelled], needed_B[labelled])
    rows = labelled[order]
    common = np.concatenate([[0], common])
    added = needed_B[rows] - common  # tokens of a row that the row before it does not share
    cuts = []
    first = 0
    while first < len(rows):
        # As many rows as fit if every equal beginning is computed once, ...
        used = needed_B[rows[first]] + np.cumsum(added[first + 1 :])
        last = first + 1 + int(np.searchsorted(used, tokens_per_pass, side="right"))
        # ... without the rows that do not fit in fact, because not every level is used.
        while last > first + 1 and tokens_of(rows[first:last]) > tokens_per_pass:
            last -= 1
        if last < len(rows):
            # Of the borders in the second half of a set, the latest one at which rows share the fewest tokens.
            half = first + 1 + (last - first) // 2
            last = max(range(half, last + 1), key=lambda border: (-common[border], border))
        cuts.append(rows[first:last])
        first = last
    cuts[0] = np.concatenate([np.flatnonzero(needed_B == 0), cuts[0]])
    return cuts


# --- the forwards of an optimizer step -------------------------------------------------------------------------------


class Forward:
    """One call of the model, with a given forest in place of the one that would be found in the batch.

    It is not a dataclass: FSDP2 and DDP look for tensors in dataclasses among a forward's arguments, and take these
    tensors for inputs of the forward.

    Attributes:
        sequences: the rows of the call; a trunk scores none.
        forest: see [`forest.Forest.part`].
        view: the values that layers keep or use.
        is_first: whether it is the first of the forwards whose tokens are counted together.
        batches: number of batches whose rows it has.
    """

    def __init__(self, sequences: Sequences, forest: Forest, view: CacheView, is_first: bool, batches: int = 1):
        self.sequences = sequences
        self.forest = forest
        self.view = view
        self.is_first = is_first
        self.batches = batches


class PassSchedule:
    """The forwards of an optimizer step (or of a set of passes without gradients), pass by pass.

    Args:
        sequences: all rows of the step.
        rows_of_pass: the rows that each pass scores.
        min_length: length of the shortest segment that others may go on from.
        max_over_ranks: returns the element-wise maximum of a list of numbers over ranks.
        ties_ends: whether every layer of a trunk has to be part of the backward, because each layer is collective.
        batches_per_pass: number of batches whose rows a pass has; 1 if it has a part of a batch.
    """

    def __init__(
        self,
        sequences: Sequences,
        rows_of_pass: list[np.ndarray],
        min_length: int,
        max_over_ranks: Callable[[list[int]], list[int]],
        ties_ends: bool = False,
        batches_per_pass: int = 1,
    ):
        self.sequences = sequences
        self.rows_of_pass = rows_of_pass
        self.min_length = min_length
        pass_B = np.zeros(len(sequences.lengths_B), dtype=int)
        for number, rows in enumerate(rows_of_pass):
            pass_B[rows] = number
        self.kept = shared_prefixes(sequences, pass_B, min_length)
        self.cache = PrefixCache()
        self.ties_ends = ties_ends
        self.batches_per_pass = batches_per_pass
        # The scores that a trunk's forward returned, by its first and last pass, if each of its layers is collective.
        self.trunk_outputs: dict[Trunk, torch.Tensor] = {}
        self._forests: dict[int, PassForest] = {}  # by pass, because planning and running use the same forests
        # Forwards are collective, so each rank runs the trunks of all ranks. A trunk lives from the first pass that
        # needs it to the last one.
        count = len(rows_of_pass)
        needed = np.zeros((count, count), dtype=int)
        for node in self.kept:
            needed[node.first, node.last] = 1
        self.trunks = np.array(max_over_ranks(needed.ravel().tolist())).reshape(count, count) > 0

    @property
    def is_shared(self) -> bool:
        """Whether any rank keeps anything."""
        return bool(self.trunks.any())

    @property
    def count(self) -> int:
        """Number of calls of the model, trunks included."""
        return len(self.rows_of_pass) + int(self.trunks.sum())

    @property
    def tokens(self) -> int:
        """Number of tokens that this rank computes in all passes and trunks."""
        tokens = sum(self._length(node) for node in self.kept)
        for number in range(len(self.rows_of_pass)):
            tokens += self._forest_of(number).of_pass()[0].tokens
        return tokens

    def _forest_of(self, number: int) -> PassForest:
        """Returns the forest of a pass's rows, which is grown once."""
        if number not in self._forests:
            rows = self.rows_of_pass[number]
            self._forests[number] = build_pass_forest(self.sequences, self.kept, rows, self.min_length)
        return self._forests[number]

    def _length(self, node: SharedPrefix) -> int:
        """Returns the number of tokens of a kept beginning that its parent does not have."""
        return node.depth - (self.kept[node.parent].depth if node.parent >= 0 else 0)

    def fits(self, limit: int) -> bool:
        """Whether no pass, together with the trunks that are alive then, has more tokens with a graph than `limit`."""
        for number in range(len(self.rows_of_pass)):
            tokens = self._forest_of(number).of_pass()[0].tokens
            for node in self.kept:
                if node.first <= number <= node.last:
                    tokens += self._length(node)
            if tokens > limit:
                return False
        return True

    def of_pass(self, number: int, is_first: bool = True) -> Iterator[Forward]:
        """Yields the trunks that no earlier pass needs, the longest-lived first, and then the pass itself.

        Args:
            number: of the pass.
            is_first: whether it is the first of the passes whose tokens are counted together.
        """
        self.cache.drop(*self._ended_before(number))
        for last in reversed(np.flatnonzero(self.trunks[number]).tolist()):
            yield self._trunk(number, last, is_first)
            is_first = False
        forest, used_nodes = self._forest_of(number).of_pass()
        first_passes = np.flatnonzero(self.trunks[:, number]).tolist()
        for first in first_passes:
            # The backward of this pass begins the trunk's, so `finish` must not.
            self.trunk_outputs.pop((first, number), None)
        view = CacheView(
            self.cache,
            used=used_nodes,
            ending=self._ending_in(number),
            ending_trunks=tuple((first, number) for first in first_passes),
        )
        sequences = self.sequences.rows(self.rows_of_pass[number])
        yield Forward(sequences, forest, view, is_first, self.batches_per_pass)

    def _trunk(self, first: int, last: int, is_first: bool) -> Forward:
        """Returns the trunk of the nodes that are needed from pass `first` to pass `last`."""
        rows = self.rows_of_pass[first]
        unscored = self.sequences.rows(rows)
        unscored.scored_BL = np.zeros_like(unscored.scored_BL)
        nodes = [n for n, node in enumerate(self.kept) if (node.first, node.last) == (first, last)]
        computed_nodes = []
        used_nodes = []
        if nodes:
            pass_forest = self._forest_of(first)
            forest, used_nodes = pass_forest.of_trunk(nodes)
            # The trunk's own segments come first, in the order of the pass's forest.
            for segment, node in enumerate(sorted(nodes, key=pass_forest.segment_of.__getitem__)):
                computed_nodes.append((node, int(forest.starts[segment]), int(forest.lengths[segment])))
        else:  # another rank's trunk: this rank computes one token
            nothing = replace(unscored, needs_all=False)
            forest, _ = build_pass_forest(nothing, [], np.arange(len(rows)), self.min_length).of_pass()
        view = CacheView(
            self.cache,
            computed=computed_nodes,
            used=used_nodes,
            ending=self._ending_in(last),
            trunk=(first, last) if self.ties_ends else None,
            is_trunk=True,
        )
        return Forward(unscored, forest, view, is_first)

    def finish(self) -> None:
        """End the step: run the backward of trunks whose last pass did not run, and free all kept values."""
        trunks = [tuple(trunk) for trunk in np.argwhere(self.trunks).tolist()]
        # A trunk goes on from trunks that live longer, so its backward comes before theirs.
        for trunk in sorted(trunks, key=lambda trunk: (-trunk[0], trunk[1])):
            values = []
            for number, prefix in enumerate(self.kept):
                if (prefix.first, prefix.last) == trunk:
                    values += [(kept.value, kept.collected) for kept in self.cache.of(number)]
            if trunk in self.trunk_outputs:
                # Its backward begins at the output, where the model's hooks gather sharded weights.
                output = self.trunk_outputs[trunk]
                nothing = GradAccumulator()
                nothing.add(torch.zeros_like(output))
                values.append((output, nothing))
            backward_collected(values)
        self.cache.clear()
        self.trunk_outputs.clear()

    def _ending_in(self, number: int) -> frozenset:
        return frozenset(n for n, node in enumerate(self.kept) if node.last == number)

    def _ended_before(self, number: int) -> tuple[set[int], set[Trunk]]:
        """Returns the prefixes, and the trunks, that only passes before `number` need."""
        prefixes = {n for n, prefix in enumerate(self.kept) if prefix.last < number}
        trunks = {(first, last) for first, last in np.argwhere(self.trunks).tolist() if last < number}
        return prefixes, trunks


@dataclass(eq=False)
class StepPlan:
    """The passes that compute batches that are scored with the same weights.

    Attributes:
        forwards: the forwards with gradients.
        values: the forwards without gradients, if a batch is cut into several passes: a loss needs all of its values
            before there is a gradient.
        batches_per_pass, passes_per_batch: one of the two is 1.
        router_loss: makes router losses from the sums that the forwards return as `aux_loss`, see
            [`router_loss.router_sums`]; `None` if the loss has none.
    """

    forwards: PassSchedule
    values: PassSchedule | None
    batches_per_pass: int
    passes_per_batch: int
    router_loss: Callable[[torch.Tensor], torch.Tensor] | None = None
