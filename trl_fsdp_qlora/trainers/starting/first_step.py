"""The first step on a TRL that this package was not tested with: computed by TRL's own trainer class, and by ours.

The first micro-batch's loss and gradients are compared once, and all ranks decide together. If they differ by more
than rounding, or cannot be compared, the run continues as stock TRL, with one line. This module is imported on such a
TRL only; packed passes are compared with padded ones on every TRL (`prefix_sharing/check.py`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
import trl
from accelerate.logging import get_logger
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...compat import fsdp, trl_seams
from ...compat.trl import INSTALL
from ...compat.trl_rollouts import ROWS, DrawnRows
from ...prefix_sharing.check import LIMITS_FP32, LIMITS_HALF, rounding_unit
from ...prefix_sharing.dropout import without_dropout
from ...prefix_sharing.ranks import reduced_over_ranks
from ...prefix_sharing.status import Status, is_out_of_memory, reason_of

if TYPE_CHECKING:
    from ..trainer_run import TrainerRun

logger = get_logger(__name__)

# What two losses may differ by, next to one: a tenth of what single log-probabilities may.
LOSS_LIMIT = 0.1


class Pair(NamedTuple):
    """The class of this package that a trainer is one of, and TRL's class whose loss it computes."""

    ours: type
    stock: type

    @classmethod
    def of(cls, trainer: "TrainerRun") -> "Pair":
        classes = type(trainer).__mro__
        first = {
            package: next(owner for owner in classes if owner.__module__.startswith(f"{package}."))
            for package in ("trl_fsdp_qlora", "trl")
        }
        return cls(first["trl_fsdp_qlora"], first["trl"])


