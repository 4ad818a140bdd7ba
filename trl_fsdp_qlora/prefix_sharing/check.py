"""`compare_rows`: a few rows of a batch computed packed and as in stock TRL; what differs.

It is called before the first packed pass of each type, and for [`verify.verify`]. Log-probabilities are compared, or
[`projections`] of hidden states, which are numbers of the same size; and the gradients of a random sum of them.

In float32 the two ways agree to a few units in the last place, and fixed limits decide. In half precision (or TF32)
single tokens differ by hundredths of a nat, and the model decides by how much. So beyond the fixed limits stock is
compared with itself: the padded rows are computed again with embeddings that are moved by as much as one rounding,
which moves every later rounding. [`OVER_ROUNDING`] times that difference is allowed.

The packed forward holds no more tokens than the step's own, and padded rows are computed one by one. Ranks that
compare together decide by the same sums, so they decide alike.

Suffixes of shapes: B rows of a batch, R compared rows, C values of a row, L tokens of a row, H hidden size.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .batch import Batch, Call, Sequences
from .forest import sort_by_prefix
from .packed_model import PackedModel
from .passes import Forward
from .problems import CannotPack, is_out_of_memory, reason_of
from .ranks import reduced_over_ranks
from .row import PassRecord
from .unseen import Unseen

# Number of rows to compare: more in half precision, because a single token proves little.
ROWS_FP32 = 4
ROWS_HALF = 8
# A row that is compared has at most this many tokens, because of a padded row stock computes all pairs: at 32,768
# tokens masks and scores take more memory than the step that is compared. If layers have a window, a row continues
# behind it by so many tokens.
MOST_TOKENS = 2048
BEHIND_WINDOW = 512
# Differences that are never called a fault: the mean over all tokens and over first tokens (which are predicted across
# the border of two segments), in nats; the norm of the gradient's difference over that of the gradient. Padded and
# packed float32 passes were never further apart than 6e-5 (SmolLM2-135M), while a completion cut off its prompt, a
# lost window or a leaking state changes them by 0.1 to 2.
LIMITS_FP32 = {"mean": 1e-3, "first": 1e-3, "gradient": 1e-3}
LIMITS_HALF = {"mean": 0.05, "first": 0.03, "gradient": 0.25}
# In half precision this multiple of stock's own rounding is allowed (dev/LOG.md).
OVER_ROUNDING = 4.0
# One token counts for no more than this many nats: rounding can change a very unlikely one by any amount.
MOST_PER_TOKEN = 1.0
# A log-probability of exactly zero is missing if the padded pass has one below this.
MISSING_BELOW = -0.5


def compare_rows(packed_model: PackedModel, call: Call, batch: Batch, sequences: Sequences) -> list[str]:
    """Compute a few rows of a call both ways and compare; gradients, too, if they are recorded.

    Ranks that compare together all call this. A rank whose packed forward fails still computes its padded rows,
    because the other ranks' forwards may be collective.

    Args:
        packed_model: the model that is compared.
        call: of the model or of its backbone.
        batch, sequences: the rows of the call, on the device and on the host.

    Returns:
        What differs, alike on all ranks that compare together.
    """
    device = batch.input_ids.device
    unit = rounding_unit(packed_model.base, device)
    most = ROWS_HALF if unit else ROWS_FP32
    rows = compared_rows(packed_model, batch, sequences, most, call.instructions.tokens_per_pass)
    sample = shortened(batch.rows(rows), sequences.rows(rows), packed_model.facts.longest_window)
    # Each rank computes as many rows: its own again, if another rank has more. A single row is taken twice, so that
    # something is shared.
    own_count = len(sample.input_ids)
    (count,) = reduced_over_ranks([max(2, own_count)], device)
    sample = sample.rows(np.resize(np.arange(own_count), int(count)))
    sample = replace(sample, router_loss=False)
    # A hook of the user's own may draw, and the run's next numbers must be those of stock.
    cards = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with packed_model.images.in_every_forward(), torch.random.fork_rng(cards):
        return _compare(packed_model, call.stock, sample, unit)


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


def compared_rows(
    packed_model: PackedModel, batch: Batch, sequences: Sequences, most: int, tokens_per_pass: int | None = None
) -> np.ndarray:
    """Returns the indices of at most `most` rows whose packed row has no more tokens than the batch's, or the limit.

    Rows that share a prompt are neighbours in the order of their tokens. Half of the rows are taken from the first one
    with images (or the first one) on, half from the end.
    """
    order, _ = sort_by_prefix(sequences.tokens_BL, sequences.lengths_B)
    needed = order[sequences.needed_B[order] > 0]
    order = needed if len(needed) else order  # a rank without any takes part in the forwards of the others
    tokens = packed_model.build_forest(sequences).tokens
    tokens = min(tokens, tokens_per_pass or tokens)
    has_images = [bool(batch.num_images and batch.num_images[row]) for row in order]
    first_with_images = has_images.index(True) if any(has_images) else 0
    for count in range(min(most, len(order)), 0, -1):
        first = min(first_with_images, len(order) - count)
        last = count // 2
        rows = np.append(order[first : first + count - last], order[len(order) - last :])
        if packed_model.build_forest(sequences.rows(rows)).tokens <= tokens:
            break
    return rows


def compared_tokens(longest: int, window: int) -> int:
    """Returns the most tokens of a row that is compared.

    `longest` is the length of the longest row, `window` the longest window of attention, 0 for none.
    """
    return max(MOST_TOKENS, window + BEHIND_WINDOW) if 0 < window < longest else MOST_TOKENS


def shortened(batch: Batch, sequences: Sequences, window: int) -> Batch:
    """Returns a batch in which long rows are cut to the columns round the first label, or round where rows part.

    Rows without anything to compare there are left out. A batch with images is not cut.

    `sequences` are the same rows on the host; `window` as in [`compared_tokens`].
    """
    lengths_B = sequences.lengths_B
    most = compared_tokens(int(lengths_B.max()), window)
    width = batch.input_ids.shape[1]
    if lengths_B.max() <= most or batch.has_images:
        return batch
    if batch.labels is None:
        order, common = sort_by_prefix(sequences.tokens_BL, lengths_B)
        parts_at_B = np.maximum(np.append(common, 0), np.insert(common, 0, 0)) + sequences.offsets_B[order]
    else:
        parts_at_B = sequences.scored_BL.argmax(1) + sequences.offsets_B
    first = max(0, min(int(parts_at_B.min()) - most // 2, width - most))
    columns = slice(first, first + most)
    tensors: dict = {name: None if x is None else x[:, columns] for name, x in batch.of_tokens().items()}
    vision = dict(batch.vision)
    for name, x in vision.items():
        if isinstance(x, torch.Tensor) and x.shape == batch.input_ids.shape:
            vision[name] = x[:, columns]
    cut = replace(batch, vision=vision, **tensors)
    wanted_B = cut.is_wanted().any(1).cpu().numpy()
    return cut.rows(np.flatnonzero(wanted_B)) if wanted_B.any() else cut


# --- the passes ------------------------------------------------------------------------------------------------------


def _compare(packed_model: PackedModel, stock: Callable[..., ModelOutput], sample: Batch, unit: float) -> list[str]:
    """Returns what differs between one packed forward of some rows and a padded forward of each.

    The compared gradients are those of a sum over the wanted values with random weights. Each pass adds its gradients
    with a sign, so there is never more than one sum of them.
    """
    wanted_RC = sample.is_wanted()
    device = wanted_RC.device
    values_are = "hidden states" if sample.labels is None else "log-probability"
    # Normal numbers, because the gradients of equal rows with opposite signs would cancel.
    random_RC = torch.randn(wanted_RC.shape, generator=torch.Generator().manual_seed(0)).to(device)
    weight_RC = torch.where(wanted_RC, random_RC, 0.0)
    unseen = Unseen(trainable_parameters(packed_model.base))

    def values_of(output: ModelOutput, factor_RC: torch.Tensor) -> torch.Tensor:
        """Returns the values of an output, whose gradients are added to the sum."""
        values = projections(output.last_hidden_state) if sample.labels is None else output.log_probs
        values = values.to(device)  # TRL leaves them on the LM head's device, the last one of a model on several
        # Without an adapter a pass may have no gradient, although gradients are recorded.
        if torch.is_grad_enabled() and values.requires_grad:
            unseen.add_gradients((values * factor_RC).sum())
        return values.detach()

    def packed(sign: float) -> torch.Tensor:
        with unseen:
            return values_of(_packed_output(packed_model, sample), sign * weight_RC)

    def padded(sign: float) -> torch.Tensor:
        options = {"use_cache": False} if sample.labels is None else {"fused_lm_head": True}
        values = []
        for number, weight_1C in enumerate(weight_RC.split(1)):
            row = sample.rows(np.array([number]))
            with unseen:
                values.append(values_of(stock(**options, **row.arguments()), sign * weight_1C))
        return torch.cat(values)

    def over_ranks(sums: dict[str, float]) -> dict[str, float]:
        return dict(zip(sums, reduced_over_ranks(list(sums.values()), device, "SUM"), strict=True))

    failure = None
    packed_RC = torch.zeros_like(weight_RC)
    size = 0.0
    try:
        packed_RC = packed(1.0)
        size = unseen.squared_norm()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        failure = reason_of(error)
    padded_RC = padded(-1.0)
    sums = statistics(packed_RC, padded_RC, wanted_RC)
    sums |= {"failed": failure is not None, "gradient": unseen.squared_norm(), "size": size}
    sums = over_ranks(sums)
    if sums["failed"]:
        return [failure or "another rank's packed pass failed"]
    faults = differences(sums, None, LIMITS_HALF if unit else LIMITS_FP32, values_are)
    if not faults or not unit:
        return faults
    # This can only raise the limits, so it is not measured before.
    packed(-1.0)  # the negative padded gradient remains
    with _moved_by_rounding(packed_model.base.get_input_embeddings(), unit):
        moved_RC = padded(1.0)
    moved = statistics(moved_RC, padded_RC, wanted_RC)
    moved |= {"gradient": unseen.squared_norm(), "size": size}
    return differences(sums, over_ranks(moved), LIMITS_HALF, values_are)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a model whose gradients are recorded now."""
    return [x for x in model.parameters() if x.requires_grad] if torch.is_grad_enabled() else []


