"""A few rows computed both ways, packed and padded, before a model's first pass: log-probabilities and gradients.

In float32 the two agree to a few units in the last place, and fixed limits serve. In half precision (or TF32) single tokens
differ by hundredths of a nat, by how much depends on the model. So it is measured: the same padded rows are computed again with
their embeddings moved by as much as rounding moves numbers anyway, and every later rounding falls out differently. What is
several times further off than that is no rounding. All ranks judge one set of sums, so that they decide alike.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..compat.fsdp import has_unreduced_gradients, misfit, reducing
from ..scoring.request import LogProbs, PassRequest
from ..scoring.transfer import to_device
from .scope import is_out_of_memory, reason_of

# Mean |Δ log-probability| in nats that is never called a fault. Padded and packed float32 passes were never further apart
# than 6e-5 (SmolLM2-135M), while a completion cut off its prompt, a lost window or a leaking recurrent state moves
# them by 0.1 to 2. First tokens, predicted across the border of two segments, are judged by themselves, too.
MEAN_DIFFERENCE_FP32 = 1e-3
MEAN_DIFFERENCE_HALF, FIRST_DIFFERENCE_HALF = 0.05, 0.03
# Norm of the difference of the gradients over the norm of the gradient.
GRADIENT_DIFFERENCE_FP32, GRADIENT_DIFFERENCE_HALF = 1e-3, 0.25
# Beyond that, so many times what rounding moved the padded pass by, twice as many for a single token (docs/LOG.md).
OVER_NOISE, NOISE_PASSES = 3.0, 4
# Rows to compare. Where single tokens say little, more of them.
ROWS_FP32, ROWS_HALF = 4, 8
# One token counts for no more than this many nats: rounding can move a very unlikely one by any amount.
MOST_PER_TOKEN = 1.0
# A log-probability of exactly zero where the padded pass has one below this is missing.
MISSING_BELOW = -0.5


def reduced_over_ranks(values: list[float], device: torch.device, reduce: str = "MAX") -> list[float]:
    """Element-wise `"MAX"` or `"SUM"` over ranks; the values themselves in a single process. Every rank has to call it."""
    if not torch.distributed.is_initialized():
        return values
    tensor = to_device(torch.tensor(values), device)
    torch.distributed.all_reduce(tensor, op=getattr(torch.distributed.ReduceOp, reduce))
    return tensor.tolist()


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

    So it is where nothing wraps it but DDP, or FSDP2 with nothing pending; not where the wrapper has a backward of its own
    (DeepSpeed, FSDP1), nor in a torch whose FSDP2 is not known.
    """
    if isinstance(model, FSDPModule):
        return torch.is_grad_enabled() and misfit() is None and not has_unreduced_gradients(model)
    # By class: DeepSpeed's engine answers for the attributes of what is in it, and its ZeRO marks the parameters.
    is_known = isinstance(model, (DistributedDataParallel, PreTrainedModel, PeftModel))
    return torch.is_grad_enabled() and is_known and not any(hasattr(p, "ds_id") for p in model.parameters())


