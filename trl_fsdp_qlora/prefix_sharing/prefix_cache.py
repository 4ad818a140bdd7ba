"""What layers keep of a shared prefix for later forwards: keys, values and states, and their gradients.

A forward that computes prefixes and scores nothing is a *trunk*. Its layers keep what later tokens need, in a
[`PrefixCache`]. Later passes read it through a [`CacheView`]:

- every pass but the last gets the kept values as constants ([`detach_and_collect`]), and its backward adds their
  gradients to a [`GradAccumulator`];
- in the last pass the kept values are part of the graph. When its backward begins, it passes on what all earlier
  passes have collected ([`attach_collected`]).

So the trunk's backward runs once, inside the backward of the last pass, and the trainer calls every backward itself.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from ..compat.deepspeed import is_zero3
from .status import CannotPack

# The name of a thing that a layer keeps: the layer's `id` (or a name), and what distinguishes its things.
Slot = tuple
# A trunk: the first and the last pass that need it.
Trunk = tuple[int, int]


def cannot_keep_reason(model: nn.Module) -> str | None:
    """Returns why passes of `model` cannot use values of other passes; `None` if they can."""
    if any(map(is_zero3, model.parameters())):
        return "DeepSpeed's ZeRO-3 gathers weights in the order of one forward and its backward"
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "FSDP1 frees weights that the graph of an earlier forward needs"
    return None


def no_graph_reason(model: nn.Module) -> str | None:
    """Returns that layers of `model` (with all wrappers) are checkpointed without a graph; `None` if they are not.

    A wrapper of the user's own is not found here; [`CacheView.keep`] raises then.
    """
    for module in model.modules():
        if not getattr(module, "gradient_checkpointing", True):
            continue
        # Where transformers' layers and torch's `checkpoint_wrapper` have the function that checkpoints them.
        for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
            if getattr(vars(module).get(name), "keywords", {}).get("use_reentrant"):
                return (
                    "its layers run without a graph (gradient_checkpointing_kwargs={'use_reentrant': True}); "
                    "use_reentrant=False keeps one"
                )
    return None


# --- gradients that wait for a later backward ------------------------------------------------------------------------


class GradAccumulator:
    """The sum of the gradients of a value that several passes read.

    The sum is in float32 or better: it may have hundreds of half-precision terms.
    """

    total: torch.Tensor | None = None

    def add(self, gradient: torch.Tensor) -> None:
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        self.total = gradient.clone() if self.total is None else self.total.add_(gradient)

    def take(self) -> torch.Tensor | None:
        """Returns the sum and forgets it, so that it is passed on once."""
        total = self.total
        self.total = None
        return total


class _DetachAndCollect(torch.autograd.Function):
    """A value as a constant, whose gradient is collected. `anchor` makes autograd call the backward."""

    @staticmethod
    def forward(ctx, value, anchor, collected: GradAccumulator):
        ctx.collected = collected
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        ctx.collected.add(gradient)
        return None, None, None


class _AttachCollected(torch.autograd.Function):
    """`x` unchanged; the backward gives each of `values` what was collected for it, or zeros if nothing ever is."""

    @staticmethod
    def forward(ctx, x, collected: list[GradAccumulator | None], *values):
        ctx.collected = collected
        ctx.like = [(value.shape, value.dtype, value.device) for value in values]
        return x.clone()  # FSDP2 warns of views among a forward's outputs

    @staticmethod
    def backward(ctx, gradient):
        gradients = []
        for collected, (shape, dtype, device) in zip(ctx.collected, ctx.like, strict=True):
            if collected is None:
                total = torch.zeros(shape, dtype=dtype, device=device)
            else:
                total = collected.take()
            if total is not None:
                total = total.to(dtype)
            gradients.append(total)
        return gradient, None, *gradients


def detach_and_collect(value: torch.Tensor, collected: GradAccumulator) -> torch.Tensor:
    """Returns `value` as a constant whose gradient is added to `collected`."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return value.detach()
    anchor = torch.zeros((), device=value.device, requires_grad=True)
    return _DetachAndCollect.apply(value.detach(), anchor, collected)


def attach_collected(x: torch.Tensor, values: list[tuple[torch.Tensor, GradAccumulator | None]]) -> torch.Tensor:
    """Returns `x`; its backward passes on to each value what was collected for it."""
    with_gradients = []
    collected_for = []
    for value, collected in values:
        if value.requires_grad:
            with_gradients.append(value)
            collected_for.append(collected)
    if not with_gradients or not x.requires_grad:
        return x
    return _AttachCollected.apply(x, collected_for, *with_gradients)


def backward_collected(values: list[tuple[torch.Tensor, GradAccumulator]]) -> None:
    """Run the backward of values with what was collected for them, because no later pass's backward will do it."""
    roots = []
    gradients = []
    for value, collected in values:
        total = collected.take()
        if total is not None:
            roots.append(value)
            gradients.append(total.to(value.dtype))
    if roots:
        torch.autograd.backward(roots, gradients)


