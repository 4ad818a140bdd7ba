"""Which forwards compute a call or an optimizer step, and which of them keep values for others.

[`plan_call`] returns the forwards of a call that is cut into parts, [`plan_step`] the [`PassPlan`] of an optimizer
step's micro-batches. [`PlannedForwards`] has the forwards of a plan, and the values that they keep for each other. A
beginning that several passes share is computed once, with its gradient: a prompt whose group is cut in two.

A packed pass computes a beginning once for its own rows. The rows of an optimizer step may not fit into one pass (one
completion in each micro-batch, a group larger than memory). Then a forward of its own, a *trunk*, computes their
beginning. Every layer *keeps* the trunk's values that later tokens need: keys and values, or the final states of a
recurrent layer (`prefix_cache.py`).

    trunk:   [ prompt ]                       graph of the prompt, kept
    pass 0:  [ completion 0 | completion 1 ]  attends to the prompt's keys and values as constants
    pass 1:  [ completion 2 | completion 3 ]  the last pass: attends to them as part of the graph

The trunk's backward runs once, inside the backward of the last pass. Weights do not change between the passes, so the
result is that of one pass over all rows, up to the order of sums.

`shared_prefixes.py` finds which beginnings are shared, and the end of each trunk.

Suffixes of shapes: B rows of a call or a step, L tokens of a row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from .batch import Sequences
from .forest import Forest
from .prefix_cache import CacheView, GradAccumulator, PrefixCache, Trunk, backward_collected
from .row import PassRecord
from .shared_prefixes import SharedPrefix, build_pass_forest, shared_prefixes

# A trunk costs a forward of its own, so a beginning has to save at least this many tokens over all passes.
MIN_SAVED_BY_TRUNK = 64


# --- one forward -----------------------------------------------------------------------------------------------------


def of_this_rank(values: list[int], reduce: str) -> list[int]:
    """Returns the values unchanged: a plan that other ranks have no part in."""
    return values


@dataclass(frozen=True, eq=False)
class PassRules:
    """What the passes of a model have to keep to.

    Attributes:
        build_forest: returns the forest of rows that share nothing with other passes.
        min_length: length of the shortest segment that others may continue.
        reduce: returns the element-wise `"MAX"` or `"SUM"` of a list of numbers over ranks.
        ties_ends: whether every layer of a trunk has to be part of the backward, because each layer is collective.
    """

    build_forest: Callable[[Sequences], Forest]
    min_length: int = 1
    reduce: Callable[[list[int], str], list[int]] = of_this_rank
    ties_ends: bool = False


class Forward:
    """One forward of the model over one packed row: the only thing that is run.

    It returns the scores of the labels of its batch, or the last hidden states of all tokens if the batch has none.

    It is not a dataclass: FSDP2 and DDP look for tensors in dataclasses among a forward's arguments, and take these
    tensors for inputs of the forward.

    Attributes:
        sequences: the rows of the forward; a trunk scores none.
        forest: of these rows, see [`forest.Forest.part`].
        view: the values that layers keep or use; those of no other forward, if it runs alone.
        record: gets what the forward computes. Forwards that are counted together have one record.
        rows: the rows of the planned sequences; `None` for all of them.
        batches: number of batches whose rows it has.
    """

    def __init__(
        self,
        sequences: Sequences,
        forest: Forest,
        view: CacheView | None = None,
        record: PassRecord | None = None,
        rows: np.ndarray | None = None,
        batches: int = 1,
    ):
        self.sequences = sequences
        self.forest = forest
        self.view = view or CacheView(PrefixCache())
        self.record = record or PassRecord()
        self.rows = rows
        self.batches = batches


# --- which passes there are, and which of them share beginnings ------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PassPlan:
    """The passes that compute the rows of a call or of an optimizer step. It holds no tensor.

    Attributes:
        sequences: all rows.
        rows_of_pass: the rows that each pass scores.
        rules: what passes of the model have to keep to.
        kept: the beginnings that passes share, each computed by a trunk.
        trunks: bool `(P, P)`, at (first, last): whether a trunk lives from the one pass to the other. Forwards are
            collective, so each rank runs the trunks of all ranks.
        batches_per_pass, passes_per_batch: of a step; one of the two is 1.
    """

    sequences: Sequences
    rows_of_pass: list[np.ndarray]
    rules: PassRules
    kept: list[SharedPrefix]
    trunks: np.ndarray
    batches_per_pass: int = 1
    passes_per_batch: int = 1
    # By pass, because planning and running use the same forests, see `build_pass_forest`.
    _forests: dict[int, tuple[Forest, dict[int, int]]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        rows_of_pass: list[np.ndarray],
        rules: PassRules,
        shares: bool = True,
        batches_per_pass: int = 1,
        passes_per_batch: int = 1,
    ) -> "PassPlan":
        """Find the beginnings that these passes share; `shares`: whether they may. Collective if they may."""
        count = len(rows_of_pass)
        kept: list[SharedPrefix] = []
        trunks = np.zeros((count, count), dtype=bool)
        if shares:
            pass_B = np.zeros(len(sequences.lengths_B), dtype=int)
            for number, rows in enumerate(rows_of_pass):
                pass_B[rows] = number
            kept = shared_prefixes(sequences, pass_B, MIN_SAVED_BY_TRUNK, rules.min_length)
            for node in kept:
                trunks[node.first, node.last] = True
            own = trunks.astype(int).ravel().tolist()
            of_all_ranks = np.array(rules.reduce(own, "MAX"))
            trunks = of_all_ranks.reshape(count, count) > 0
        return cls(
            sequences,
            rows_of_pass,
            rules,
            kept,
            trunks,
            batches_per_pass=batches_per_pass,
            passes_per_batch=passes_per_batch,
        )

    @property
    def is_shared(self) -> bool:
        """Whether any rank keeps anything."""
        return bool(self.trunks.any())

    @property
    def count(self) -> int:
        """Number of calls of the model, trunks included."""
        return len(self.rows_of_pass) + int(self.trunks.sum())

    def fits(self, limit: int) -> bool:
        """Whether no pass, together with the trunks that are alive then, has more tokens with a graph than `limit`."""
        for number in range(len(self.rows_of_pass)):
            forest, _ = self.forest_of_pass(number)
            tokens = forest.tokens
            for node in self.kept:
                if node.first <= number <= node.last:
                    tokens += self._length(node)
            if tokens > limit:
                return False
        return True

    def _length(self, node: SharedPrefix) -> int:
        """Returns the number of tokens of a kept beginning that its parent does not have."""
        if node.parent < 0:
            return node.depth
        return node.depth - self.kept[node.parent].depth

    def forest_of(self, number: int) -> tuple[Forest, dict[int, int]]:
        """Returns all segments of a pass's rows, and those of its kept nodes, which are found once."""
        if number not in self._forests:
            self._forests[number] = build_pass_forest(
                self.sequences,
                self.kept,
                self.rows_of_pass[number],
                self.rules.build_forest,
                self.rules.min_length,
            )
        return self._forests[number]

    def forest_of_trunk(self, number: int, nodes: list[int]) -> tuple[Forest, list[int]]:
        """Returns the forest of the forward that computes kept nodes of a pass, and the node of each kept segment."""
        forest, segment_of = self.forest_of(number)
        segments = sorted(segment_of[node] for node in nodes)
        return self._part(forest, segment_of, np.array(segments, dtype=int))

    def forest_of_pass(self, number: int) -> tuple[Forest, list[int]]:
        """Returns the forest of the forward that computes all else, and the node of each kept segment in it."""
        forest, segment_of = self.forest_of(number)
        if not segment_of:
            return forest, []
        of_nodes = list(segment_of.values())
        segments = np.setdiff1d(np.arange(forest.segments), of_nodes)
        return self._part(forest, segment_of, segments)

    @staticmethod
    def _part(forest: Forest, segment_of: dict[int, int], segments: np.ndarray) -> tuple[Forest, list[int]]:
        part, kept = forest.part(segments)
        node_of = {segment: node for node, segment in segment_of.items()}
        return part, [node_of[segment] for segment in kept]

    def unscored(self, rows: np.ndarray) -> Sequences:
        """Returns some rows without their labels."""
        unscored = self.sequences.rows(rows)
        unscored.scored_BL = np.zeros_like(unscored.scored_BL)
        return unscored

    def nodes_of(self, trunk: Trunk) -> list[int]:
        """Returns the kept beginnings that a trunk computes on this rank; none if it is another rank's."""
        nodes = []
        for number, node in enumerate(self.kept):
            if (node.first, node.last) == trunk:
                nodes.append(number)
        return nodes

    def ending_in(self, number: int) -> frozenset[int]:
        """Returns the kept beginnings whose last pass is `number`."""
        return frozenset(index for index, node in enumerate(self.kept) if node.last == number)

    def ended_before(self, number: int) -> tuple[set[int], set[Trunk]]:
        """Returns the kept beginnings, and the trunks, that only passes before `number` need."""
        prefixes = {index for index, node in enumerate(self.kept) if node.last < number}
        trunks = {trunk for trunk in self.all_trunks() if trunk[1] < number}
        return prefixes, trunks

    def all_trunks(self) -> list[Trunk]:
        """Returns the trunks of all ranks."""
        trunks = []
        for first, last in np.argwhere(self.trunks).tolist():
            trunks.append((first, last))
        return trunks