def is_to_be_compared(trainer: "TrainerRun") -> bool:
    """Whether the first step of a trainer is to be compared; a line is logged for each name that its TRL lacks.

    If nothing is compared, a line has the reason. DeepSpeed steps in a backward, and FSDP1 keeps gradients in flat
    parameters. The losses of T-SPMO and A*-PO are not TRL's.
    """
    ours, stock = Pair.of(trainer)
    trl_seams.check(trainer, stock)
    is_fsdp1 = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    reasons = {
        f"its loss is {ours.__name__}'s own": ours.own_loss,
        "the run uses DeepSpeed": trainer.is_deepspeed_enabled,
        "the run uses FSDP1": is_fsdp1,
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is not None:
        logger.warning(f"The first step is not compared with TRL's own ({reason}); tested is: {INSTALL}")
        return False
    if trainer.users_loss is not None:
        logger.warning(f"The first step is compared with TRL's own without {trainer.users_loss}, which is called once")
    return True


def compare_first_step(trainer: "TrainerRun", model: nn.Module, inputs: DrawnRows) -> None:
    """Compare, and let the run continue as stock if the two ways differ. Collective.

    Args:
        trainer: one of this package.
        model, inputs: the arguments of its `compute_loss`.
    """
    if ROWS in inputs:
        logger.warning("The first step is not compared with TRL's own, which knows no episodes of several rows.")
        return
    try:
        reason = _difference(trainer, model, _with_telling_advantages(inputs))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = f"they could not be compared ({reason_of(error)})"
        fsdp.forget_forward(model)
    if any(reduced_over_ranks([int(reason is not None)], trainer.accelerator.device)):
        reason = reason or "another rank found a difference"
        trainer.run_as_stock(f"the first step by TRL {trl.__version__} and by this package: {reason}")
        logger.warning(
            f"The run continues as stock TRL. Its first step was computed by TRL {trl.__version__} and by this "
            f"package: {reason}. To train with this package, install a TRL that it was tested with: {INSTALL}"
        )


@contextmanager
def forwards_as_stock(trainer: "TrainerRun") -> Iterator[None]:
    """A block in which the forwards of a trainer's models run as in stock TRL."""
    sharings = [sharing for sharing in (trainer.sharing, trainer.reference_sharing) if sharing is not None]
    before = [sharing.status for sharing in sharings]
    try:
        for sharing in sharings:
            sharing.status = Status.as_stock("compared with stock TRL")
        yield
    finally:
        for sharing, status in zip(sharings, before, strict=True):
            sharing.status = status


def _with_telling_advantages(inputs: DrawnRows) -> DrawnRows:
    """Inputs with advantages of both signs and, if there are several rows, one of zero, so that a fault has effect."""
    advantages = inputs.get("advantages")
    if advantages is None:  # DPO
        return inputs
    count = len(advantages)
    numbers = torch.arange(1, count + 1, dtype=advantages.dtype, device=advantages.device)
    of_both_signs = torch.where(numbers % 2 == 0, numbers, -numbers)
    values = of_both_signs / count
    values[1:2] = 0
    one_per_token = [1] * (advantages.ndim - 1)
    values = values.view(count, *one_per_token)
    return {**inputs, "advantages": values.expand_as(advantages)}


def _difference(trainer: "TrainerRun", model: nn.Module, inputs: DrawnRows) -> str | None:
    """What differs between the two losses and their gradients; `None` if it may be rounding."""
    # Two objects with the trainer's attributes, so that what a loss sets is forgotten. One has this package's methods,
    # the other TRL's alone. The user's own are not called: they may count their calls.
    ours, theirs = map(object.__new__, Pair.of(trainer))
    attributes = {name: value for name, value in vars(trainer).items() if name not in trl_seams.METHODS_OF_LOSS}
    for copy in (ours, theirs):
        vars(copy).update(attributes)
    ours.why_stock = "compared with stock TRL"  # no token is left out
    with trainer.accelerator.autocast():
        limits = LIMITS_HALF if rounding_unit(trainer.sharing.base, trainer.accelerator.device) else LIMITS_FP32
    with _separate_gradients(model) as parameters, _leaving_no_trace(trainer), without_dropout(model):
        with forwards_as_stock(trainer):
            loss = theirs.compute_loss(model, dict(inputs))
        trainer.accelerator.backward(loss)
        length = _norm(parameters)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.neg_()  # the second backward adds to it, so that the difference is left
        our_loss = ours.compute_loss(model, dict(inputs))
        trainer.accelerator.backward(our_loss)
        apart = _norm(parameters)
    loss = loss.item()
    our_loss = our_loss.item()
    loss_limit = limits["mean"] * LOSS_LIMIT * (1 + abs(loss))
    if not abs(our_loss - loss) <= loss_limit:  # NaN is a difference, too
        return f"the loss is {loss:.6g} by TRL and {our_loss:.6g} by this package"
    if not apart <= limits["gradient"] * length:
        return f"the gradients have the norm {length:.3g} by TRL, and differ by {apart:.3g}"
    return None


@contextmanager
def _separate_gradients(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """In the block the gradients of the yielded parameters start from nothing; afterwards they are as before."""
    for unit, _ in fsdp.units(model):
        unit.reshard()  # only a sharded unit has the parameters that the optimizer knows
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        # Under FSDP2 accelerate's no_sync would keep these gradients for the next ones.
        is_ddp = isinstance(model, DistributedDataParallel)
        with model.no_sync() if is_ddp else fsdp.fsdp_reduces(model):
            yield parameters
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _norm(parameters: list[nn.Parameter]) -> float:
    """The norm of all gradients together; of this rank's shards if they are sharded."""
    squares = 0.0
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        squares += float(torch.linalg.vector_norm(gradient.float())) ** 2
    return squares**0.5


@contextmanager
def _leaving_no_trace(trainer: "TrainerRun") -> Iterator[None]:
    """In the block a trainer plans no step; then metrics and random numbers are as before."""
    lengths = {}
    for mode, metrics in trainer._metrics.items():
        lengths[mode] = {name: len(values) for name, values in metrics.items()}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(trainer.telemetry.forgetting())
        if hasattr(trainer, "look_ahead"):
            stack.enter_context(trainer.look_ahead.planning_nothing())
        yield
    for mode, metrics in trainer._metrics.items():
        for name in list(metrics):
            before = lengths[mode].get(name, 0)
            del metrics[name][before:]
            if not metrics[name]:
                del metrics[name]