def _packed_output(packed_model: PackedModel, rows: Batch) -> ModelOutput:
    """Returns the output of one packed forward.

    A layer that cannot be computed records the reason instead of raising, so that this rank reaches every collective.
    """
    sequences = packed_model.read(rows)
    problems: list[str] = []
    record = PassRecord(problems=problems)
    output = packed_model.run(rows, Forward(sequences, packed_model.build_forest(sequences), record=record))
    calls = len(record.layer_calls)
    layers = packed_model.facts.layers
    if not calls or calls % layers:  # differential attention calls its function twice a layer
        problems.append(f"prefix-aware layers ran {calls} times in a forward of {layers}")
    if problems:
        raise CannotPack(problems[0])
    return output


def statistics(values_RC: torch.Tensor, padded_RC: torch.Tensor, wanted_RC: torch.Tensor) -> dict[str, float]:
    """Returns sums over this rank's tokens of how far values are from those of the padded pass."""
    off_RC = (values_RC - padded_RC).float().abs().nan_to_num(MOST_PER_TOKEN).clamp(max=MOST_PER_TOKEN)
    missing_RC = ((values_RC == 0) & (padded_RC < MISSING_BELOW)) | (~values_RC.isfinite() & padded_RC.isfinite())
    off_RC = off_RC.masked_fill(missing_RC, torch.inf)  # one of many, too
    # A completion begins in any column, and a row may have several of them.
    first_RC = wanted_RC.clone()
    first_RC[:, 1:] &= ~wanted_RC[:, :-1]
    sums = {}
    for name, included_RC in (("mean", wanted_RC), ("first", first_RC)):
        sums[name] = float(off_RC[included_RC].sum())
        sums[f"{name}_tokens"] = float(included_RC.sum())
    return sums


