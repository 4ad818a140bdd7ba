"""`compare_rows`: a few rows of a batch computed packed and as in stock TRL; what differs.

It is called before the first packed pass of each type, and for [`verify.verify`]. It knows nothing of packing: it gets
the rows, which `compared_rows.py` chooses, and two functions of a batch. Log-probabilities are compared, or
[`projections`] of hidden states, which are numbers of the same size; and the gradients of a random sum of them.

In float32 the two ways agree to a few units in the last place, and fixed limits decide. In half precision (or TF32)
single tokens differ by hundredths of a nat, and the model decides by how much. So beyond the fixed limits stock is
compared with itself: the padded rows are computed again with embeddings that are moved by as much as one rounding,
which moves every later rounding. [`OVER_ROUNDING`] times that difference is allowed.

Padded rows are computed one by one. Ranks that compare together decide by the same sums, so they decide alike.

Suffixes of shapes: B rows of a batch, R compared rows, C values of a row, L tokens of a row, H hidden size.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .batch import Batch
from .ranks import reduced_over_ranks
from .status import is_out_of_memory, reason_of
from .unseen import Unseen

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

# Computes the values of a batch, log-probabilities or last hidden states, in one of the two ways.
Pass = Callable[[Batch], ModelOutput]


def compare_rows(model: PreTrainedModel, batch: Batch, packed: Pass, stock: Pass, unit: float) -> list[str]:
    """Compute rows both ways and compare; gradients, too, if they are recorded.

    Ranks that compare together all call this. A rank whose packed forward fails still computes its padded rows,
    because the other ranks' forwards may be collective.

    Args:
        model: the model that is compared, without wrappers.
        batch: the rows.
        packed: computes rows with equal beginnings once.
        stock: computes them as in stock TRL.
        unit: the [`rounding_unit`] of the model.

    Returns:
        What differs, alike on all ranks that compare together.
    """
    cards = []
    if torch.cuda.is_initialized():
        cards = list(range(torch.cuda.device_count()))
    # A hook of the user's own may draw, and the run's next numbers must be those of stock.
    with torch.random.fork_rng(cards):
        return _compare(_Passes(model, batch, packed, stock), unit)


def projections(hidden_BLH: torch.Tensor) -> torch.Tensor:
    """Returns a number of order 1 for each last hidden state: its direction along a random vector.

    Hidden states differ in length by model and by token, and log-probabilities, for which the limits are made, do not.
    """
    generator = torch.Generator().manual_seed(0)
    random_H = torch.randn(hidden_BLH.shape[-1], generator=generator)
    direction_BLH = functional.normalize(hidden_BLH.float(), dim=-1)
    return direction_BLH @ random_H.to(hidden_BLH.device)


def rounding_unit(model: PreTrainedModel, device: torch.device) -> float:
    """Root mean square of the relative rounding error in the dtype of `model`'s products; 0 if fixed limits serve."""
    dtypes = _dtypes_of_products(model, device)
    units = [0.0]
    for dtype in dtypes & {torch.bfloat16, torch.float16}:
        units.append(torch.finfo(dtype).eps / 4)
    is_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    if is_tf32 and torch.float32 in dtypes:
        units.append(2.0**-12)
    return max(units)


def _dtypes_of_products(model: PreTrainedModel, device: torch.device) -> set[torch.dtype]:
    if torch.is_autocast_enabled(device.type):
        return {torch.get_autocast_dtype(device.type)}
    dtypes = {parameter.dtype for parameter in model.parameters()}
    is_in_bfloat16 = False
    for module in model.modules():
        if hasattr(module, "compute_dtype"):  # 4 bits
            dtypes.add(module.compute_dtype)
        if vars(module).get("support_avx512bf16_for_cpu"):
            is_in_bfloat16 = True
    # Without a gradient bitsandbytes computes these in bfloat16 on CPUs that have it, for any dtype.
    records_graph = model.training or torch.is_grad_enabled()
    if is_in_bfloat16 and device.type == "cpu" and not records_graph:
        dtypes.add(torch.bfloat16)
    return dtypes


# --- the passes ------------------------------------------------------------------------------------------------------


class _Passes:
    """The packed pass and the padded passes of the compared rows.

    The compared gradients are those of a sum over the wanted values with random weights. Each pass adds its gradients
    with a sign, so there is never more than one sum of them.
    """

    def __init__(self, model: PreTrainedModel, batch: Batch, packed: Pass, stock: Pass):
        self.model = model
        self.batch = batch
        self.packed_pass = packed
        self.stock_pass = stock
        self.wanted_RC = batch.is_wanted()
        # Normal numbers, because the gradients of equal rows with opposite signs would cancel.
        generator = torch.Generator().manual_seed(0)
        random_RC = torch.randn(self.wanted_RC.shape, generator=generator).to(self.device)
        self.weight_RC = torch.where(self.wanted_RC, random_RC, 0.0)
        self.unseen = Unseen(trainable_parameters(model))

    @property
    def device(self) -> torch.device:
        return self.wanted_RC.device

    def packed(self, sign: float) -> torch.Tensor:
        """Returns the values `(R, C)` of the packed pass."""
        with self.unseen:
            output = self.packed_pass(self.batch)
            return self._values_of(output, sign * self.weight_RC)

    def padded(self, sign: float) -> torch.Tensor:
        """Returns the values `(R, C)` of the padded passes, of one row each."""
        values = []
        for number, weight_1C in enumerate(self.weight_RC.split(1)):
            row = self.batch.rows(np.array([number]))
            with self.unseen:
                # The output has no name here, so that it is freed before the next row's pass.
                values.append(self._values_of(self.stock_pass(row), sign * weight_1C))
        return torch.cat(values)

    def _values_of(self, output: ModelOutput, weight_RC: torch.Tensor) -> torch.Tensor:
        """Returns the values of an output, whose gradients are added to the sum."""
        if self.batch.labels is None:
            values_RC = projections(output.last_hidden_state)
        else:
            values_RC = output.log_probs
        values_RC = values_RC.to(self.device)  # TRL leaves them on the LM head's device, the last one of several
        # Without an adapter a pass may have no gradient, although gradients are recorded.
        if torch.is_grad_enabled() and values_RC.requires_grad:
            self.unseen.add_gradients((values_RC * weight_RC).sum())
        return values_RC.detach()

    def over_ranks(self, sums: dict[str, float]) -> dict[str, float]:
        totals = reduced_over_ranks(list(sums.values()), self.device, "SUM")
        return dict(zip(sums, totals, strict=True))


