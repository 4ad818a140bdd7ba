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

[`install`] replaces forwards of modules whose class is known (`known_modules.py`), or that transformers dispatches as
experts. Short rows, and modules with something unknown inside, run as before.
"""

import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from transformers.utils import logging

from ..compat.deepspeed import is_zero3
from ..compat.fake_tensors import without_repetition
from ..compat.peft import looks_beyond_tokens
from ..utils.random_state import RandomState
from .known_modules import layer_part

logger = logging.get_logger(__name__)

# Tokens of a tile of "auto", by what the module is. A 4-bit weight is dequantized once for each tile. Experts have
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
    class_name = type(module).__name__
    for part in module.modules():
        part_name = type(part).__name__
        if part is not module and not _is_known(part):
            return f"{part_name} inside {class_name} is not known to compute each token by itself"
        if isinstance(part, FSDPModule):
            return f"FSDP gathers {part_name} in each of its calls, whose number differs between ranks"
        hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
        if part is not module and any(hooks):
            return f"{part_name} inside {class_name} has a hook, which would run once for each tile"
        # FSDP1 gives a module views of its one parameter, as plain attributes.
        for name, x in vars(part).items():
            if isinstance(x, torch.Tensor) and (name == "weight" or x.requires_grad):
                return f"a weight of {part_name} is part of one large parameter (FSDP1)"
    for parameter in module.parameters():
        if is_zero3(parameter):
            return "DeepSpeed's ZeRO-3 gathers a layer in each of its calls, whose number differs between ranks"
    return None


def _is_known(part: nn.Module) -> bool:
    """Whether a module inside of a known one computes each token by itself."""
    cls = type(part)
    is_of_known_package = cls.__module__.startswith(_KNOWN_PARTS)
    is_of_bitsandbytes = cls.__name__ in _OF_BITSANDBYTES
    if is_of_known_package or is_of_bitsandbytes or cls in _KNOWN_CLASSES:
        return True
    return layer_part(part) is not None


# --- on a model ------------------------------------------------------------------------------------------------------


class Tiled:
    """What a module in tiles keeps: it is the module's attribute `token_tiles`.

    Attributes:
        layer_part: what the module is, see [`layer_part`].
        own_forward: the module's forward before.
        layer: the nearest module around it that may be checkpointed, a layer or the model.
        tokens_per_tile: a number of tokens, or `"auto"`.
        norm: of an MLP, the norm that its layer has behind it; or `None`.
    """

    norm: nn.Module | None = None

    def __init__(self, layer_part: str, own_forward: Callable, layer: nn.Module | None, tokens_per_tile: int | str):
        self.layer_part = layer_part
        self.own_forward = own_forward
        self.layer = layer
        self.tokens_per_tile = tokens_per_tile

    def tiles(self, inputs: tuple) -> list[slice] | None:
        """The tiles of a call with these arguments; `None` if it runs whole."""
        first = inputs[0]
        if first.ndim not in (2, 3, 4):
            return None
        is_auto = self.tokens_per_tile == "auto"
        if is_auto:
            size = AUTO_TOKENS[self.layer_part]
            longest_whole = size * _FEW_TILES
        else:
            size = int(self.tokens_per_tile)
            longest_whole = size
        dim = _token_dim(first)
        # (B, T, H), (B, T, heads, D), (B, heads, T, D) or, of experts, (T, H)
        rows = first.shape[0] if dim else 1
        tokens = first.shape[dim]
        if rows * tokens <= longest_whole:
            return None
        # Without checkpointing, a user has chosen speed for memory, and tiles would compute the MLP once more.
        layer = self.layer
        is_checkpointed = layer is None or (layer.gradient_checkpointing and layer.training)
        if is_auto and not is_checkpointed and torch.is_grad_enabled():
            return None
        columns = max(1, size // rows)
        tiles = []
        for start in range(0, tokens, columns):
            end = min(start + columns, tokens)
            tiles.append(slice(start, end))
        return tiles


def _token_dim(x: torch.Tensor) -> int:
    if x.ndim == 2:
        return 0
    has_heads_first = x.ndim == 4 and x.shape[2] > x.shape[1]
    return 2 if has_heads_first else 1


def tile_size(value: int | str) -> int | str:
    """A value of the field `mlp_tokens_per_tile`: `"auto"`, `"off"` or a number of tokens; from a command line, text.

    Raises:
        ValueError: it is none of them.
    """
    size = value
    if isinstance(value, str) and value.isdecimal():
        size = int(value)
    is_number = type(size) is int and size > 0
    if size in ("auto", "off") or is_number:
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
    part = layer_part(module)
    if part is not None:
        module.token_tiles = Tiled(part, module.forward, layer, tokens_per_tile)
        module.forward = types.MethodType(_forward, module)
        return
    if hasattr(module, "gradient_checkpointing"):
        layer = module
    for child in module.children():
        _install_in(child, layer, tokens_per_tile)
    mlp = getattr(module, "mlp", None)
    tiled_mlp = getattr(mlp, "token_tiles", None)
    if tiled_mlp is not None:
        norms = [getattr(module, name) for name in _NORMS_BEHIND if hasattr(module, name)]
        tiled_norms = [norm for norm in norms if "token_tiles" in vars(norm)]
        tiled_mlp.norm = next(iter(tiled_norms), None)


def remove(model: nn.Module) -> None:
    """Give the modules of `model` their own forwards back."""
    for module in model.modules():
        tiled = vars(module).pop("token_tiles", None)
        forward_in_tiles = types.MethodType(_forward, module)
        # Under a wrapper of the user's own it stays, and lets the module's own forward run.
        if tiled is None or vars(module).get("forward") != forward_in_tiles:
            continue
        forward_of_class = types.MethodType(type(module).forward, module)
        if tiled.own_forward == forward_of_class:
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
    reason = looks_beyond_tokens(model) or "no MLP, norm or expert of the model is known"
    return "as stock TRL", f"{line}: {reason}"


# --- a call ----------------------------------------------------------------------------------------------------------


def _forward(self, *args, **kwargs):
    tiled = vars(self).get("token_tiles")
    if tiled is None:  # taken back, under a wrapper of the user's own
        return type(self).forward(self, *args, **kwargs)
    inputs = (*args, *kwargs.values())
    are_tensors = all(isinstance(x, torch.Tensor) for x in inputs)
    tiles = None
    if inputs and are_tensors and not torch.compiler.is_compiling():
        tiles = tiled.tiles(inputs)
    if tiles is None:
        return tiled.own_forward(*args, **kwargs)
    reason = _why_whole(self)
    if reason is not None:
        logger.warning_once("a long row runs without tiles: %s", reason)
        return tiled.own_forward(*args, **kwargs)
    first = inputs[0]
    call, anchor, version = getattr(first, "token_tiles", (None, None, None))
    is_norm_of_call = call is not None and call.norm is self and first._version == version
    if is_norm_of_call and torch.is_grad_enabled():
        return call.run_norm(first, anchor)
    names = tuple(kwargs)
    return _Call(self, tiles, inputs, names).run(inputs)


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
        modules = list(module.modules())
        if self.norm is not None:
            modules.append(self.norm)
        trained: dict[nn.Parameter, None] = {}  # each once, in order
        for part in modules:
            for parameter in part.parameters(recurse=False):
                if parameter.requires_grad:
                    trained[parameter] = None
        self.weights = list(trained)
        self.grads: list[torch.Tensor | None] = [None, None]
        self.autocast_dtype = None
        if torch.is_autocast_enabled(self.device.type):
            self.autocast_dtype = torch.get_autocast_dtype(self.device.type)
        # Any part may draw in training: dropout, and PEFT's layers in ways of their own.
        draws = any(part.training for part in modules)
        self.random_state = RandomState(self.device) if draws else None

    def run(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The module's output."""
        needs_gradient = bool(self.weights) or any(x.requires_grad for x in inputs)
        if not needs_gradient or not torch.is_grad_enabled():
            return self._in_tiles(self._call_function, inputs)
        # The inputs are kept before the tiles run: there the recomputation of a checkpointed layer may end.
        anchor = _KeepInputs.apply(self, len(inputs), *inputs, *self.weights)
        out = self._in_tiles(self._call_function, inputs)
        out = _TakeGradient.apply(self, 0, anchor, out)
        if self.norm is not None:
            out.token_tiles = (self, anchor, out._version)  # the norm of what is changed in place is another
        return out

    def run_norm(self, out: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """The norm of the module's output."""
        normed = self._in_tiles(self.norm.token_tiles.own_forward, (out,))
        return _TakeGradient.apply(self, 1, anchor, normed)

    def _call_function(self, *inputs: torch.Tensor) -> torch.Tensor:
        count = len(inputs) - len(self.names)
        keyword_inputs = inputs[count:]
        by_name = dict(zip(self.names, keyword_inputs, strict=True))
        return self.function(*inputs[:count], **by_name)

    def _in_tiles(self, function: Callable, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out = None
        with torch.no_grad(), self._autocast():
            for tile in without_repetition(self.tiles, inputs[0]):
                # Without a name for these copies, which the next tile would otherwise find still there.
                of_tile = function(*(self._cut(x, tile).contiguous() for x in inputs))
                if out is None:
                    shape = list(of_tile.shape)
                    shape[self.dim] = inputs[0].shape[self.dim]
                    out = of_tile.new_empty(shape)
                self._cut(out, tile).copy_(of_tile)
        return out

    def backward(self, inputs: tuple[torch.Tensor, ...], needs: tuple[bool, ...]) -> list[torch.Tensor | None]:
        """The gradients of inputs and weights, for which `needs` is true; summed over the tiles."""
        needs_inputs = needs[: len(inputs)]
        needs_weights = needs[len(inputs) :]
        input_grads: list[torch.Tensor | None] = []
        for x, needed in zip(inputs, needs_inputs, strict=True):
            input_grads.append(torch.empty_like(x) if needed else None)
        weights = [weight for weight, needed in zip(self.weights, needs_weights, strict=True) if needed]
        sums: dict[nn.Parameter, torch.Tensor] = {}
        replayed: AbstractContextManager = nullcontext()
        if self.random_state is not None:
            replayed = self.random_state.again()
        with replayed, torch.enable_grad(), self._autocast():
            for tile in without_repetition(self.tiles, inputs[0]):
                self._add_gradients_of(tile, inputs, input_grads, weights, sums)
        self.grads = [None, None]
        weight_grads: list[torch.Tensor | None] = []
        for weight in self.weights:
            total = sums.get(weight)
            weight_grads.append(None if total is None else total.to(weight.dtype))
        return input_grads + weight_grads

    def _add_gradients_of(
        self,
        tile: slice,
        inputs: tuple[torch.Tensor, ...],
        input_grads: list[torch.Tensor | None],
        weights: list[nn.Parameter],
        sums: dict[nn.Parameter, torch.Tensor],
    ) -> None:
        """Write a tile's part of the inputs' gradients, and add to the sums of the weights'."""
        needed_grads = [grad for grad in input_grads if grad is not None]
        needs_inputs = [grad is not None for grad in input_grads]
        gradients = self._gradients_of(tile, inputs, needs_inputs, weights)
        count = len(needed_grads)
        for grad, part in zip(needed_grads, gradients[:count], strict=True):
            where = self._cut(grad, tile)
            if part is None:
                where.zero_()
            else:
                where.copy_(part)
        for weight, part in zip(weights, gradients[count:], strict=True):
            if part is None:
                continue
            # Sums of half-precision numbers would be rounded once for each tile.
            if part.dtype in (torch.bfloat16, torch.float16):
                part = part.float()
            if weight in sums:
                sums[weight].add_(part)
            else:
                sums[weight] = part

    def _gradients_of(
        self, tile: slice, inputs: tuple[torch.Tensor, ...], needs_inputs: list[bool], weights: list[nn.Parameter]
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of a tile of the inputs that need one, and of the weights; the tile's forward runs again."""
        parts = [self._cut(x, tile).detach().contiguous() for x in inputs]
        wanted = []
        for part, needed in zip(parts, needs_inputs, strict=True):
            if needed:
                wanted.append(part.requires_grad_())
        wanted += weights
        outs = [self._call_function(*parts)]
        if self.grads[1] is not None:
            outs.append(self.norm.token_tiles.own_forward(outs[0]))
        with_grads = []
        out_grads = []
        for out, grad in zip(outs, self.grads, strict=False):  # without a norm there is one output
            # An adapter that this tile was drawn to leave out leaves nothing that has gradients.
            if grad is not None and out.requires_grad:
                with_grads.append(out)
                out_grads.append(self._cut(grad, tile))
        if not with_grads:
            return [None] * len(wanted)
        return torch.autograd.grad(with_grads, wanted, out_grads, allow_unused=True)

    def _cut(self, x: torch.Tensor, tile: slice) -> torch.Tensor:
        return x.narrow(self.dim, tile.start, tile.stop - tile.start)

    def _autocast(self) -> AbstractContextManager:
        if self.autocast_dtype is None:
            return nullcontext()
        # A weight that autocast casts without gradients must not be found again by a call with gradients.
        return torch.autocast(self.device.type, self.autocast_dtype, cache_enabled=False)


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
        _, _, *needs = ctx.needs_input_grad
        gradients = ctx.call.backward(ctx.saved_tensors, tuple(needs))
        return None, None, *gradients


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
        grads = ctx.call.grads
        before = grads[ctx.which]  # of another call of the norm
        if before is not None:
            grad = before + grad
        grads[ctx.which] = grad
        anchor_grad = grad.new_empty(0)
        return None, None, anchor_grad, None