# --- the forwards of a plan ------------------------------------------------------------------------------------------


class PlannedForwards:
    """The forwards of a plan, pass by pass, and what they keep for each other.

    Args:
        plan: the passes.
        ties_ends: whether every layer of a trunk has to be part of the backward; by default as in the plan's rules.
            Forwards without gradients need no such tie.
    """

    def __init__(self, plan: PassPlan, ties_ends: bool | None = None):
        self.plan = plan
        self.cache = PrefixCache()
        # The scores that a trunk's forward returned, by its first and last pass, if each of its layers is collective.
        self.trunk_outputs: dict[Trunk, torch.Tensor] = {}
        self._ties_ends = plan.rules.ties_ends if ties_ends is None else ties_ends

    def of_pass(self, number: int, record: PassRecord | None = None) -> Iterator[Forward]:
        """Yields the trunks that no earlier pass needs, the longest-lived first, and then the pass itself.

        Args:
            number: of the pass.
            record: gets what these forwards compute; a new one if absent.
        """
        plan = self.plan
        record = record or PassRecord()
        self.cache.drop(*plan.ended_before(number))
        for last in reversed(np.flatnonzero(plan.trunks[number]).tolist()):
            yield self._trunk(number, last, record)
        forest, used_nodes = plan.forest_of_pass(number)
        first_passes = np.flatnonzero(plan.trunks[:, number]).tolist()
        for first in first_passes:
            # The backward of this pass begins the trunk's, so `finish` must not.
            self.trunk_outputs.pop((first, number), None)
        view = CacheView(
            self.cache,
            used=used_nodes,
            ending=plan.ending_in(number),
            ending_trunks=tuple((first, number) for first in first_passes),
        )
        rows = plan.rows_of_pass[number]
        yield Forward(plan.sequences.rows(rows), forest, view, record, rows, plan.batches_per_pass)

    def _trunk(self, first: int, last: int, record: PassRecord) -> Forward:
        """Returns the trunk of the nodes that are needed from pass `first` to pass `last`."""
        plan = self.plan
        rows = plan.rows_of_pass[first]
        unscored = plan.unscored(rows)
        nodes = plan.nodes_of((first, last))
        computed_nodes = []
        used_nodes = []
        if nodes:
            forest, used_nodes = plan.forest_of_trunk(first, nodes)
            _, segment_of = plan.forest_of(first)
            # The trunk's own segments come first, in the order of the pass's forest.
            for segment, node in enumerate(sorted(nodes, key=segment_of.__getitem__)):
                computed_nodes.append((node, int(forest.starts[segment]), int(forest.lengths[segment])))
        else:  # another rank's trunk: this rank computes one token
            forest = plan.rules.build_forest(replace(unscored, needs_all=False))
        view = CacheView(
            self.cache,
            computed=computed_nodes,
            used=used_nodes,
            ending=plan.ending_in(last),
            trunk=(first, last) if self._ties_ends else None,
            scores_nothing=True,
        )
        return Forward(unscored, forest, view, record, rows)

    def filled_up(self, at_least: int) -> Iterator[Forward]:
        """Yields the forwards of all passes, counted together, and empty ones up to a number of forwards.

        Other ranks have as many forwards, which may be collective.
        """
        record = PassRecord()
        for number in range(len(self.plan.rows_of_pass)):
            yield from self.of_pass(number, record)
        for _ in range(at_least - self.plan.count):
            rows = np.array([0])
            nothing = replace(self.plan.unscored(rows), needs_all=False, router_loss=False)
            forest = self.plan.rules.build_forest(nothing)
            yield Forward(nothing, forest, CacheView(self.cache, scores_nothing=True), record, rows)

    def finish(self) -> None:
        """End the step: run the backward of trunks whose last pass did not run, and free all kept values."""
        # A trunk continues trunks that live longer, so its backward comes before theirs.
        trunks = sorted(self.plan.all_trunks(), key=lambda trunk: (-trunk[0], trunk[1]))
        for trunk in trunks:
            values = []
            for node in self.plan.nodes_of(trunk):
                values += self.cache.of(node)
            if trunk in self.trunk_outputs:
                # Its backward begins at the output, where the model's hooks gather sharded weights.
                output = self.trunk_outputs[trunk]
                nothing = GradAccumulator()
                nothing.add(torch.zeros_like(output))
                values.append((output, nothing))
            backward_collected(values)
        self.cache.clear()
        self.trunk_outputs.clear()


