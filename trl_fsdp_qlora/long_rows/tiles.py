"""Long rows in tiles: what a layer computes of each token by itself runs on a few thousand tokens at a time.

With gradient checkpointing, what one layer keeps while it is recomputed is the largest part of a long row: an MLP
keeps several times its intermediate width of every token, a norm a float32 copy. MLPs, experts and norms compute each
token by itself. So their forward runs tile by tile without a graph and keeps its input alone, and their backward runs
a tile's forward once more and goes back through it. Gradients of weights are summed over the tiles and returned once,
so that hooks of DDP and FSDP2 see one gradient, and the module's own hooks one forward. Results are the same up to the
order of sums. (ALST, arXiv 2506.13996, tiles an MLP in this way.)

The work is that of checkpointing alone: torch's checkpoint ends its recomputation once the layer's last input has been
kept, and an MLP keeps its input before its tiles run. A norm behind the MLP, as in Gemma's layers, keeps nothing: the
MLP's backward computes its tile, too. If something else of the layer follows, and with re-entrant checkpoints,
the MLP's forward runs once more.

[`install`] replaces forwards of modules whose class is known (`kinds.py`), or that transformers dispatches as experts.
Short rows, and modules with something unknown inside, run as before.
"""

import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from transformers.utils import logging

from ..compat.deepspeed import is_zero3
from ..compat.fake_tensors import without_repetition
from ..compat.peft import looks_beyond_tokens
from ..utils.random_state import RandomState
from .kinds import kind_of

logger = logging.get_logger(__name__)

# Tokens of a tile of "auto", by the kind of module. A 4-bit weight is dequantized once for each tile. Experts have
# larger tiles, because each token is multiplied by a few of them only.
AUTO_TOKENS = {"MLP": 4096, "norm": 4096, "experts": 8192}
# "auto" leaves rows of up to so many tiles whole.
_FEW_TILES = 2
# Packages of the classes of modules inside of a known one. Modules of other packages may use several tokens, as
# batch norms and bitsandbytes' 8-bit layers do.
_KNOWN_PARTS = (
    "torch.nn.modules.linear", "torch.nn.modules.dropout", "torch.nn.modules.container", "transformers.activations",
    "transformers.pytorch_utils", "peft.tuners.", "peft.utils.", "trl_fsdp_qlora.",
)  # fmt: skip
# Of torch's activations and norms these alone: a softmax may be taken over tokens, and a group norm is.
_KNOWN_CLASSES = {
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU,
    nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh, nn.LayerNorm, nn.RMSNorm,
}  # fmt: skip
_OF_BITSANDBYTES = {"Linear4bit", "Params4bit"}
# Names under which a layer has a norm of its MLP's output.
_NORMS_BEHIND = ("post_feedforward_layernorm", "post_mlp_layernorm")


# --- which modules ---------------------------------------------------------------------------------------------------


def _why_whole(module: nn.Module) -> str | None:
    """Why a known module does not run in tiles now, because of what is inside; `None` if it does."""
    for part in module.modules():
        cls = type(part)
        is_known = cls.__module__.startswith(_KNOWN_PARTS) or cls in _KNOWN_CLASSES or cls.__name__ in _OF_BITSANDBYTES
        if part is not module and not is_known and kind_of(part) is None:
            return f"{cls.__name__} inside {type(module).__name__} is not known to compute each token by itself"
        if isinstance(part, FSDPModule):
            return f"FSDP gathers {cls.__name__} in each of its calls, whose number differs between ranks"
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        if part is not module and any(hooks):
            return f"{cls.__name__} inside {type(module).__name__} has a hook, which would run once for each tile"
        plain = {name: x for name, x in vars(part).items() if isinstance(x, torch.Tensor)}
        if "weight" in plain or any(x.requires_grad for x in plain.values()):
            return f"a weight of {cls.__name__} is part of one large parameter (FSDP1)"
    if any(map(is_zero3, module.parameters())):
        return "DeepSpeed's ZeRO-3 gathers a layer in each of its calls, whose number differs between ranks"
    return None


# --- on a model ------------------------------------------------------------------------------------------------------


