"""`verify`: a few rows of a batch computed packed and as in stock TRL; what differs.

It is called before the first packed pass of each kind, and knows no trainer: the two ways to compute rows are
callables. Values are log-probabilities, or [`projections`] of hidden states, which are numbers of the same size. Their
gradients are compared, too.

In float32 the two ways agree to a few units in the last place, and fixed limits decide. In half precision (or TF32)
single tokens differ by hundredths of a nat, and the model decides by how much. So beyond the fixed limits stock is
compared with itself: the padded rows are computed again with embeddings that are moved by as much as one rounding,
which moves every later rounding. [`OVER_ROUNDING`] times that difference is allowed. A fault of a few percent in every
token (an attention scaled by 1.03) is hidden by rounding in single tokens, and not in the length of the gradient, in
which rounding averages out.

No forward holds more tokens than the step's own. Ranks decide by the same sums, so they decide alike.

Suffixes of shapes: B rows of a batch, R compared rows, C values of a row, L tokens of a row, H hidden size.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..compat.deepspeed import is_zero3
from ..compat.fsdp import reducing
from ..compat.peft import is_peft
from ..scoring.transfer import to_device
from .batch import IGNORED_LABEL, Batch, Sequences
from .dropout import attention_reason, without_dropout
from .forest import sort_by_prefix
from .packed_model import PackedModel
from .passes import Forward, cut_rows
from .problems import CannotPack, is_out_of_memory, reason_of
from .ranks import compares_gradients, reduced_over_ranks
from .row import PassRecord

# Number of rows to compare: more in half precision, because a single token proves little.
ROWS_FP32 = 4
ROWS_HALF = 8
# A row that is compared has at most this many tokens, because of a padded row stock computes all pairs: at 32,768
# tokens masks and scores take more memory than the step that is compared. If layers have a window, a row continues
# behind it by so many tokens.
MOST_TOKENS = 2048
BEHIND_WINDOW = 512
# Differences that are never called a fault: the mean over all tokens and over first tokens (which are predicted across
# the border of two segments), in nats; the norm of the gradient's difference over that of the gradient; the relative
# length of the gradient along stock's. Padded and packed float32 passes were never further apart than 6e-5
# (SmolLM2-135M), while a completion cut off its prompt, a lost window or a leaking state changes them by 0.1 to 2.
LIMITS_FP32 = {"mean": 1e-3, "first": 1e-3, "gradient": 1e-3}
LIMITS_HALF = {"mean": 0.05, "first": 0.03, "gradient": 0.25, "length": 0.01}
# In half precision this multiple of stock's own rounding is allowed (dev/LOG.md), a mean over so many passes.
OVER_ROUNDING = 4.0
ROUNDING_PASSES = 4
# One token counts for no more than this many nats: rounding can change a very unlikely one by any amount.
MOST_PER_TOKEN = 1.0
# A log-probability of exactly zero is missing if the padded pass has one below this.
MISSING_BELOW = -0.5

# The two ways to compute rows: as in stock TRL, and by one packed forward. Each returns values `(n, C)`.
Padded = Callable[[Batch], torch.Tensor]
Packed = Callable[[Batch, Forward], torch.Tensor]
# The forwards of a pass over the compared rows: of each its rows, and whether it counts. It does not if only other
# ranks need it.
Cuts = list[tuple[slice, bool]]


def verify(
    packed_model: PackedModel,
    model: nn.Module,
    batch: Batch,
    padded: Padded,
    packed: Packed,
    unit: float,
    with_images: bool,
    tokens_per_pass: int | None = None,
    order: np.ndarray | None = None,
) -> list[str] | None:
    """Compute a few rows of a batch both ways and compare. Collective: every rank calls this.

    If one rank runs out of memory, all ranks raise. If the passes themselves are collective, the other ranks wait
    until the launcher ends them.

    Args:
        packed_model: the model that is compared.
        model: its root module, wrappers included.
        batch: the batch that is about to be computed.
        padded, packed: the two ways to compute rows. Rows without labels give [`projections`] of hidden states.
        unit: the result of [`rounding_unit`].
        with_images: whether some rank's batch has images.
        tokens_per_pass: limit of the pass, if it has one. No forward of the comparison holds more tokens.
        order: indices of the batch's rows in an order in which rows with a common prompt are neighbours; `None` if
            they are.

    Returns:
        What differs, alike on every rank; `None` if no rank has rows that can be packed and of which anything is
        wanted.
    """
    device = batch.input_ids.device
    try:
        packed_model.count_images(batch)
    except CannotPack:  # the pass itself logs the reason
        batch = replace(batch, vision={}, num_images=None)
    if with_images:
        packed_model.images.share(batch)
    # A single row is taken twice, so that something is shared.
    count_here = max(2, min(ROWS_HALF if unit else ROWS_FP32, len(batch.input_ids)))
    (count,) = reduced_over_ranks([count_here], device)
    whole = read(packed_model, batch)
    tokens = batch.input_ids.numel() if whole is None else packed_model.build_forest(whole).tokens
    tokens = min(tokens, tokens_per_pass or tokens)
    rows = sampled_rows(batch, int(count), order)
    sample = replace(batch.rows(rows), router_loss=False)
    if whole is not None:
        sample = shortened(sample, whole.rows(rows), packed_model.facts.longest_window)
    sequences = read(packed_model, sample)
    is_packable = sequences is not None and bool(sequences.needed_B.any())
    if not any(reduced_over_ranks([int(is_packable)], device)):
        return None
    rows, width = sample.input_ids.shape
    ends = [(0, rows)]
    if is_packable:
        sets = cut_rows(
            sequences, max(tokens, width), lambda part: packed_model.build_forest(sequences.rows(part)).tokens
        )
        sample = sample.rows(np.concatenate(sets))
        ends = list(itertools.pairwise(np.cumsum([0, *map(len, sets)]).tolist()))
    cuts = _cuts(ends, rows, width, tokens, device)

    def padded_part(part: slice) -> torch.Tensor:
        return padded(sample.rows(np.arange(part.start, part.stop)))

    def packed_part(is_dense: bool, part: slice) -> torch.Tensor:
        if not is_packable:  # the other ranks' forwards may be collective, so this rank runs one, too
            return padded_part(part)
        return _packed_values(packed_model, sample.rows(np.arange(part.start, part.stop)), packed, is_dense)

    reason = attention_reason(packed_model.base)  # dropout may have been set since
    if reason is not None:
        return [reason]
    of = "hidden states" if batch.labels is None else "log-probability"
    embeddings = packed_model.base.get_input_embeddings()
    # A hook of the user's own may draw, and the run's next numbers must be those of stock.
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    same_numbers = torch.random.fork_rng(cards)
    with without_dropout(model), packed_model.images.in_every_forward(), same_numbers:
        for is_dense in (False, True) if packed_model.can_be_dense else (False,):
            packed_rows = functools.partial(packed_part, is_dense)
            faults = compare(model, packed_rows, padded_part, sample.is_wanted(), cuts, embeddings, unit, of)
            if faults:
                return faults
    return []


def read(packed_model: PackedModel, batch: Batch) -> Sequences | None:
    """Returns a batch on the host; `None` if it cannot be packed, for which the pass itself logs the reason."""
    try:
        return packed_model.read(batch)
    except CannotPack:
        return None


def projections(hidden_BLH: torch.Tensor) -> torch.Tensor:
    """Returns a number of order 1 for each last hidden state: its direction along a random vector.

    Hidden states differ in length by model and by token, and log-probabilities, for which the limits are made, do not.
    """
    random_H = torch.randn(hidden_BLH.shape[-1], generator=torch.Generator().manual_seed(0))
    return functional.normalize(hidden_BLH.float(), dim=-1) @ random_H.to(hidden_BLH.device)


def rounding_unit(model: PreTrainedModel, device: torch.device) -> float:
    """Root mean square of the relative rounding error in the dtype of `model`'s products; 0 if fixed limits serve."""
    if torch.is_autocast_enabled(device.type):
        dtypes = {torch.get_autocast_dtype(device.type)}
    else:
        dtypes = {parameter.dtype for parameter in model.parameters()}
        dtypes.update(module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype"))  # 4 bits
        # Without a gradient bitsandbytes computes these in bfloat16 on CPUs that have it, for any dtype.
        if device.type == "cpu" and not (model.training or torch.is_grad_enabled()):
            in_bfloat16 = (vars(module).get("support_avx512bf16_for_cpu") for module in model.modules())
            dtypes.update({torch.bfloat16} if any(in_bfloat16) else ())
    units = [torch.finfo(dtype).eps / 4 for dtype in dtypes & {torch.bfloat16, torch.float16}]
    if torch.float32 in dtypes and device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        units.append(2.0**-12)
    return max(units, default=0.0)


# --- the rows --------------------------------------------------------------------------------------------------------


def sampled_rows(batch: Batch, count: int, order: np.ndarray | None = None) -> np.ndarray:
    """Returns `count` row indices: half from the first row with images (or row 0) on, half from the end of the batch.

    Neighbouring rows mostly share a prompt. If the batch has fewer rows, the last row is repeated, so that ranks have
    equally many.
    """
    rows = list(range(len(batch.input_ids))) if order is None else order.tolist()
    has_images = [bool(batch.num_images and batch.num_images[row]) for row in rows]
    rows += rows[-1:] * (count - len(rows))
    first = has_images.index(True) if any(has_images) else 0
    first = min(first, len(rows) - count)
    last = count // 2
    return np.array(rows[first : first + count - last] + rows[len(rows) - last :])


def compared_tokens(longest: int, window: int) -> int:
    """Returns the most tokens of a row that is compared.

    `longest` is the length of the longest row, `window` the longest window of attention, 0 for none.
    """
    return max(MOST_TOKENS, window + BEHIND_WINDOW) if 0 < window < longest else MOST_TOKENS


def shortened(batch: Batch, sequences: Sequences, window: int) -> Batch:
    """Returns a batch in which long rows are cut to their first tokens and those round the place at which they part.

    Of a long prompt its first tokens are kept, which other prompts may share, and its last ones; then the first ones
    of the completion. Rows with equal prompts are cut alike. A row with images is not cut before the token after
    its last one. Rows that begin in one column still do, and rows that do not still do not.

    `sequences` are the same rows on the host; `window` as in [`compared_tokens`].
    """
    lengths_B = sequences.lengths_B
    most = compared_tokens(int(lengths_B.max()), window)
    if lengths_B.max() <= most:
        return batch
    if batch.labels is None:
        order, common = sort_by_prefix(sequences.tokens_BL, lengths_B)
        parts_at_B = np.zeros_like(lengths_B)
        parts_at_B[order] = np.maximum(np.append(common, 0), np.insert(common, 0, 0))
    else:
        parts_at_B = sequences.scored_BL.argmax(1)  # its first label
    behind = min(int((lengths_B - parts_at_B).max()), most - min(int(parts_at_B.max()), most // 2))
    in_front = most - behind
    kept_of_row = []
    for row, (length, parts_at) in enumerate(zip(lengths_B, parts_at_B, strict=True)):
        # An image may have a token of its own behind it.
        whole_until = 0 if sequences.spans_B2 is None else sequences.spans_B2[row, 1] + 2
        tokens = np.arange(length)
        is_first = tokens < max(in_front // 2, whole_until)
        last_in_front = tokens >= parts_at - (in_front - in_front // 2)
        first_behind = tokens < parts_at + behind
        kept_of_row.append(tokens[is_first | (last_in_front & first_behind)])
    _, first_column_B = np.unique(sequences.offsets_B, return_inverse=True)
    width = max(first + len(kept) for first, kept in zip(first_column_B, kept_of_row, strict=True))
    columns_BL = np.full((len(lengths_B), width), -1)
    for row, (first, kept) in enumerate(zip(first_column_B, kept_of_row, strict=True)):
        columns_BL[row, first : first + len(kept)] = sequences.offsets_B[row] + kept
    columns_BL = torch.from_numpy(columns_BL)

    def cut(x: torch.Tensor, filling: int = 0) -> torch.Tensor:
        columns = to_device(columns_BL, x.device)
        return x.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, filling)

    mask = batch.attention_mask
    if mask is None and bool((columns_BL < 0).any()):
        mask = torch.ones_like(batch.input_ids)
    vision = {
        name: cut(x) if isinstance(x, torch.Tensor) and x.shape == batch.input_ids.shape else x
        for name, x in batch.vision.items()
    }
    return replace(
        batch,
        input_ids=cut(batch.input_ids),
        attention_mask=None if mask is None else cut(mask),
        labels=None if batch.labels is None else cut(batch.labels, IGNORED_LABEL),
        vision=vision,
    )


def _cuts(ends: list[tuple[int, int]], rows: int, width: int, tokens: int, device: torch.device) -> tuple[Cuts, Cuts]:
    """Returns the forwards of the packed and of the padded pass; every rank has the same number of them. Collective.

    `ends` are this rank's rows `[first, last)` of each packed forward, `tokens` those of the step's own forward.
    """
    # The largest number of packed forwards of all ranks, and the smallest number of padded rows at once.
    forwards, negative_rows = reduced_over_ranks([len(ends), -max(1, tokens // width)], device)
    packed_cuts = [(slice(*pair), True) for pair in ends]
    packed_cuts += [(slice(*ends[-1]), False)] * (int(forwards) - len(ends))
    at_once = int(-negative_rows)
    return packed_cuts, [(slice(first, min(first + at_once, rows)), True) for first in range(0, rows, at_once)]


def _packed_values(packed_model: PackedModel, rows: Batch, packed: Packed, is_dense: bool) -> torch.Tensor:
    """Returns the values of rows from one packed forward.

    A layer that cannot be computed records the reason instead of raising, so that this rank reaches every collective.
    """
    sequences = packed_model.read(rows)
    record = PassRecord(problems=[])
    values = packed(rows, Forward(sequences, packed_model.build_forest(sequences, is_dense), record=record))
    calls = len(record.layer_calls)
    layers = packed_model.facts.layers
    if not calls or calls % layers:  # differential attention calls its function twice a layer
        record.problems.append(f"prefix-aware layers ran {calls} times in a forward of {layers}")
    if record.problems:
        raise CannotPack(record.problems[0])
    return values


# --- the passes ------------------------------------------------------------------------------------------------------


def compare(
    model: nn.Module,
    packed: Callable[[slice], torch.Tensor],
    padded: Callable[[slice], torch.Tensor],
    scored_RC: torch.Tensor,
    cuts: tuple[Cuts, Cuts],
    embeddings: nn.Module,
    unit: float,
    of: str,
) -> list[str]:
    """Returns what differs between the packed and the padded pass over a few rows, see [`verify`]. Collective.

    The compared gradients are those of a sum over the scored tokens with random weights. Each pass adds its gradients
    with a sign, so there is never more than one copy of them. `embeddings` is the module whose output rounding moves.
    """
    device = scored_RC.device
    packed_cuts, padded_cuts = cuts
    together = functools.partial(_together, _is_collective(model), device)
    # Normal numbers, because the gradients of equal rows with opposite signs would cancel.
    random_RC = torch.randn(scored_RC.shape, generator=torch.Generator().manual_seed(0)).to(device)
    weight_RC = torch.where(scored_RC, random_RC, 0.0)

    def backward(values: torch.Tensor, rows: slice, factor: float) -> torch.Tensor:
        # TRL leaves the values on the LM head's device: the last of a model that is split over several devices.
        values = values.to(device)
        # Without an adapter a pass may have no gradient, although gradients are recorded.
        if torch.is_grad_enabled() and values.requires_grad:
            (values * (factor * weight_RC[rows])).sum().backward()
        return values.detach()

    def run(forward: Callable[[slice], torch.Tensor], cuts: Cuts, sign: float) -> torch.Tensor:
        values_RC = torch.zeros_like(weight_RC)
        for rows, counts in cuts:
            # The backward may be collective, so it begins only after the forward has ended well on all ranks.
            values = together(forward, rows)
            values_RC[rows] = together(backward, values, rows, sign * counts)
        return values_RC

    def added(sums: dict[str, float]) -> dict[str, float]:
        return dict(zip(sums, reduced_over_ranks(list(sums.values()), device, "SUM"), strict=True))

    try:
        with separate_gradients(model) as parameters:
            packed_RC = run(packed, packed_cuts, 1.0)
            squares = {"packed": squared_norm(parameters)}
            padded_RC = run(padded, padded_cuts, -1.0)
            squares["off"] = squared_norm(parameters)
            if unit and parameters:
                run(packed, packed_cuts, -1.0)  # the negative padded gradient remains
                squares["padded"] = squared_norm(parameters)
            sums = added(statistics(packed_RC, padded_RC, scored_RC) | squares)
            faults = differences(sums, [], exact=not unit, of=of)
            if not faults or not unit:
                return faults
            # It takes most of the passes, and can only raise the limits, so it is not measured before.
            rounding = []
            for seed in range(ROUNDING_PASSES):
                with _moved_by_rounding(embeddings, unit, seed):
                    moved_RC = run(padded, padded_cuts, 1.0)
                # The first is the norm of the gradient's change, the others are norms of changed gradients.
                square = {"square": squared_norm(parameters)}
                rounding.append(added(statistics(moved_RC, padded_RC, scored_RC) | square))
                _clear_gradients(parameters)
    except CannotPack as failure:
        return [str(failure)]
    return differences(sums, rounding, exact=False, of=of)


def statistics(values_RC: torch.Tensor, padded_RC: torch.Tensor, scored_RC: torch.Tensor) -> dict[str, float]:
    """Returns sums over this rank's tokens of how far values are from those of the padded pass."""
    off_RC = (values_RC - padded_RC).float().abs().nan_to_num(MOST_PER_TOKEN).clamp(max=MOST_PER_TOKEN)
    missing_RC = ((values_RC == 0) & (padded_RC < MISSING_BELOW)) | (~values_RC.isfinite() & padded_RC.isfinite())
    # A completion begins in any column, and a row may have several of them.
    first_RC = scored_RC.clone()
    first_RC[:, 1:] &= ~scored_RC[:, :-1]
    sums = {"missing": (scored_RC & missing_RC).sum()}
    for name, included_RC in (("mean", scored_RC), ("first", first_RC)):
        sums[f"{name}_tokens"] = included_RC.sum()
        sums[name] = off_RC[included_RC].sum()
    return {name: float(value) for name, value in sums.items()}


def differences(sums: dict[str, float], rounding: list[dict[str, float]], exact: bool, of: str) -> list[str]:
    """Returns what is beyond the limits, which rounding raises.

    Args:
        sums: the [`statistics`] of the packed pass, and squares of norms, which add up over shards and ranks: of the
            packed gradient, of its difference from the padded one (`"off"`), and of the padded one.
        rounding: the [`statistics`] of padded passes moved by rounding, and the square of a norm: of the gradient's
            change by the first pass, of the changed gradient in the others. Empty if it was not measured.
        exact: whether the limits of float32 apply.
        of: what the values are.
    """
    limits = LIMITS_FP32 if exact else LIMITS_HALF
    if sums["missing"]:
        return [f"{sums['missing']:.0f} values are missing or not finite: a difference in {of}"]
    faults = []
    noise = 0.0
    for name, title in (("mean", "mean"), ("first", "first tokens' mean")):
        tokens = max(sums[f"{name}_tokens"], 1)
        # At least that of all tokens: of few it is small by chance.
        noise = max(noise, sum(moved[name] for moved in rounding) / tokens / max(len(rounding), 1))
        limit = max(limits[name], OVER_ROUNDING * noise)
        if sums[name] / tokens > limit:
            off = sums[name] / tokens
            faults.append(f"{title} difference in {of} from the padded pass is {off:.2g} (limit {limit:.2g})")
    size, off = sums["packed"] ** 0.5, sums["off"] ** 0.5
    change = rounding[0]["square"] if rounding else 0.0
    limit = max(limits["gradient"] * size, OVER_ROUNDING * change**0.5)
    if not off <= limit:  # NaN is a fault, too
        faults.append(
            f"gradients differ from the padded pass by {off:.2g} of a norm of {size:.2g} (limit {limit:.2g})"
        )
    padded = sums.get("padded", 0.0)
    if padded and not exact:
        # Rounding changes both gradients p and d at random, which makes <p, d> / |d|² smaller than 1 by half of the
        # square of d's relative change. |p - d|² / 2 |d|² compensates for this, and the sum is (1 + |p|² / |d|²) / 2.
        # `change / padded / 2` allows for the case that only one of the two is rounded. Of a change in all directions
        # 1 / sqrt(tokens) remains in a length.
        length = (sums["packed"] / padded - 1) / 2
        lengths = [(moved["square"] / padded - 1) / 2 for moved in rounding[1:]]
        by_rounding = (sum(x**2 for x in lengths) / max(len(lengths), 1)) ** 0.5
        by_rounding = max(by_rounding, (change / padded / max(sums["mean_tokens"], 1)) ** 0.5)
        limit = max(limits["length"], OVER_ROUNDING * by_rounding) + change / padded / 2
        if not abs(length) <= limit:
            times = f"the gradient is {1 + length:.3f} times as long as the padded pass's along it"
            faults.append(f"{times} (limit 1 ± {limit:.2g})")
    return faults


@contextlib.contextmanager
def _moved_by_rounding(embeddings: nn.Module, unit: float, seed: int) -> Iterator[None]:
    """Inside the block the output of `embeddings` is changed at random by a relative amount of about `unit`."""
    generator = torch.Generator().manual_seed(seed)

    def move(module, args, output):
        # An outer product, because a random number for each entry would be as large as the output.
        sign_L1 = torch.randint(0, 2, (output.shape[-2], 1), generator=generator) * 2.0 - 1.0
        change_H = unit * torch.randn(output.shape[-1], generator=generator)
        return (output.float() * (1.0 + sign_L1.to(output.device) * change_H.to(output.device))).to(output.dtype)

    handle = embeddings.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


# --- gradients and ranks ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def separate_gradients(model: nn.Module) -> Iterator[list[nn.Parameter]]:
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


def _clear_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def squared_norm(parameters: list[nn.Parameter]) -> float:
    """The squared norm of all gradients together; of this rank's shards if they are sharded."""
    of_rank = (parameter.grad for parameter in parameters if parameter.grad is not None)
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in of_rank]
    # Summed in float32 without a copy in a wider type: the gradient of an embedding has gigabytes.
    dtype = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
    return sum(float(torch.linalg.vector_norm(grad, dtype=dtype)) ** 2 for grad in grads)


def _is_collective(model: nn.Module) -> bool:
    """Whether a pass of `model` gathers weights, so that the other ranks wait for a rank that leaves the pass."""
    is_known = isinstance(model, (DistributedDataParallel, PreTrainedModel)) or is_peft(model)
    return not is_known or any(isinstance(p, DTensor) or is_zero3(p) for p in model.parameters())


def _together(is_collective: bool, device: torch.device, work: Callable, *args: Any) -> Any:
    """Returns the result of `work`, which each rank runs; raises on all ranks if it failed on some. Collective.

    If `work` is a collective pass, a rank that runs out of memory raises at once, because the others wait in the pass.
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