# --- how a plan is made ----------------------------------------------------------------------------------------------


@torch.compiler.disable
def plan_call(
    sequences: Sequences | None, tokens_per_pass: int, rules: PassRules, shares: bool
) -> Iterator[Forward] | None:
    """Returns the forwards of a call in passes of no more tokens than a limit, as many as on the rank that needs most.

    Collective. If one rank cannot pack its rows, the result is `None` on all ranks.

    Args:
        sequences: the rows of the call; `None` if they cannot be packed.
        tokens_per_pass: the limit. The passes have equally many neighbouring rows, or one more, as many as fit.
        rules: what passes of the model have to keep to.
        shares: whether a beginning that several passes share is computed once. The call must not record gradients.
    """
    plan = None
    if sequences is not None:
        # Each rank has trunks of its own: the ranks agree on the number of forwards only.
        alone = replace(rules, reduce=of_this_rank)
        rows = np.arange(len(sequences.lengths_B))
        plan = PassPlan.of(sequences, [rows], alone, shares=False)
        forest, _ = plan.forest_of_pass(0)
        passes = math.ceil(forest.tokens / tokens_per_pass)
        passes = min(passes, len(rows))
        while not plan.fits(tokens_per_pass) and passes <= len(rows):  # a row that is too long runs alone
            plan = PassPlan.of(sequences, np.array_split(rows, passes), alone, shares)
            passes += 1
    count = 0 if plan is None else plan.count
    most, cannot = rules.reduce([count, int(plan is None)], "MAX")
    if plan is None or cannot:
        return None
    return PlannedForwards(plan).filled_up(at_least=most)