def compare(
    request: PassRequest,
    packed: Callable[[PassRequest], torch.Tensor],
    padded: Callable[[PassRequest], LogProbs],
    embeddings: torch.nn.Module,
    unit: float,
) -> str | None:
    """What is wrong with the packed pass over the rows of `request`, judged alike by every rank; `None` for nothing.

    Every rank has to call it, with equally many rows. The packed pass is one forward of all rows, the padded one goes row by row,
    so neither holds more tokens than a step's own pass. Gradients are those of a sum over the completion tokens with random
    weights; each pass is added to the others' with its sign, so there is never more than one copy of them.
    `packed` gives log-probabilities `(R, C)` or raises what goes wrong; what `embeddings` give is moved by [`rounding_unit`].
    """
    device, problem, noise_NBC = request.input_ids.device, None, []
    rows = [request.rows([row]) for row in range(len(request.input_ids))]
    scored_BC = request.attention_mask[:, -request.logits_to_keep :].bool()
    with _gradients_aside(request.model) as squared_norm:
        try:
            packed_BC = packed(request)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            problem = reason_of(error)
        if any(reduced_over_ranks([int(problem is not None)], device)):
            return problem or "another rank's packed pass failed"
        draw = torch.Generator().manual_seed(0)  # not signs: equal rows would cancel
        weight_BC = torch.where(scored_BC, torch.randn(scored_BC.shape, generator=draw).to(device), 0.0)

        def backward(values_BC: torch.Tensor, weight_BC: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                (values_BC * weight_BC).sum().backward()
            return values_BC.detach()

        def row_by_row(sign: float) -> torch.Tensor:
            return torch.cat([backward(padded(row)[0], sign * weight_BC[i : i + 1]) for i, row in enumerate(rows)])

        packed_BC = backward(packed_BC, weight_BC)
        squares = {"gradient": squared_norm(), "gradient_noise": 0.0}
        padded_BC = row_by_row(-1.0)
        squares["gradient_off"] = squared_norm()
        if torch.is_grad_enabled() and unit:
            backward(packed(request), -weight_BC)
            with moved(embeddings, unit, seed=0):
                row_by_row(1.0)
            squares["gradient_noise"] = squared_norm()
    for seed in range(NOISE_PASSES if unit else 0):
        with torch.no_grad(), moved(embeddings, unit, seed + 1):
            noise_NBC.append(padded(request)[0] - padded_BC)
    found = statistics(packed_BC, padded_BC, noise_NBC, scored_BC) | squares
    found = dict(zip(found, reduced_over_ranks(list(found.values()), device, "SUM"), strict=True))
    return verdict(found, exact=not unit)


def statistics(
    packed_BC: torch.Tensor, padded_BC: torch.Tensor, noise_NBC: Sequence[torch.Tensor], scored_BC: torch.Tensor
) -> dict[str, float]:
    """Sums over this rank's tokens, to be added over ranks; `noise_NBC`: how far rounding moved the padded ones, N times."""

    def clipped(values: torch.Tensor) -> torch.Tensor:
        return values.float().abs().nan_to_num(MOST_PER_TOKEN).clamp(max=MOST_PER_TOKEN)

    off_BC = clipped(packed_BC - padded_BC)
    noise_BC = sum(map(clipped, noise_NBC), torch.zeros_like(off_BC)) / max(len(noise_NBC), 1)
    missing_BC = ((packed_BC == 0) & (padded_BC < MISSING_BELOW)) | (~packed_BC.isfinite() & padded_BC.isfinite())
    found = {"missing": (scored_BC & missing_BC).sum()}
    for name, columns in (("", slice(None)), ("first_", slice(1))):
        where = scored_BC[:, columns]
        found[f"{name}tokens"] = where.sum()
        found[f"{name}off"], found[f"{name}noise"] = (x[:, columns][where].sum() for x in (off_BC, noise_BC))
    return {name: float(value) for name, value in found.items()}


def verdict(found: dict[str, float], exact: bool) -> str | None:
    """What is wrong with a packed pass; `None` where rounding explains the difference, or where fixed limits hold (`exact`).

    `found`: [`statistics`], and of the packed pass's gradient, its difference from the padded one's and what rounding changed in
    that, the squares of the norms, which add up over shards and ranks.
    """
    if found["missing"]:
        return f"{found['missing']:.0f} log-probabilities are missing or not finite: a difference in log-probability"
    floors = (MEAN_DIFFERENCE_FP32,) * 2 if exact else (MEAN_DIFFERENCE_HALF, FIRST_DIFFERENCE_HALF)
    noise = 0.0
    for name, what, floor in (("", "mean", floors[0]), ("first_", "first tokens' mean", floors[1])):
        count = max(found[f"{name}tokens"], 1)
        noise = max(noise, found[f"{name}noise"] / count)  # of all tokens, where that of few is small by chance
        off, limit = found[f"{name}off"] / count, max(floor, OVER_NOISE * (1 + count**-0.5) * noise)
        if off > limit:
            return f"{what} difference in log-probability from the padded pass is {off:.2g} nats (limit {limit:.2g})"
    size, off, moved_by = (found.get(name, 0.0) ** 0.5 for name in ("gradient", "gradient_off", "gradient_noise"))
    limit = GRADIENT_DIFFERENCE_FP32 if exact else GRADIENT_DIFFERENCE_HALF
    if not off <= max(limit * size, OVER_NOISE * moved_by):  # NaN is wrong as well
        return f"gradients differ from the padded pass by {off:.2g} of a norm of {size:.2g} (limit {limit:.2g} of it)"
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


@contextlib.contextmanager
def _gradients_aside(model: torch.nn.Module) -> Iterator[Callable[[], float]]:
    """Gradients start from nothing inside and are what they were afterwards; none where they are not compared.

    Gives the square of the norm of all of them together, of this rank's shards where they are sharded.
    """
    if not compares_gradients(model):
        with torch.no_grad():
            yield lambda: 0.0
        return
    # Under DDP each rank compares its own; FSDP2's unreduced gradients would be whole ones, kept until the next backward.
    reduction = model.no_sync() if isinstance(model, DistributedDataParallel) else reducing(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # has the optimizer's parameters while it is sharded
            module.reshard()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]

    def squared_norm() -> float:
        grads = (parameter.grad for parameter in parameters if parameter.grad is not None)
        grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        # Summed in float32 without a copy in a wider type: the gradient of an embedding has gigabytes.
        wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
        return sum(float(torch.linalg.vector_norm(grad, dtype=wide)) ** 2 for grad in grads)

    try:
        for parameter in parameters:
            parameter.grad = None
        with reduction:
            yield squared_norm
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