def _compare(passes: _Passes, unit: float) -> list[str]:
    """Returns what differs between one packed forward of the rows and a padded forward of each."""
    values_are = "hidden states" if passes.batch.labels is None else "log-probability"
    failure = None
    packed_RC = torch.zeros_like(passes.weight_RC)
    size = 0.0
    try:
        packed_RC = passes.packed(1.0)
        size = passes.unseen.squared_norm()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        failure = reason_of(error)
    padded_RC = passes.padded(-1.0)
    sums = statistics(packed_RC, padded_RC, passes.wanted_RC)
    sums["gradient"] = passes.unseen.squared_norm()
    sums["size"] = size
    sums["failed"] = float(failure is not None)
    sums = passes.over_ranks(sums)
    if sums["failed"]:
        return [failure or "another rank's packed pass failed"]
    limits = LIMITS_HALF if unit else LIMITS_FP32
    faults = differences(sums, None, limits, values_are)
    if not faults or not unit:
        return faults
    # This can only raise the limits, so it is not measured before.
    passes.packed(-1.0)  # the negative padded gradient remains
    with _moved_by_rounding(passes.model.get_input_embeddings(), unit):
        moved_RC = passes.padded(1.0)
    moved = statistics(moved_RC, padded_RC, passes.wanted_RC)
    moved["gradient"] = passes.unseen.squared_norm()
    moved["size"] = size
    return differences(sums, passes.over_ranks(moved), limits, values_are)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a model whose gradients are recorded now."""
    if not torch.is_grad_enabled():
        return []
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# --- what differs ----------------------------------------------------------------------------------------------------


def statistics(values_RC: torch.Tensor, padded_RC: torch.Tensor, wanted_RC: torch.Tensor) -> dict[str, float]:
    """Returns sums over this rank's tokens of how far values are from those of the padded pass."""
    off_RC = (values_RC - padded_RC).float().abs()
    off_RC = off_RC.nan_to_num(MOST_PER_TOKEN).clamp(max=MOST_PER_TOKEN)
    is_zero_RC = (values_RC == 0) & (padded_RC < MISSING_BELOW)
    is_infinite_RC = ~values_RC.isfinite() & padded_RC.isfinite()
    missing_RC = is_zero_RC | is_infinite_RC
    off_RC = off_RC.masked_fill(missing_RC, torch.inf)  # one of many, too
    # A completion begins in any column, and a row may have several of them.
    first_RC = wanted_RC.clone()
    first_RC[:, 1:] &= ~wanted_RC[:, :-1]
    included = {"mean": wanted_RC, "first": first_RC}
    sums = {}
    for name, included_RC in included.items():
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
    noise = dict.fromkeys(off, 0.0)
    if moved is not None:
        noise = _relative(moved)
    noise["first"] = max(noise["first"], noise["mean"])  # of few tokens it is small by chance
    faults = []
    for name, title in titles.items():
        limit = max(limits[name], OVER_ROUNDING * noise[name])
        is_within = off[name] <= limit
        if not is_within:  # NaN is a fault, too
            faults.append(f"{title} from the padded pass is {off[name]:.2g} (limit {limit:.2g})")
    return faults


def _relative(sums: dict[str, float]) -> dict[str, float]:
    """Returns means per token, and the norm of a gradient's difference over the norm of the gradient."""
    relative = {}
    for name in ("mean", "first"):
        tokens = max(sums[f"{name}_tokens"], 1)
        relative[name] = sums[name] / tokens
    size = max(sums["size"], torch.finfo(torch.float32).tiny)
    relative["gradient"] = (sums["gradient"] / size) ** 0.5
    return relative


@contextlib.contextmanager
def _moved_by_rounding(embeddings: nn.Module, unit: float) -> Iterator[None]:
    """Inside the block the output of `embeddings` is changed at random by a relative amount of about `unit`."""
    generator = torch.Generator().manual_seed(0)
    thread = threading.get_ident()

    def move(module, args, output):
        if threading.get_ident() != thread:  # which may train the same model
            return output
        tokens, size = output.shape[-2:]
        # An outer product, because a random number for each entry would be as large as the output.
        is_positive_L1 = torch.randint(0, 2, (tokens, 1), generator=generator)
        sign_L1 = is_positive_L1 * 2.0 - 1.0
        change_H = unit * torch.randn(size, generator=generator)
        factor_LH = 1.0 + sign_L1.to(output.device) * change_H.to(output.device)
        moved = output.float() * factor_LH
        return moved.to(output.dtype)

    handle = embeddings.register_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()