def plan_step(
    sequences: Sequences,
    batches: int,
    rules: PassRules,
    tokens_per_pass: int | None,
    one_by_one: bool = False,
    default_limit: int | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> PassPlan | None:
    """Plan the passes of batches that are scored with the same weights. Collective.

    Args:
        sequences: the rows of all batches.
        batches: number of batches; each has equally many neighbouring rows.
        rules: what passes of the model have to keep to.
        tokens_per_pass: limit of a pass with gradients, together with the trunks that are alive then. If `None`, the
            limit is the tokens of one padded batch. If any two batches share a beginning, the largest
            divisor of their number runs at once that fits. A batch that is longer than `tokens_per_pass` is cut.
        one_by_one: whether each batch has a pass of its own.
        default_limit: the limit without `tokens_per_pass`, if it is not the tokens of one padded batch.
        warn: gets a line if batches are too long and cannot be cut.

    Returns:
        The passes with gradients; `None` if no two batches share a beginning and each batch fits.
    """
    rows = len(sequences.lengths_B) // batches
    limit = tokens_per_pass or default_limit or rows * sequences.width
    alone = replace(rules, reduce=of_this_rank)
    candidates = [rows] if one_by_one else _rows_per_pass(batches, rows)
    largest = 0
    for count in candidates:
        if _passes_of(sequences, count, rows, alone).fits(limit):
            largest = count
            break
    # The minimum over ranks of the largest number of rows that fits.
    (negative,) = rules.reduce([-largest], "MAX")
    rows_per_pass = -negative
    if rows_per_pass < rows and tokens_per_pass is None:
        return None  # too many beginnings would be alive at once; each batch alone needs less memory
    if rows_per_pass < rows and one_by_one:
        warn(f"Micro-batches of {rows} rows are longer than tokens_per_pass={tokens_per_pass}, and cannot be cut here")
        rows_per_pass = rows
    if rows_per_pass >= rows:
        one_per_batch = _passes_of(sequences, rows, rows, rules)
        if not one_per_batch.is_shared:
            return None
        if rows_per_pass == rows:
            return one_per_batch
    rows_per_pass = max(rows_per_pass, 1)  # one row is too long: all rows run alone
    return _passes_of(sequences, rows_per_pass, rows, rules)


def _passes_of(sequences: Sequences, rows_per_pass: int, rows_per_batch: int, rules: PassRules) -> PassPlan:
    """Returns the plan that computes `sequences`, `rows_per_pass` rows in a pass."""
    first_rows = range(0, len(sequences.lengths_B), rows_per_pass)
    rows_of_pass = [np.arange(first, first + rows_per_pass) for first in first_rows]
    return PassPlan.of(
        sequences,
        rows_of_pass,
        rules,
        shares=len(rows_of_pass) > 1,
        batches_per_pass=max(1, rows_per_pass // rows_per_batch),
        passes_per_batch=max(1, rows_per_batch // rows_per_pass),
    )


def _rows_per_pass(batches: int, rows: int) -> list[int]:
    """Returns the numbers of rows that a pass of equal passes may have, largest first.

    A pass has several whole batches of `rows` rows each, one batch, or an equal part of one.
    """
    sizes = []
    for batches_per_pass in range(batches, 0, -1):
        if batches % batches_per_pass == 0:
            sizes.append(batches_per_pass * rows)
    for passes_per_batch in range(2, rows + 1):
        if rows % passes_per_batch == 0:
            sizes.append(rows // passes_per_batch)
    return sizes
