"""A few rows computed both ways, packed and padded, before a model's first pass: log-probabilities and gradients.

In float32 the two agree to a few units in the last place, and fixed limits serve. In half precision (or TF32) single
tokens differ by hundredths of a nat, by how much depends on the model. So it is measured: the same padded rows are
computed again with their embeddings moved by as much as rounding moves numbers anyway, and every later rounding falls
out differently. What is several times further off than that is no rounding. A fault of a few percent in every token
(an attention scaled by 1.03) hides among single tokens and shows in the gradient's projection, where rounding averages
out.

No forward holds more tokens than the step's own ([`cut_sample`]). All ranks judge one set of sums, so that they decide
alike.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..compat.fsdp import has_unreduced_gradients, misfit, reducing
from ..scoring.transfer import to_device
from .scope import is_out_of_memory, reason_of

# Mean |Δ log-probability| in nats that is never called a fault. Padded and packed float32 passes were never further
# apart than 6e-5 (SmolLM2-135M), while a completion cut off its prompt, a lost window or a leaking recurrent state
# moves them by 0.1 to 2. First tokens, predicted across the border of two segments, are judged by themselves, too.
MEAN_DIFFERENCE_FP32 = 1e-3
MEAN_DIFFERENCE_HALF, FIRST_DIFFERENCE_HALF = 0.05, 0.03
# Norm of the difference of the gradients over the norm of the gradient.
GRADIENT_DIFFERENCE_FP32, GRADIENT_DIFFERENCE_HALF = 1e-3, 0.25
# Beyond that, so many times what rounding moved the padded pass by, twice as many for a single token (docs/LOG.md).
OVER_NOISE, NOISE_PASSES = 3.0, 5
# How far the packed gradient's projection on the padded one may be from 1. Beyond that, so many times what rounding
# changed in it, and in the gradient, of which it leaves 1 / sqrt(tokens) in a projection (10,000 healthy starts,
# docs/LOG.md).
PROJECTION_OFF, PROJECTION_OVER_NOISE = 0.01, 4.0
# Rows to compare. Where single tokens say little, more of them; where there are fewer, rounding is measured more
# often.
ROWS_FP32, ROWS_HALF = 4, 8
MOST_NOISE_PASSES = 16
# One token counts for no more than this many nats: rounding can move a very unlikely one by any amount.
MOST_PER_TOKEN = 1.0
# A log-probability of exactly zero where the padded pass has one below this is missing.
MISSING_BELOW = -0.5


def reduced_over_ranks(values: list[float], device: torch.device, reduce: str = "MAX") -> list[float]:
    """Element-wise `"MAX"` or `"SUM"` over ranks; the values themselves in a single process. Every rank has to call
    it.
    """
    if not torch.distributed.is_initialized() or _judges_alone.get():
        return values
    tensor = to_device(torch.tensor(values), device)
    torch.distributed.all_reduce(tensor, op=getattr(torch.distributed.ReduceOp, reduce))
    return tensor.tolist()


_judges_alone = ContextVar("judges_alone", default=False)


@contextlib.contextmanager
def judging_alone() -> Iterator[None]:
    """Inside, this rank decides by itself: others may not come to the same place."""
    token = _judges_alone.set(True)
    try:
        yield
    finally:
        _judges_alone.reset(token)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether ranks meet in every forward of `model` or of a part of it, since each holds a part of its weights."""
    is_part = any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())
    return is_part or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def rounding_unit(model: PreTrainedModel, device: torch.device) -> float:
    """Root mean square of a rounding's relative error in what `model` multiplies in; 0 where fixed limits serve."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtypes |= {module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype")}  # 4-bit layers
    if torch.is_autocast_enabled(device.type):
        dtypes = {torch.get_autocast_dtype(device.type)}
    tf32 = torch.float32 in dtypes and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    half = [torch.finfo(dtype).eps / 4 for dtype in dtypes & {torch.bfloat16, torch.float16}]
    return max([*half, 2.0**-12 if tf32 else 0.0])


def compares_gradients(model: torch.nn.Module) -> bool:
    """Whether gradients are recorded and a plain `backward` through `model` may be undone.

    So it is where nothing wraps it but DDP, or FSDP2 with nothing pending; not where the wrapper has a backward of its
    own (DeepSpeed, FSDP1), nor in a torch whose FSDP2 is not known.
    """
    if isinstance(model, FSDPModule):
        return torch.is_grad_enabled() and misfit() is None and not has_unreduced_gradients(model)
    # By class: DeepSpeed's engine answers for the attributes of what is in it, and its ZeRO marks the parameters.
    is_known = isinstance(model, (DistributedDataParallel, PreTrainedModel, PeftModel))
    return torch.is_grad_enabled() and is_known and not any(hasattr(p, "ds_id") for p in model.parameters())


class Cut(NamedTuple):
    """Rows of one forward of the comparison; `counts` is 0 where it only keeps this rank in step with the others."""

    rows: slice
    counts: int = 1


class Cuts(NamedTuple):
    """The forwards of one packed and of one padded pass over the rows to compare, equally many on every rank."""

    packed: list[Cut]
    padded: list[Cut]


def cut_sample(packed: list[tuple[int, int]], rows: int, width: int, tokens: int, device: torch.device) -> Cuts:
    """Cut the passes over `rows` rows so that no forward holds more tokens than the step's own. Every rank has to call
    it.

    Args:
        packed: this rank's rows `[first, last)` of each packed forward.
        width: columns of the padded batch.
        tokens: of the step's own forward on this rank.
    """
    most, at_once = reduced_over_ranks([len(packed), -max(1, tokens // width)], device)
    cuts = [Cut(slice(*ends)) for ends in packed]
    cuts += [Cut(cuts[-1].rows, 0)] * (int(most) - len(cuts))
    at_once = int(-at_once)
    return Cuts(cuts, [Cut(slice(first, min(first + at_once, rows))) for first in range(0, rows, at_once)])


def compare(
    model: torch.nn.Module,
    packed: Callable[[slice], torch.Tensor],
    padded: Callable[[slice], torch.Tensor],
    scored_BC: torch.Tensor,
    cuts: Cuts,
    embeddings: torch.nn.Module,
    unit: float,
) -> str | None:
    """What is wrong with the packed pass over a few rows, judged alike by every rank; `None` for nothing.

    Every rank has to call it, with equally many rows. Gradients are those of a sum over the scored tokens with random
    weights. Each pass adds its gradients with a sign, so there is never more than one copy of them. If one rank runs
    out of memory, all ranks raise. If ranks meet in the passes themselves, the others wait until the launcher ends
    them.

    Args:
        model: the root module, wrappers included.
        packed: log-probabilities `(n, C)` of some of the rows from one packed forward; it raises what goes wrong.
        padded: the same from one padded forward.
        scored_BC: `(R, C)`, the completion tokens to compare.
        cuts: of [`cut_sample`].
        embeddings, unit: what `embeddings` give is moved by [`rounding_unit`].
    """
    device = scored_BC.device
    sharded = _meet_in_passes(model)
    draw = torch.Generator().manual_seed(0)  # not signs: equal rows would cancel
    weight_BC = torch.where(scored_BC, torch.randn(scored_BC.shape, generator=draw).to(device), 0.0)

    def backward(values_BC: torch.Tensor, cut: Cut, sign: float) -> torch.Tensor:
        if torch.is_grad_enabled():
            (values_BC * (sign * cut.counts * weight_BC[cut.rows])).sum().backward()
        return values_BC.detach()

    def whole_pass(forward: Callable[[slice], torch.Tensor], parts: list[Cut], sign: float) -> torch.Tensor:
        values_BC = torch.zeros_like(weight_BC)
        for cut in parts:
            values_BC[cut.rows] = backward(forward(cut.rows), cut, sign)
        return values_BC

    def against_padded(packed_BC: torch.Tensor, gradients: "_Gradients") -> dict[str, float]:
        found = {"gradient": gradients.squared_norm(), "gradient_noise": 0.0}
        padded_BC = whole_pass(padded, cuts.padded, -1.0)
        noise_NBC = []
        found["gradient_off"] = gradients.squared_norm()
        passes = NOISE_PASSES * max(1, ROWS_HALF // len(scored_BC)) if unit else 0
        for seed in range(min(passes, MOST_NOISE_PASSES)):
            if seed == 0 and torch.is_grad_enabled():
                whole_pass(packed, cuts.packed, -1.0)  # what is left is the padded gradient
                found["gradient_padded"] = gradients.squared_norm()
            else:
                gradients.clear()
            with moved(embeddings, unit, seed):
                noise_NBC.append(whole_pass(padded, cuts.padded, 1.0) - padded_BC)
            # Of the first what rounding changed in the gradient, of the others how long it is then.
            found[f"gradient_moved_{seed}" if seed else "gradient_noise"] = gradients.squared_norm()
        return found | statistics(packed_BC, padded_BC, noise_NBC, scored_BC)

    with _gradients_aside(model) as gradients:
        packed_BC = torch.zeros_like(weight_BC)
        for cut in cuts.packed:
            values_BC, error = _attempt(sharded, packed, cut.rows)
            if problem := _agree(error, device):
                return problem
            values_BC, error = _attempt(sharded, backward, values_BC, cut, 1.0)
            if problem := _agree(error, device):
                return problem
            packed_BC[cut.rows] = values_BC
        found, error = _attempt(sharded, against_padded, packed_BC, gradients)
        if problem := _agree(error, device):
            return problem
    found = dict(zip(found, reduced_over_ranks(list(found.values()), device, "SUM"), strict=True))
    return verdict(found, exact=not unit)


def _meet_in_passes(model: torch.nn.Module) -> bool:
    """Whether the weights of `model` are gathered in its passes, so that a rank that leaves one leaves the others
    waiting.
    """
    is_known = isinstance(model, (DistributedDataParallel, PreTrainedModel, PeftModel))
    return not is_known or any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())


def _attempt(sharded: bool, work: Callable, *args: Any) -> tuple[Any, Exception | None]:
    """What `work` gives, or the error that ended it, for [`_agree`]; raised at once if ranks would wait in the pass
    anyway.
    """
    try:
        return work(*args), None
    except Exception as error:
        if sharded and is_out_of_memory(error):
            raise
        return None, error


def _agree(error: Exception | None, device: torch.device) -> str | None:
    """Why a rank could not go on, on all of them; if one ran out of memory, all raise. Every rank has to call it."""
    out_of_memory = error is not None and is_out_of_memory(error)
    failed, ended = reduced_over_ranks([float(error is not None), float(out_of_memory)], device)
    if out_of_memory:
        raise error
    if ended:
        raise torch.OutOfMemoryError("another rank ran out of memory while packed rows were compared with padded ones")
    if error is not None:
        return reason_of(error)
    return "another rank's packed pass failed" if failed else None


def statistics(
    packed_BC: torch.Tensor, padded_BC: torch.Tensor, noise_NBC: Sequence[torch.Tensor], scored_BC: torch.Tensor
) -> dict[str, float]:
    """Sums over this rank's tokens, to be added over ranks; `noise_NBC`: how far rounding moved the padded ones, N
    times.
    """

    def clipped(values: torch.Tensor) -> torch.Tensor:
        return values.float().abs().nan_to_num(MOST_PER_TOKEN).clamp(max=MOST_PER_TOKEN)

    off_BC = clipped(packed_BC - padded_BC)
    noise_BC = sum(map(clipped, noise_NBC), torch.zeros_like(off_BC)) / max(len(noise_NBC), 1)
    missing_BC = ((packed_BC == 0) & (padded_BC < MISSING_BELOW)) | (~packed_BC.isfinite() & padded_BC.isfinite())
    found = {"missing": (scored_BC & missing_BC).sum()}
    # A completion begins in any column, and a row may have several of them.
    first_BC = scored_BC.clone()
    first_BC[:, 1:] &= ~scored_BC[:, :-1]
    for name, where_BC in (("", scored_BC), ("first_", first_BC)):
        found[f"{name}tokens"] = where_BC.sum()
        found[f"{name}off"], found[f"{name}noise"] = (x[where_BC].sum() for x in (off_BC, noise_BC))
    return {name: float(value) for name, value in found.items()}


def verdict(found: dict[str, float], exact: bool) -> str | None:
    """What is wrong with a packed pass; `None` where rounding explains the difference, or where fixed limits hold
    (`exact`).

    `found`: [`statistics`], and squares of norms, which add up over shards and ranks: of the packed gradient, of its
    difference from the padded one, of what rounding changes in that (`gradient_noise`), of the padded one, and of it
    as rounding moves it (`gradient_moved_1`, ...).
    """
    if found["missing"]:
        return f"{found['missing']:.0f} log-probabilities are missing or not finite: a difference in log-probability"
    floors = (MEAN_DIFFERENCE_FP32,) * 2 if exact else (MEAN_DIFFERENCE_HALF, FIRST_DIFFERENCE_HALF)
    noise = 0.0
    for name, what, floor in (("", "mean", floors[0]), ("first_", "first tokens' mean", floors[1])):
        count = max(found[f"{name}tokens"], 1)
        noise = max(noise, found[f"{name}noise"] / count)  # of all tokens, where that of few is small by chance
        off = found[f"{name}off"] / count
        limit = max(floor, OVER_NOISE * (1 + count**-0.5) * noise)
        if off > limit:
            return f"{what} difference in log-probability from the padded pass is {off:.2g} nats (limit {limit:.2g})"
    size, off, moved_by = (found.get(name, 0.0) ** 0.5 for name in ("gradient", "gradient_off", "gradient_noise"))
    limit = GRADIENT_DIFFERENCE_FP32 if exact else GRADIENT_DIFFERENCE_HALF
    if not off <= max(limit * size, OVER_NOISE * moved_by):  # NaN is wrong as well
        return f"gradients differ from the padded pass by {off:.2g} of a norm of {size:.2g} (limit {limit:.2g} of it)"
    return None if exact else _projection_verdict(found)


def _projection_verdict(found: dict[str, float]) -> str | None:
    """What is wrong with the length of the packed gradient p along the padded one d; `None` if rounding explains it.

    Rounding moves both at random, which makes <p, d> / |d|² less than 1 by the square of what it moved d by. |p - d|²
    / 2 |d|² makes up for that if it moved p as far, and what is left is (1 + |p|² / |d|²) / 2.
    """
    padded = found.get("gradient_padded", 0.0)
    if not padded:
        return None
    off = (found["gradient"] / padded - 1) / 2
    moved_off = [(value / padded - 1) / 2 for name, value in found.items() if name.startswith("gradient_moved_")]
    noise = found["gradient_noise"] / padded
    tokens = max(found["tokens"], 1)
    by_rounding = max((sum(x**2 for x in moved_off) / max(len(moved_off), 1)) ** 0.5, (noise / tokens) ** 0.5)
    # The last is for one of the two having no rounding at all.
    limit = max(PROJECTION_OFF, PROJECTION_OVER_NOISE * by_rounding) + noise / 2
    if not abs(off) <= limit:
        return f"the gradient is {1 + off:.3f} times as long as the padded pass's along it (limit 1 ± {limit:.2g})"
    return None


@contextlib.contextmanager
def moved(embeddings: torch.nn.Module, unit: float, seed: int) -> Iterator[None]:
    """The numbers that `embeddings` gives are moved by about `unit`, relative to themselves, up or down."""
    draw = torch.Generator().manual_seed(seed)

    def move(module, args, output):
        # Rows times columns: a number for each entry would be as large as the output.
        sign_L1 = torch.randint(0, 2, (output.shape[-2], 1), generator=draw) * 2.0 - 1.0
        move_H = unit * torch.randn(output.shape[-1], generator=draw)
        return (output.float() * (1.0 + sign_L1.to(output.device) * move_H.to(output.device))).to(output.dtype)

    handle = embeddings.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


class _Gradients:
    """What the passes of a comparison leave in `.grad`; nothing where gradients are not compared."""

    def __init__(self, parameters: list[torch.nn.Parameter]):
        self.parameters = parameters

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def squared_norm(self) -> float:
        """Of all of them together, of this rank's shards where they are sharded."""
        grads = (parameter.grad for parameter in self.parameters if parameter.grad is not None)
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        # Summed in float32 without a copy in a wider type: the gradient of an embedding has gigabytes.
        wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
        return sum(float(torch.linalg.vector_norm(grad, dtype=wide)) ** 2 for grad in grads)


@contextlib.contextmanager
def _gradients_aside(model: torch.nn.Module) -> Iterator[_Gradients]:
    """Gradients start from nothing inside and are what they were afterwards; none where they are not compared."""
    if not compares_gradients(model):
        with torch.no_grad():
            yield _Gradients([])
        return
    # Under DDP each rank compares its own; FSDP2's unreduced gradients would be whole ones, kept until the next
    # backward.
    reduction = model.no_sync() if isinstance(model, DistributedDataParallel) else reducing(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # has the optimizer's parameters while it is sharded
            module.reshard()
    gradients = _Gradients([parameter for parameter in model.parameters() if parameter.requires_grad])
    before = [parameter.grad for parameter in gradients.parameters]
    try:
        gradients.clear()
        with reduction:
            yield gradients
    finally:
        for parameter, gradient in zip(gradients.parameters, before, strict=True):
            parameter.grad = gradient