def differences(
    sums: dict[str, float], moved: dict[str, float] | None, limits: dict[str, float], of: str
) -> list[str]:
    """Returns what is beyond the limits, which rounding raises.

    Args:
        sums: the [`statistics`] of the packed pass, and squares of norms, which add up over ranks: of the difference
            of its gradient from the padded one, and of the gradient itself (`"size"`).
        moved: the same of a padded pass moved by rounding; `None` if it was not measured.
        limits: [`LIMITS_FP32`] or [`LIMITS_HALF`].
        of: what the values are.
    """
    titles = {
        "mean": f"mean difference in {of}",
        "first": f"first tokens' mean difference in {of}",
        "gradient": "gradients differ: relative difference",
    }
    off = _relative(sums)
    noise = dict.fromkeys(off, 0.0) if moved is None else _relative(moved)
    noise["first"] = max(noise["first"], noise["mean"])  # of few tokens it is small by chance
    limit = {name: max(limits[name], OVER_ROUNDING * noise[name]) for name in off}
    return [
        f"{title} from the padded pass is {off[name]:.2g} (limit {limit[name]:.2g})"
        for name, title in titles.items()
        if not off[name] <= limit[name]  # NaN is a fault, too
    ]


def _relative(sums: dict[str, float]) -> dict[str, float]:
    """Returns means per token, and the norm of a gradient's difference over the norm of the gradient."""
    size = max(sums["size"], torch.finfo(torch.float32).tiny)
    means = {name: sums[name] / max(sums[f"{name}_tokens"], 1) for name in ("mean", "first")}
    return {**means, "gradient": (sums["gradient"] / size) ** 0.5}


@contextlib.contextmanager
def _moved_by_rounding(embeddings: nn.Module, unit: float) -> Iterator[None]:
    """Inside the block the output of `embeddings` is changed at random by a relative amount of about `unit`."""
    generator = torch.Generator().manual_seed(0)
    thread = threading.get_ident()

    def move(module, args, output):
        if threading.get_ident() != thread:  # which may train the same model
            return output
        # An outer product, because a random number for each entry would be as large as the output.
        sign_L1 = torch.randint(0, 2, (output.shape[-2], 1), generator=generator) * 2.0 - 1.0
        change_H = unit * torch.randn(output.shape[-1], generator=generator)
        return (output.float() * (1.0 + sign_L1.to(output.device) * change_H.to(output.device))).to(output.dtype)

    handle = embeddings.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()