# --- what is kept, and how a forward reads and writes it -------------------------------------------------------------


# A tensor of a trunk's graph, and the gradients that passes have collected for it.
KeptValue = tuple[torch.Tensor, GradAccumulator]


@dataclass(eq=False)
class PrefixCache:
    """What the layers of a model keep during an optimizer step.

    Attributes:
        prefixes: of each shared prefix, by its number, what is kept under each slot.
        trunk_ends: last hidden states of the trunks whose layers all have to be in the backward.
    """

    prefixes: dict[int, dict[Slot, KeptValue]] = field(default_factory=dict)
    trunk_ends: dict[Trunk, torch.Tensor] = field(default_factory=dict)

    def keep(self, prefix: int, slot: Slot, value: torch.Tensor) -> None:
        slots = self.prefixes.setdefault(prefix, {})
        if slot in slots:
            raise CannotPack("a layer keeps two things under one name")
        slots[slot] = value, GradAccumulator()

    def of(self, prefix: int) -> list[KeptValue]:
        """Returns all that is kept of a prefix."""
        return list(self.prefixes.get(prefix, {}).values())

    def drop(self, prefixes: set[int], trunks: set[Trunk]) -> None:
        """Free all that is kept of these prefixes and trunks."""
        for prefix in prefixes:
            self.prefixes.pop(prefix, None)
        for trunk in trunks:
            self.trunk_ends.pop(trunk, None)

    def clear(self) -> None:
        self.prefixes.clear()
        self.trunk_ends.clear()


@dataclass(eq=False)
class CacheView:
    """The part of a cache that one forward writes and reads; layers find it in [`row.PackedRow`].

    Attributes:
        cache: of the step.
        computed: the prefixes that a trunk computes, as `(prefix, first token in the row, tokens)`.
        used: prefixes whose keys follow those of the row, in their order.
        ending: prefixes that no later forward needs; their values are part of the graph and not constants.
        trunk: this trunk, if each of its layers has to be in the backward, for which its last hidden states are kept;
            else `None`.
        ending_trunks: such trunks that no later forward needs; their last hidden states are attached to the output.
        scores_nothing: whether the forward is a trunk, or one that other ranks' forwards wait for.
        has_gradients: whether a backward will follow.
        is_computed: whether the forward is over. Every later call of a layer is a recomputation, which keeps nothing
            and raises if it fails.
        calls, recomputed_calls: number of calls of each attention layer so far, in the forward and in its
            recomputation by the backward.
    """

    cache: PrefixCache
    computed: list[tuple[int, int, int]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    ending: frozenset[int] = frozenset()
    trunk: Trunk | None = None
    ending_trunks: tuple[Trunk, ...] = ()
    scores_nothing: bool = False
    has_gradients: bool = field(default_factory=torch.is_grad_enabled)
    is_computed: bool = False
    calls: Counter = field(default_factory=Counter)
    recomputed_calls: Counter = field(default_factory=Counter)

    def slot(self, module: nn.Module) -> Slot:
        """Returns the name of a call of a layer in a forward: some layers attend twice in each forward."""
        calls = self.recomputed_calls if self.is_computed else self.calls
        call = calls[id(module)]
        calls[id(module)] += 1
        return id(module), call

    def keep(self, prefix: int, slot: Slot, value: torch.Tensor) -> None:
        """Keep a `value` of a prefix for later passes."""
        if self.has_gradients and not torch.is_grad_enabled():
            raise CannotPack("its layers run without a graph")
        self.cache.keep(prefix, slot, value)

    def kept(self, prefix: int, slot: Slot) -> torch.Tensor:
        """Returns the value that a layer kept of a prefix, as part of the graph or as a constant."""
        value, collected = self.cache.prefixes[prefix][slot]
        return value if prefix in self.ending else detach_and_collect(value, collected)

    def extended(self, slot: Slot, x: torch.Tensor) -> torch.Tensor:
        """Returns keys or values `(1, H, T, D)` of the row followed by the kept ones: `(1, H, T + kept, D)`."""
        if not self.is_computed:
            for prefix, start, length in self.computed:
                self.keep(prefix, slot, x.narrow(2, start, length))
        if not self.used:
            return x
        parts = [x]
        for prefix in self.used:
            kept = self.kept(prefix, slot)
            parts.append(kept.to(x.dtype))
        return torch.cat(parts, dim=2)

    def end(self, hidden: torch.Tensor) -> None:
        """Note that the forward is over; keep its last hidden states if all layers have to be in the backward."""
        self.is_computed = True
        if self.trunk is not None:
            self.cache.trunk_ends[self.trunk] = hidden

    def with_collected(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the scores of a pass; their backward passes on what was collected for the prefixes that end."""
        values: list[tuple[torch.Tensor, GradAccumulator | None]] = []
        for prefix in self.ending:
            values += self.cache.of(prefix)
        for trunk in self.ending_trunks:  # nothing is collected for last hidden states
            if trunk in self.cache.trunk_ends:
                values.append((self.cache.trunk_ends[trunk], None))
        return attach_collected(x, values)
