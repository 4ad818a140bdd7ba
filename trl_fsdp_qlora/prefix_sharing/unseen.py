"""`Unseen`: passes and gradients of a model that nothing else sees, for comparisons inside of a run.

A comparison runs the model forward and backward in the middle of a step. No gradient of the run may change, no hook of
a parameter may be called (DDP counts gradients by hooks, and an optimizer may step in one), and another thread may
train the same model. So the thread that compares has leaves of its own: every function of torch that gets a trainable
parameter gets an *alias* of it, which has the same memory. A forward may hold its modules in any way, in a closure, a
default argument or a global, because the functions that it calls in the end are torch's.

The `apply` of an autograd function cannot be overridden, so it gets the parameters themselves. The engine returns the
gradients of both, and accumulates none.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction, detach_variable


def _as_list(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return list(tensors)


def _first(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return x


def _middle(x: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: object) -> torch.Tensor:
    return x.fill_((low + high) / 2)


def _ones(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.ones_like(x)


def _filled_with_ones(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return x.fill_(1)


# A packed pass and a padded one would draw different numbers, so both get these: dropout changes nothing, a router has
# no jitter, and no layer is left out.
_IN_PLACE_OF_DRAWS: dict[Callable, Callable] = {
    functional.dropout: _first,
    functional.dropout1d: _first,
    functional.dropout2d: _first,
    functional.dropout3d: _first,
    functional.alpha_dropout: _first,
    functional.feature_alpha_dropout: _first,
    torch.dropout: _first,
    torch.Tensor.uniform_: _middle,
    torch.Tensor.bernoulli_: _filled_with_ones,
    torch.bernoulli: _ones,
}


class Unseen(TorchFunctionMode):
    """Inside the block this thread's passes of a model draw nothing, and [`add_gradients`] sums their gradients.

    Args:
        parameters: the parameters whose gradients are wanted.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__()
        self._aliases: dict[int, torch.Tensor] = {}
        # The parameter of each leaf that is differentiated, by the `id` of the leaf.
        self._parameters: dict[int, nn.Parameter] = {}
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        for parameter in parameters:
            alias = parameter.detach().requires_grad_()
            self._aliases[id(parameter)] = alias
            self._parameters[id(alias)] = parameter
            if not parameter._backward_hooks:  # a hook would be called if the parameter itself were differentiated
                self._parameters[id(parameter)] = parameter

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _IN_PLACE_OF_DRAWS:
            return _IN_PLACE_OF_DRAWS[function](*args, **kwargs)
        if not self._aliases:
            return function(*args, **kwargs)
        args = [self._with_aliases(x) for x in args]
        kwargs = {name: self._with_aliases(x) for name, x in kwargs.items()}
        if function in (torch.autograd.backward, torch.Tensor.backward):
            # The backward of an autograd function that recomputes a part of the model.
            with self:
                return self._backward_of_a_part(args[0], kwargs.get("grad_tensors", kwargs.get("gradient")))
        return function(*args, **kwargs)

    def _with_aliases(self, value: object) -> object:
        """Returns an argument with aliases in place of parameters."""
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)(self._with_aliases(x) for x in value)
        return self._aliases.get(id(value), value)

    def add_gradients(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, a number, to the sums."""
        self._differentiate([loss], [torch.ones_like(loss)], self._leaves_of([loss]))

    def squared_norm(self) -> float:
        """Returns the squared norm of all sums together."""
        # Summed in float32 without a copy in a wider type: the gradient of an embedding has gigabytes.
        sums = self._sums.values()
        is_wide = any(x.dtype is torch.float64 for x in sums)
        dtype = torch.float64 if is_wide else torch.float32
        total = 0.0
        for x in sums:
            norm = torch.linalg.vector_norm(x, dtype=dtype)
            total += float(norm) ** 2
        return total

    def _differentiate(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], leaves: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Add the parameters' gradients to the sums, and return those of all leaves."""
        # By the engine itself, because `torch.autograd.grad` would leave this block for what its backward recomputes.
        # In one thread: those that the engine has for each device are not in this block.
        with torch.autograd.set_multithreading_enabled(False):
            of_leaves = _engine_run_backward(
                tuple(outputs),
                tuple(gradients),
                False,
                False,
                tuple(leaves),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        for leaf, gradient in zip(leaves, of_leaves, strict=True):
            parameter = self._parameters.get(id(leaf))
            if parameter is None or gradient is None:
                continue
            # Not in place: two leaves may have got one tensor.
            if parameter in self._sums:
                gradient = self._sums[parameter] + gradient
            self._sums[parameter] = gradient
        return list(of_leaves)

    def _backward_of_a_part(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        gradients: torch.Tensor | Sequence[torch.Tensor],
    ) -> None:
        """As `torch.autograd.backward` of a part that was recomputed: its inputs get their gradients in `.grad`."""
        outputs = _as_list(tensors)
        leaves = self._leaves_of(outputs)
        of_leaves = self._differentiate(outputs, _as_list(gradients), leaves)
        for leaf, gradient in zip(leaves, of_leaves, strict=True):
            if gradient is None or id(leaf) in self._parameters:
                continue
            if leaf.grad is not None:
                gradient = leaf.grad + gradient
            leaf.grad = gradient

    def _leaves_of(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the leaves of a graph, and prepares the re-entrant checkpoints in it.

        The engine runs what leads to a leaf of this list. If all parameters are inside of checkpoints, that is the
        output of the embeddings alone.
        """
        leaves = []
        to_visit = [output.grad_fn for output in outputs]
        seen = set(to_visit)
        while to_visit:
            node = to_visit.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and (id(leaf) in self._parameters or not isinstance(leaf, nn.Parameter)):
                leaves.append(leaf)
            if getattr(node, "_forward_cls", None) is CheckpointFunction:
                node._forward_cls = _Recomputation
            for next_node, _ in node.next_functions:
                if next_node is not None and next_node not in seen:
                    seen.add(next_node)
                    to_visit.append(next_node)
        return leaves


class _Recomputation(CheckpointFunction):
    """A re-entrant checkpoint without the check by which torch refuses it if gradients are returned.

    The rest is torch's `CheckpointFunction.backward`, without the state of random numbers: nothing draws here.
    """

    @staticmethod
    def backward(ctx, *gradients):
        inputs = list(ctx.inputs)
        for index, tensor in zip(ctx.tensor_indices, ctx.saved_tensors, strict=True):
            inputs[index] = tensor
        inputs = detach_variable(tuple(inputs))
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(ctx.device_type, **ctx.device_autocast_kwargs))
            stack.enter_context(torch.autocast("cpu", **ctx.cpu_autocast_kwargs))
            outputs = ctx.run_function(*inputs)
        with_grads = []
        out_grads = []
        for output, gradient in zip(_as_list(outputs), gradients, strict=True):
            if isinstance(output, torch.Tensor) and output.requires_grad:
                with_grads.append(output)
                out_grads.append(gradient)
        if with_grads:
            torch.autograd.backward(tuple(with_grads), tuple(out_grads))
        of_inputs = [x.grad if isinstance(x, torch.Tensor) else None for x in inputs]
        return None, None, *of_inputs