class Tiled:
    """What a module in tiles keeps: it is the module's attribute `token_tiles`.

    Attributes:
        kind: of the module, see [`kind_of`].
        own_forward: the module's forward before.
        layer: the nearest module around it that may be checkpointed, a layer or the model.
        tokens_per_tile: a number of tokens, or `"auto"`.
        norm: of an MLP, the norm that its layer has behind it; or `None`.
    """

    norm: nn.Module | None = None

    def __init__(self, kind: str, own_forward: Callable, layer: nn.Module | None, tokens_per_tile: int | str):
        self.kind = kind
        self.own_forward = own_forward
        self.layer = layer
        self.tokens_per_tile = tokens_per_tile

    def tiles(self, inputs: tuple) -> list[slice] | None:
        """The tiles of a call with these arguments; `None` if it runs whole."""
        first = inputs[0]
        if first.ndim not in (2, 3, 4):
            return None
        is_auto = self.tokens_per_tile == "auto"
        size: Any = AUTO_TOKENS[self.kind] if is_auto else self.tokens_per_tile
        dim = _token_dim(first)
        # (B, T, H), (B, T, heads, D), (B, heads, T, D) or, of experts, (T, H)
        rows = first.shape[0] if dim else 1
        tokens = first.shape[dim]
        if rows * tokens <= (size * _FEW_TILES if is_auto else size):
            return None
        # Without checkpointing, a user has chosen speed for memory, and tiles would compute the MLP once more.
        layer = self.layer
        is_kept = layer is not None and not (layer.gradient_checkpointing and layer.training)
        if is_auto and is_kept and torch.is_grad_enabled():
            return None
        size = max(1, size // rows)
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _token_dim(x: torch.Tensor) -> int:
    if x.ndim == 2:
        return 0
    return 2 if x.ndim == 4 and x.shape[2] > x.shape[1] else 1


def tile_size(value: int | str) -> int | str:
    """A value of the field `mlp_tokens_per_tile`: `"auto"`, `"off"` or a number of tokens; from a command line, text.

    Raises:
        ValueError: it is none of them.
    """
    size = int(value) if isinstance(value, str) and value.isdecimal() else value
    if size in ("auto", "off") or (type(size) is int and size > 0):
        return size
    raise ValueError(f"mlp_tokens_per_tile={value!r} is unknown; use 'auto', 'off' or a number of tokens")


def install(model: nn.Module, tokens_per_tile: int | str = "auto") -> None:
    """Let the known modules of `model` run in tiles of so many tokens; `"auto"` chooses, `"off"` takes it back.

    `model` may have wrappers, of PEFT and others.
    """
    remove(model)
    if tokens_per_tile != "off" and looks_beyond_tokens(model) is None:
        _install_in(model, None, tokens_per_tile)


def _install_in(module: nn.Module, layer: nn.Module | None, tokens_per_tile: int | str) -> None:
    kind = kind_of(module)
    if kind is not None:
        module.token_tiles = Tiled(kind, module.forward, layer, tokens_per_tile)
        module.forward = types.MethodType(_forward, module)
        return
    if hasattr(module, "gradient_checkpointing"):
        layer = module
    for child in module.children():
        _install_in(child, layer, tokens_per_tile)
    mlp = getattr(getattr(module, "mlp", None), "token_tiles", None)
    if mlp is not None:
        norms = [getattr(module, name) for name in _NORMS_BEHIND if hasattr(module, name)]
        mlp.norm = next((norm for norm in norms if "token_tiles" in vars(norm)), None)


def remove(model: nn.Module) -> None:
    """Give the modules of `model` their own forwards back."""
    for module in model.modules():
        tiled = vars(module).pop("token_tiles", None)
        # Under a wrapper of the user's own it stays, and lets the module's own forward run.
        if tiled is None or vars(module).get("forward") != types.MethodType(_forward, module):
            continue
        if tiled.own_forward == types.MethodType(type(module).forward, module):
            del module.forward
        else:
            module.forward = tiled.own_forward


def describe(model: nn.Module, tokens_per_tile: int | str) -> tuple[str, str]:
    """A line of the start-up block on `model`, for which [`install`] was called with this value."""
    line = f"long rows in tiles of tokens (mlp_tokens_per_tile: {tokens_per_tile})"
    if tokens_per_tile == "off":
        return "off", line
    if any("token_tiles" in vars(module) for module in model.modules()):
        return "on", line
    return "as stock TRL", f"{line}: {looks_beyond_tokens(model) or 'no MLP, norm or expert of the model is known'}"


# --- a call ----------------------------------------------------------------------------------------------------------


def _forward(self, *args, **kwargs):
    tiled = vars(self).get("token_tiles")
    if tiled is None:  # taken back, under a wrapper of the user's own
        return type(self).forward(self, *args, **kwargs)
    inputs = (*args, *kwargs.values())
    if torch.compiler.is_compiling() or not inputs or not all(isinstance(x, torch.Tensor) for x in inputs):
        return tiled.own_forward(*args, **kwargs)
    tiles = tiled.tiles(inputs)
    if tiles is None:
        return tiled.own_forward(*args, **kwargs)
    if (reason := _why_whole(self)) is not None:
        logger.warning_once("a long row runs without tiles: %s", reason)
        return tiled.own_forward(*args, **kwargs)
    call, anchor, version = getattr(inputs[0], "token_tiles", (None, None, None))
    if call is not None and call.norm is self and torch.is_grad_enabled() and inputs[0]._version == version:
        return call.run_norm(inputs[0], anchor)
    return _Call(self, tiles, inputs, tuple(kwargs)).run(inputs)


_forward.__name__ = "forward"  # pickle looks a method up by this name; a model that was read back runs without tiles


class _Call:
    """A module's call in tiles, and its backward.

    The graph keeps it, so it must not hold the inputs, nor a function that does.

    Attributes:
        function: the module's own forward.
        names: of the last inputs, which are its keyword arguments.
        norm: the norm behind the module, if it has one.
        grads: of the module's output and of the norm's, as far as they are known.
    """

    def __init__(
        self, module: nn.Module, tiles: list[slice], inputs: tuple[torch.Tensor, ...], names: tuple[str, ...]
    ):
        self.function = module.token_tiles.own_forward
        self.names = names
        self.norm = module.token_tiles.norm
        self.tiles = tiles
        self.dim = _token_dim(inputs[0])
        self.device = inputs[0].device
        modules = [*module.modules(), *([] if self.norm is None else [self.norm])]
        parameters = (x for part in modules for x in part.parameters(recurse=False))
        self.weights = list(dict.fromkeys(x for x in parameters if x.requires_grad))
        self.grads: list[torch.Tensor | None] = [None, None]
        kind = self.device.type
        self.autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        # Any part may draw in training: dropout, and PEFT's layers in ways of their own.
        self.random_state = RandomState(self.device) if any(x.training for x in modules) else None

    def run(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The module's output."""
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *self.weights)):
            return self._in_tiles(self._call_function, inputs)
        # The inputs are kept before the tiles run: there the recomputation of a checkpointed layer may end.
        anchor = _KeepInputs.apply(self, len(inputs), *inputs, *self.weights)
        out = _TakeGradient.apply(self, 0, anchor, self._in_tiles(self._call_function, inputs))
        if self.norm is not None:
            out.token_tiles = (self, anchor, out._version)  # the norm of what is changed in place is another
        return out

    def run_norm(self, out: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """The norm of the module's output."""
        return _TakeGradient.apply(self, 1, anchor, self._in_tiles(self.norm.token_tiles.own_forward, (out,)))

    def _call_function(self, *inputs: torch.Tensor) -> torch.Tensor:
        count = len(inputs) - len(self.names)
        return self.function(*inputs[:count], **dict(zip(self.names, inputs[count:], strict=True)))

    def _in_tiles(self, function: Callable, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out = None
        with torch.no_grad(), self._autocast():
            for tile in without_repetition(self.tiles, inputs[0]):
                of_tile = function(*(self._cut(x, tile).contiguous() for x in inputs))
                if out is None:
                    shape = list(of_tile.shape)
                    shape[self.dim] = inputs[0].shape[self.dim]
                    out = of_tile.new_empty(shape)
                self._cut(out, tile).copy_(of_tile)
        return out

    def backward(self, inputs: tuple[torch.Tensor, ...], needs: tuple[bool, ...]) -> list[torch.Tensor | None]:
        """The gradients of inputs and weights, for which `needs` is true; summed over the tiles."""
        count = len(inputs)
        of_inputs: list[torch.Tensor | None] = [None] * count
        for i, x in enumerate(inputs):
            if needs[i]:
                of_inputs[i] = torch.empty_like(x)
        of_weights: list[torch.Tensor | None] = [None] * len(self.weights)
        needed_weights = [i for i in range(len(self.weights)) if needs[count + i]]
        replayed = nullcontext() if self.random_state is None else self.random_state.again()
        with replayed, torch.enable_grad(), self._autocast():
            for tile in without_repetition(self.tiles, inputs[0]):
                parts = []
                for x, gradient in zip(inputs, of_inputs, strict=True):
                    part = self._cut(x, tile).detach().contiguous()
                    parts.append(part.requires_grad_(gradient is not None))
                leaves = [part for part in parts if part.requires_grad]
                leaves += [self.weights[i] for i in needed_weights]
                of_leaves = iter(self._gradients_of_tile(tile, parts, leaves))
                for gradient in of_inputs:
                    if gradient is None:
                        continue
                    of_part = next(of_leaves)
                    place = self._cut(gradient, tile)
                    if of_part is None:
                        place.zero_()
                    else:
                        place.copy_(of_part)
                for i, of_weight in zip(needed_weights, of_leaves, strict=True):
                    of_weights[i] = _added(of_weights[i], of_weight)
        self.grads = [None, None]
        for i, weight in enumerate(self.weights):
            total = of_weights[i]
            if total is not None:
                of_weights[i] = total.to(weight.dtype)
        return of_inputs + of_weights

    def _gradients_of_tile(
        self, tile: slice, parts: list[torch.Tensor], leaves: list[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Run a tile again, and return the gradients of its leaves."""
        of_module, of_norm = self.grads
        out = self._call_function(*parts)
        outs = [out]
        gradients = [of_module]
        if of_norm is not None:
            outs.append(self.norm.token_tiles.own_forward(out))
            gradients.append(of_norm)
        with_gradient = []
        of_outs = []
        for out, gradient in zip(outs, gradients, strict=True):
            # An adapter that this tile was drawn to leave out leaves nothing that has gradients.
            if gradient is not None and out.requires_grad:
                with_gradient.append(out)
                of_outs.append(self._cut(gradient, tile))
        if not with_gradient:
            return [None] * len(leaves)
        return torch.autograd.grad(with_gradient, leaves, of_outs, allow_unused=True)

    def _cut(self, x: torch.Tensor, tile: slice) -> torch.Tensor:
        return x.narrow(self.dim, tile.start, tile.stop - tile.start)

    def _autocast(self) -> AbstractContextManager:
        if self.autocast_dtype is None:
            return nullcontext()
        # A weight that autocast casts without gradients must not be found again by a call with gradients.
        return torch.autocast(self.device.type, self.autocast_dtype, cache_enabled=False)


def _added(total: torch.Tensor | None, part: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the sum of a weight's gradients, in place, in at least float32: half types would round each tile's."""
    if part is None:
        return total
    if part.dtype in (torch.bfloat16, torch.float16):
        part = part.float()
    return part if total is None else total.add_(part)


class _KeepInputs(torch.autograd.Function):
    """Keeps a call's inputs; its backward is the call's. The output is empty, and only orders the two backwards."""

    @staticmethod
    def forward(ctx, call, count, *tensors):
        ctx.call = call
        ctx.save_for_backward(*tensors[:count])
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        return None, None, *ctx.call.backward(ctx.saved_tensors, ctx.needs_input_grad[2:])


class _TakeGradient(torch.autograd.Function):
    """Gives an output of a call its place in the graph, and the call the gradient of this output."""

    @staticmethod
    def forward(ctx, call, which, anchor, out):
        ctx.call = call
        ctx.which = which
        ctx.mark_dirty(out)  # it stays the tensor that it is, and is no view
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        before = ctx.call.grads[ctx.which]  # of another call of the norm
        ctx.call.grads[ctx.which] = grad if before is None else before + grad
        return None, None, grad.new_empty(0), None
