"""Compare packed with padded rows before a model's first pass: values and gradients of a few rows.

Values are log-probabilities, or [`first_pass.projections`] of hidden states, which are numbers of the same size.

A difference within fixed limits is no fault. In float32 the two agree to a few units in the last place, and the limits
decide. In half precision (or TF32) single tokens differ by hundredths of a nat, and the model decides by how much. So
beyond the limits the effect of rounding is measured: the same padded rows are computed again with their embeddings
perturbed by as much as one rounding, so that every later rounding changes too. A difference that is several times
larger than this effect is a fault. A fault of a few percent in every token (an attention scaled by 1.03) is not
visible in single tokens. It is visible in the gradient's projection, in which rounding averages out.

No forward holds more tokens than the step's own ([`cut_sample`]). All ranks decide by the same sums, so they decide
alike.

Suffixes of shapes: B compared rows, C values of a row, N passes, L tokens of a row, H hidden size.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..compat.deepspeed import is_zero3
from ..compat.fsdp import has_unreduced_gradients, misfit, reducing
from ..compat.peft import is_peft
from .problems import CannotPack, is_out_of_memory, reason_of
from .ranks import reduced_over_ranks

# Mean |Δ log-probability| in nats that is never called a fault. Padded and packed float32 passes were never further
# apart than 6e-5 (SmolLM2-135M), while a completion cut off its prompt, a lost window or a leaking recurrent state
# changes them by 0.1 to 2. First tokens, predicted across the border of two segments, are judged by themselves, too.
MEAN_DIFFERENCE_FP32 = 1e-3
MEAN_DIFFERENCE_HALF = 0.05
FIRST_DIFFERENCE_HALF = 0.03
# Norm of the difference of the gradients over the norm of the gradient.
GRADIENT_DIFFERENCE_FP32 = 1e-3
GRADIENT_DIFFERENCE_HALF = 0.25
# A larger difference is allowed up to this multiple of the effect of rounding on the padded pass, and up to twice the
# multiple for a single token (docs/LOG.md). The effect is the mean over this number of passes.
OVER_NOISE = 3.0
NOISE_PASSES = 5
# The projection of the packed gradient on the padded one may differ from 1 by this. A larger difference is allowed up
# to this multiple of the effect of rounding: on the projection itself, or on the gradient, of which 1 / sqrt(tokens)
# remains in a projection (10,000 healthy starts, docs/LOG.md).
PROJECTION_OFF = 0.01
PROJECTION_OVER_NOISE = 4.0
# What is compared.
LOG_PROBABILITY = "log-probability"
HIDDEN_STATES = "hidden states"
# Number of rows to compare: more in half precision, because a single token proves little. If a batch has fewer rows,
# the effect of rounding is measured in more passes.
ROWS_FP32 = 4
ROWS_HALF = 8
MOST_NOISE_PASSES = 16
# One token counts for no more than this many nats: rounding can change a very unlikely one by any amount.
MOST_PER_TOKEN = 1.0
# A log-probability of exactly zero is missing if the padded pass has one below this.
MISSING_BELOW = -0.5


def rounding_unit(model: PreTrainedModel, device: torch.device) -> float:
    """Root mean square of the relative rounding error in the dtype of `model`'s products; 0 if fixed limits serve."""
    if torch.is_autocast_enabled(device.type):
        dtypes = {torch.get_autocast_dtype(device.type)}
    else:
        dtypes = {parameter.dtype for parameter in model.parameters()}
        dtypes.update(module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype"))  # 4 bits
        # Without a gradient bitsandbytes computes these in bfloat16 on CPUs that have it, whatever is asked for.
        if device.type == "cpu" and not (model.training or torch.is_grad_enabled()):
            in_bfloat16 = (vars(module).get("support_avx512bf16_for_cpu") for module in model.modules())
            dtypes.update({torch.bfloat16} if any(in_bfloat16) else ())
    units = [torch.finfo(dtype).eps / 4 for dtype in dtypes & {torch.bfloat16, torch.float16}]
    if torch.float32 in dtypes and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        units.append(2.0**-12)
    return max(units, default=0.0)


def compares_gradients(model: torch.nn.Module) -> bool:
    """Whether gradients are recorded and the effect of a plain `backward` through `model` can be undone.

    It can be undone if the model has no wrapper, or DDP, or FSDP2 without unreduced gradients. It cannot if the
    wrapper has a backward of its own (DeepSpeed, FSDP1), if the installed torch's FSDP2 is not known, or if an
    optimizer steps inside the backward.
    """
    if isinstance(model, FSDPModule):
        return torch.is_grad_enabled() and misfit() is None and not has_unreduced_gradients(model)
    # By class, because DeepSpeed's engine passes attributes of its model through. ZeRO marks the parameters.
    is_known = isinstance(model, (DistributedDataParallel, PreTrainedModel)) or is_peft(model)
    if not (torch.is_grad_enabled() and is_known):
        return False
    return not any(is_zero3(p) or p._post_accumulate_grad_hooks for p in model.parameters())


# The forwards of a pass over the rows to compare: of each its rows, and how often it counts. That is 0 if only other
# ranks need the forward, else 1.
Cuts = list[tuple[slice, int]]


def cut_sample(
    packed: list[tuple[int, int]], rows: int, width: int, tokens: int, device: torch.device
) -> tuple[Cuts, Cuts]:
    """Cut the passes over `rows` rows so that no forward holds more tokens than the step's own. Collective.

    Args:
        packed: this rank's rows `[first, last)` of each packed forward.
        width: number of columns of the padded batch.
        tokens: number of tokens of the step's own forward on this rank.

    Returns:
        The forwards of the packed and of the padded pass; every rank has the same number of them.
    """
    # The largest number of packed forwards of all ranks, and the smallest number of padded rows at once.
    forwards, negative_rows = reduced_over_ranks([len(packed), -max(1, tokens // width)], device)
    packed_cuts = [(slice(*ends), 1) for ends in packed]
    packed_cuts += [(slice(*packed[-1]), 0)] * (int(forwards) - len(packed))
    at_once = int(-negative_rows)
    padded_cuts = [(slice(first, min(first + at_once, rows)), 1) for first in range(0, rows, at_once)]
    return packed_cuts, padded_cuts


def compare(
    model: torch.nn.Module,
    packed: Callable[[slice], torch.Tensor],
    padded: Callable[[slice], torch.Tensor],
    scored_BC: torch.Tensor,
    cuts: tuple[Cuts, Cuts],
    embeddings: torch.nn.Module,
    unit: float,
    of: str = LOG_PROBABILITY,
) -> str | None:
    """Returns the fault of the packed pass over a few rows, the same on every rank; `None` if there is no fault.

    Collective: all ranks have the same number of rows. If one rank runs out of memory, all ranks raise. If the passes
    themselves are collective, the other ranks wait until the launcher ends them.

    Args:
        model: the root module, wrappers included.
        packed: returns values `(n, C)` of some of the rows from one packed forward, or raises.
        padded: the same from one padded forward.
        scored_BC: `(R, C)`, the tokens to compare.
        cuts: the result of [`cut_sample`].
        embeddings: the module whose output is perturbed.
        unit: the result of [`rounding_unit`].
        of: what the values are.
    """
    device = scored_BC.device
    together = functools.partial(_together, _is_collective(model), device)
    try:
        with _separate_gradients(model) as parameters:
            passes = _Passes(packed, padded, scored_BC, cuts, embeddings, unit, parameters)
            packed_BC = torch.zeros_like(passes.weight_BC)
            for rows, counts in passes.packed_cuts:
                # The backward may be collective, so it begins only after the forward has ended well on all ranks.
                values_BC = together(packed, rows)
                packed_BC[rows] = together(passes.backward, values_BC, rows, counts)
            sums, padded_BC = together(passes.compare_with_padded, packed_BC)
            sums = _added_over_ranks(sums, device)
            problem = verdict(sums, exact=not unit, of=of)
            if problem is None or not unit:
                return problem
            # Beyond the fixed limits the effect of rounding decides. It takes most of the passes, and can only raise
            # the limits, so it is not measured before.
            rounding = together(passes.measure_rounding, packed_BC, padded_BC)
    except CannotPack as failure:
        return str(failure)
    return verdict(sums | _added_over_ranks(rounding, device), exact=False, of=of)


class _Passes:
    """The packed and the padded passes over the rows to compare; the arguments are those of [`compare`].

    The compared gradients are those of a sum over the scored tokens with random weights. Each pass adds its gradients
    with a sign to `.grad` of `parameters`, so there is never more than one copy of them. Without parameters gradients
    are not compared.
    """

    def __init__(
        self,
        packed: Callable[[slice], torch.Tensor],
        padded: Callable[[slice], torch.Tensor],
        scored_BC: torch.Tensor,
        cuts: tuple[Cuts, Cuts],
        embeddings: torch.nn.Module,
        unit: float,
        parameters: list[torch.nn.Parameter],
    ):
        self.packed = packed
        self.padded = padded
        self.scored_BC = scored_BC
        self.packed_cuts, self.padded_cuts = cuts
        self.embeddings = embeddings
        self.unit = unit
        self.parameters = parameters
        # Normal numbers, because the gradients of equal rows with opposite signs would cancel.
        random_BC = torch.randn(scored_BC.shape, generator=torch.Generator().manual_seed(0)).to(scored_BC.device)
        self.weight_BC = torch.where(scored_BC, random_BC, 0.0)

    def backward(self, values_BC: torch.Tensor, rows: slice, factor: float) -> torch.Tensor:
        """Add the gradients of one forward times a factor; return its values as constants."""
        # TRL leaves the values on the LM head's device: the last of a model that is split over several devices.
        values_BC = values_BC.to(self.weight_BC.device)
        # Without an adapter a pass may have no gradient, although gradients are recorded.
        if torch.is_grad_enabled() and values_BC.requires_grad:
            (values_BC * (factor * self.weight_BC[rows])).sum().backward()
        return values_BC.detach()

    def run(self, forward: Callable[[slice], torch.Tensor], cuts: Cuts, sign: float) -> torch.Tensor:
        """Run a whole pass and add its gradients with this sign; return its values `(R, C)`."""
        values_BC = torch.zeros_like(self.weight_BC)
        for rows, counts in cuts:
            values_BC[rows] = self.backward(forward(rows), rows, sign * counts)
        return values_BC

    def compare_with_padded(self, packed_BC: torch.Tensor) -> tuple[dict[str, float], torch.Tensor]:
        """Run the padded pass after the packed one; return sums for [`verdict`] and the padded values."""
        sums = {"gradient": _squared_norm(self.parameters)}
        padded_BC = self.run(self.padded, self.padded_cuts, -1.0)
        sums["gradient_off"] = _squared_norm(self.parameters)
        if self.unit and torch.is_grad_enabled():
            self.run(self.packed, self.packed_cuts, -1.0)  # the negative padded gradient remains
            sums["gradient_padded"] = _squared_norm(self.parameters)
        return sums | statistics(packed_BC, padded_BC, [], self.scored_BC), padded_BC

    def measure_rounding(self, packed_BC: torch.Tensor, padded_BC: torch.Tensor) -> dict[str, float]:
        """Run perturbed padded passes after [`compare_with_padded`]; return sums for [`verdict`]."""
        sums = {}
        noise_NBC = []
        passes = NOISE_PASSES * max(1, ROWS_HALF // len(self.scored_BC))
        for seed in range(min(passes, MOST_NOISE_PASSES)):
            if seed:
                _clear_gradients(self.parameters)
            with perturbed(self.embeddings, self.unit, seed):
                noise_NBC.append(self.run(self.padded, self.padded_cuts, 1.0) - padded_BC)
            # The first is the norm of the change of the gradient, the others are norms of changed gradients.
            sums[f"gradient_moved_{seed}" if seed else "gradient_noise"] = _squared_norm(self.parameters)
        return sums | statistics(packed_BC, padded_BC, noise_NBC, self.scored_BC)


def _added_over_ranks(sums: dict[str, float], device: torch.device) -> dict[str, float]:
    """The sums over all ranks. Collective."""
    return dict(zip(sums, reduced_over_ranks(list(sums.values()), device, "SUM"), strict=True))


def _is_collective(model: torch.nn.Module) -> bool:
    """Whether a pass of `model` gathers weights, so that the other ranks wait for a rank that leaves the pass."""
    is_known = isinstance(model, (DistributedDataParallel, PreTrainedModel)) or is_peft(model)
    return not is_known or any(isinstance(p, DTensor) or is_zero3(p) for p in model.parameters())


def _together(is_collective: bool, device: torch.device, work: Callable, *args: Any) -> Any:
    """Returns the result of `work`, which each rank runs. Collective.

    Raises:
        CannotPack: `work` failed on some rank; raised on all ranks, with the reason.
        torch.OutOfMemoryError: some rank ran out of memory; raised on all ranks. If `work` is a collective pass, only
            that rank raises, and at once, because the other ranks wait in the pass.
    """
    result, error = _attempt(work, *args)
    out_of_memory = error is not None and is_out_of_memory(error)
    if out_of_memory and is_collective:
        raise error
    failed, ended = reduced_over_ranks([float(error is not None), float(out_of_memory)], device)
    if out_of_memory:
        raise error
    if ended:
        raise torch.OutOfMemoryError("another rank ran out of memory while packed rows were compared with padded ones")
    if error is not None:
        raise CannotPack(reason_of(error))
    if failed:
        raise CannotPack("another rank's packed pass failed")
    return result


def _attempt(work: Callable, *args: Any) -> tuple[Any, Exception | None]:
    """Returns the result of `work`, or its error.

    It is a function of its own so that the frame that keeps the error is not in the error's traceback: in such a
    circle the tensors of the failed pass would stay in memory.
    """
    try:
        return work(*args), None
    except Exception as error:
        return None, error


def statistics(
    packed_BC: torch.Tensor, padded_BC: torch.Tensor, noise_NBC: Sequence[torch.Tensor], scored_BC: torch.Tensor
) -> dict[str, float]:
    """Sums over this rank's tokens, to be added over ranks; `noise_NBC` are N changes of padded values by rounding."""

    def clipped(values: torch.Tensor) -> torch.Tensor:
        return values.float().abs().nan_to_num(MOST_PER_TOKEN).clamp(max=MOST_PER_TOKEN)

    off_BC = clipped(packed_BC - padded_BC)
    noise_BC = sum(map(clipped, noise_NBC), torch.zeros_like(off_BC)) / max(len(noise_NBC), 1)
    missing_BC = ((packed_BC == 0) & (padded_BC < MISSING_BELOW)) | (~packed_BC.isfinite() & padded_BC.isfinite())
    sums = {"missing": (scored_BC & missing_BC).sum()}
    # A completion begins in any column, and a row may have several of them.
    first_BC = scored_BC.clone()
    first_BC[:, 1:] &= ~scored_BC[:, :-1]
    for name, included_BC in (("", scored_BC), ("first_", first_BC)):
        sums[f"{name}tokens"] = included_BC.sum()
        sums[f"{name}off"] = off_BC[included_BC].sum()
        sums[f"{name}noise"] = noise_BC[included_BC].sum()
    return {name: float(value) for name, value in sums.items()}


def verdict(sums: dict[str, float], exact: bool, of: str = LOG_PROBABILITY) -> str | None:
    """The fault of a packed pass; `None` if the difference is within the fixed limits, or if rounding explains it.

    Args:
        sums: the result of [`statistics`], and squares of norms, which add up over shards and ranks: of the packed
            gradient, of its difference from the padded one, of the change of the latter by rounding
            (`gradient_noise`), of the padded one, and of the changed padded ones (`gradient_moved_1`, ...).
        exact: whether the fixed limits of float32 apply.
        of: what the values are.
    """
    if sums["missing"]:
        return f"{sums['missing']:.0f} values are missing or not finite: a difference in {of}"
    mean_limit = MEAN_DIFFERENCE_FP32 if exact else MEAN_DIFFERENCE_HALF
    first_limit = MEAN_DIFFERENCE_FP32 if exact else FIRST_DIFFERENCE_HALF
    noise = 0.0
    for name, description, least in (("", "mean", mean_limit), ("first_", "first tokens' mean", first_limit)):
        count = max(sums[f"{name}tokens"], 1)
        noise = max(noise, sums[f"{name}noise"] / count)  # at least that of all tokens: of few it is small by chance
        off = sums[f"{name}off"] / count
        limit = max(least, OVER_NOISE * (1 + count**-0.5) * noise)
        if off > limit:
            return f"{description} difference in {of} from the padded pass is {off:.2g} (limit {limit:.2g})"
    size = sums.get("gradient", 0.0) ** 0.5
    off = sums.get("gradient_off", 0.0) ** 0.5
    noise = sums.get("gradient_noise", 0.0) ** 0.5  # not measured yet in the first verdict
    limit = GRADIENT_DIFFERENCE_FP32 if exact else GRADIENT_DIFFERENCE_HALF
    if not off <= max(limit * size, OVER_NOISE * noise):  # NaN is a fault, too
        return f"gradients differ from the padded pass by {off:.2g} of a norm of {size:.2g} (limit {limit:.2g} of it)"
    return None if exact else _projection_verdict(sums)


def _projection_verdict(sums: dict[str, float]) -> str | None:
    """The fault in the length of the packed gradient p along the padded one d; `None` if rounding explains it.

    Rounding changes both at random, which makes <p, d> / |d|² smaller than 1 by the square of the relative change of
    d. If p changes by as much as d, then |p - d|² / 2 |d|² compensates for this, and the sum is (1 + |p|² / |d|²) / 2.
    """
    padded = sums.get("gradient_padded", 0.0)
    if not padded:
        return None
    off = (sums["gradient"] / padded - 1) / 2
    off_by_rounding = [(value / padded - 1) / 2 for name, value in sums.items() if name.startswith("gradient_moved_")]
    noise = sums.get("gradient_noise", 0.0) / padded
    tokens = max(sums["tokens"], 1)
    root_mean_square = (sum(x**2 for x in off_by_rounding) / max(len(off_by_rounding), 1)) ** 0.5
    by_rounding = max(root_mean_square, (noise / tokens) ** 0.5)
    # `noise / 2` allows for the case that only one of the two gradients is rounded.
    limit = max(PROJECTION_OFF, PROJECTION_OVER_NOISE * by_rounding) + noise / 2
    if not abs(off) <= limit:
        return f"the gradient is {1 + off:.3f} times as long as the padded pass's along it (limit 1 ± {limit:.2g})"
    return None


@contextlib.contextmanager
def perturbed(embeddings: torch.nn.Module, unit: float, seed: int) -> Iterator[None]:
    """Inside the block the output of `embeddings` is changed at random by a relative amount of about `unit`."""
    generator = torch.Generator().manual_seed(seed)

    def perturb(module, args, output):
        # An outer product, because a random number for each entry would be as large as the output.
        sign_L1 = torch.randint(0, 2, (output.shape[-2], 1), generator=generator) * 2.0 - 1.0
        change_H = unit * torch.randn(output.shape[-1], generator=generator)
        return (output.float() * (1.0 + sign_L1.to(output.device) * change_H.to(output.device))).to(output.dtype)

    handle = embeddings.register_forward_hook(perturb)
    try:
        yield
    finally:
        handle.remove()


def _clear_gradients(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _squared_norm(parameters: list[torch.nn.Parameter]) -> float:
    """The squared norm of all gradients together; of this rank's shards if they are sharded."""
    grads = (parameter.grad for parameter in parameters if parameter.grad is not None)
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    # Summed in float32 without a copy in a wider type: the gradient of an embedding has gigabytes.
    dtype = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
    return sum(float(torch.linalg.vector_norm(grad, dtype=dtype)) ** 2 for grad in grads)


@contextlib.contextmanager
def copied_leaves(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block `model` computes with other leaves, which share the memory of its trained parameters.

    So a backward inside a forward of the user's reaches no `.grad` and no hook of the user's parameters: DDP counts
    what arrives there, and an optimizer that steps inside the backward would move the weights.
    """
    leaves: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    replaced = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                replaced.append((module, name, parameter))
    try:
        for module, name, parameter in replaced:
            if parameter not in leaves:  # tied weights stay tied
                leaves[parameter] = torch.nn.Parameter(parameter.detach())
            module._parameters[name] = leaves[parameter]
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


@contextlib.contextmanager
def _separate_gradients(model: torch.nn.Module) -> Iterator[list[torch.nn.Parameter]]:
    """Inside the block the gradients of the yielded parameters start from nothing; afterwards they are restored.

    There are no parameters if gradients are not compared.
    """
    if not compares_gradients(model):
        with torch.no_grad():
            yield []
        return
    # Under DDP each rank compares its own gradients. FSDP2 has to reduce them, because unreduced gradients are as
    # large as the whole model and are kept until the next backward.
    reduction = model.no_sync() if isinstance(model, DistributedDataParallel) else reducing(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # only a sharded module has the parameters that the optimizer knows
            module.reshard()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    try:
        _clear_gradients(parameters)
        with reduction:
            yield parameters
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
