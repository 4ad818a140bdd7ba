"""A pass computed both ways, packed and padded, and compared: log-probabilities token by token, and gradients.

The caller runs it once for each set of attention backends that a model's packed rows come to use. Every rank takes the
same forwards and backwards.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from ..compat.fsdp import has_unreduced_gradients, reducing, sharded_trainable

# Largest |Δ log-probability| in nats that rounding explains. Padded and packed float32 passes were never further apart
# than 6e-5 here (SmolLM2-135M), while a completion cut off its prompt, a lost window or a leaking recurrent state moves
# log-probabilities by 0.1 to 2 in a trained model.
MAX_DIFFERENCE_FP32 = 1e-3
# In half precision single tokens differ by a few hundredths from run to run; means and quantiles do not. First tokens
# are predicted across the border of two segments, so they are also compared with how far the others are off.
MEAN_DIFFERENCE_HALF = 0.05
QUANTILE, QUANTILE_DIFFERENCE_HALF = 0.9, 0.15
FIRST_DIFFERENCE_HALF, FIRST_OVER_OTHERS = 0.02, 3.0
# Norm of a difference of gradients over the norm of the gradient: of each parameter in float32, with a floor for those
# whose gradient is small beside the largest; of all together in half precision.
GRADIENT_DIFFERENCE_FP32, GRADIENT_FLOOR_FP32 = 1e-2, 1e-4
GRADIENT_DIFFERENCE_HALF = 0.25

_HALF = (torch.bfloat16, torch.float16)


def difference(
    packed_BC: torch.Tensor, padded_BC: torch.Tensor, scored_BC: torch.Tensor, dtype: torch.dtype
) -> str | None:
    """What is wrong with the log-probabilities of a packed pass; `None` where rounding explains the difference.

    Args:
        packed_BC, padded_BC: log-probabilities of both passes.
        scored_BC: the tokens that the loss scores. A value missing in one pass (a zero) is a difference like any other.
        dtype: what the model computes in.
    """
    if not scored_BC.any():
        return None
    error_BC = torch.where(scored_BC, (packed_BC - padded_BC).detach().double(), 0.0).abs()
    error_N = error_BC[scored_BC]
    if not torch.isfinite(error_N).all():
        return "log-probabilities are not finite on one of the two paths"
    missing = int(((packed_BC == 0) & scored_BC & (error_BC > QUANTILE_DIFFERENCE_HALF)).sum())
    if missing:
        return f"{missing} log-probabilities that the padded pass has are missing: a difference in log-probability"
    if dtype not in _HALF:
        checks = [("largest", error_N.max(), MAX_DIFFERENCE_FP32)]
    else:
        first_BC = scored_BC & (scored_BC.cumsum(1) == 1)
        first_BC[:, 1:] = False  # where the score mask begins later, nothing crosses the border of two segments
        first_N, others_N = error_BC[first_BC], error_BC[scored_BC & ~first_BC]
        checks = [
            ("mean", error_N.mean(), MEAN_DIFFERENCE_HALF),
            (f"{QUANTILE:.0%} quantile of the", error_N.quantile(QUANTILE), QUANTILE_DIFFERENCE_HALF),
        ]
        if len(first_N) and len(others_N):
            limit = max(FIRST_DIFFERENCE_HALF, FIRST_OVER_OTHERS * others_N.mean().item())
            checks.append(("first tokens' mean", first_N.mean(), limit))
    for what, value, limit in checks:
        if value > limit:
            return f"{what} difference in log-probability from the padded pass is {value:.2g} nats (limit {limit:.2g})"
    return None


class GradientCheck:
    """Compares the gradients of a packed and a padded pass without a trace in `.grad`.

    The gradients are those of a sum over the scored tokens with signs drawn from a fixed seed, for all trainable
    parameters. The second pass is added to the first one's gradients with the signs turned round, so there is never
    more than one copy of them, which is what the step itself is about to need.

    Not under wrappers whose backward is a method of their own (DeepSpeed, FSDP1): see [`possible`].
    """

    def __init__(self, model: torch.nn.Module, scored_BC: torch.Tensor):
        self.model = model
        draw = torch.Generator().manual_seed(0)
        signs = torch.randint(0, 2, scored_BC.shape, generator=draw).to(scored_BC.device) * 2.0 - 1.0
        self.signs_BC = torch.where(scored_BC, signs, 0.0)
        self.norms: list[float] = []

    @staticmethod
    def possible(model: torch.nn.Module) -> bool:
        """Whether a plain `backward` through `model` may be undone: no wrapper but DDP, or FSDP2 with nothing pending."""
        if isinstance(model, FSDPModule):
            return not has_unreduced_gradients(model)
        # By class: DeepSpeed's engine answers for the attributes of what is in it, and its ZeRO marks the parameters.
        if not isinstance(model, (DistributedDataParallel, PreTrainedModel, PeftModel)):
            return False
        return not any(hasattr(parameter, "ds_id") for parameter in model.parameters())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Gradients start from nothing inside and are what they were afterwards."""
        self.parameters = (
            sharded_trainable(self.model)
            if isinstance(self.model, FSDPModule)
            else [p for p in self.model.parameters() if p.requires_grad]
        )
        before = [parameter.grad for parameter in self.parameters]
        self._clear()
        reduction = contextlib.nullcontext()
        if isinstance(self.model, DistributedDataParallel):
            reduction = self.model.no_sync()  # each rank compares its own
        elif isinstance(self.model, FSDPModule):
            reduction = reducing(self.model)  # unreduced gradients would be whole ones, kept until the next backward
        try:
            with reduction:
                yield
        finally:
            for parameter, gradient in zip(self.parameters, before, strict=True):
                parameter.grad = gradient

    def packed(self, logps_BC: torch.Tensor) -> None:
        """Backward of the packed pass."""
        (logps_BC * self.signs_BC).sum().backward()
        self.norms = self._norms()

    def padded(self, logps_BC: torch.Tensor, dtype: torch.dtype) -> str | None:
        """Backward of the padded pass, and what is wrong with the packed one's gradients."""
        (logps_BC * -self.signs_BC).sum().backward()
        differences, norms = self._norms(), self.norms
        if not all(map(_finite, [*differences, *norms])):
            return "gradients are not finite on one of the two paths"
        if dtype in _HALF:
            off, size = _length(differences), _length(norms)
            worst, limit = (off / size if size else float(off > 0)), GRADIENT_DIFFERENCE_HALF
        else:
            floor = GRADIENT_FLOOR_FP32 / GRADIENT_DIFFERENCE_FP32 * max(norms, default=0.0)
            worst = max(
                (off / max(size, floor) if size or floor else float(off > 0))
                for off, size in zip(differences, norms, strict=True)
            )
            limit = GRADIENT_DIFFERENCE_FP32
        if worst <= limit:
            return None
        return f"gradients differ from the padded pass by {worst:.2g} of their norm (limit {limit:.2g})"

    def _norms(self) -> list[float]:
        """Norm of each gradient, of this rank's shard where it is sharded."""
        local = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in self.parameters]
        norms = [torch.zeros(()) if g is None else g.detach().double().norm().cpu() for g in local]
        return torch.stack(norms).tolist()

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def compare(
    model: torch.nn.Module,
    packed: Callable[[], torch.Tensor | None],
    padded: Callable[[], torch.Tensor],
    scored_BC: torch.Tensor,
    dtype: torch.dtype,
    after_forward: bool = False,
) -> str | None:
    """Run a pass both ways and say what is wrong with the packed one, on this rank; `None` where they agree.

    Gradients are compared where the caller's mode records them and the wrapper allows it. Dropout is the caller's.

    Args:
        model: the root module.
        packed, padded: the passes, `(B, C)` log-probabilities each; `packed` may give `None` where all ranks decided
            that there is nothing to compare.
        scored_BC: tokens to compare.
        dtype: what the model computes in.
        after_forward: a forward was made and thrown away. DDP's reducer waits for its backward and would average the
            next one it sees over the ranks, so no gradients are compared there.
    """
    armed = after_forward and isinstance(model, DistributedDataParallel)
    if armed or not (torch.is_grad_enabled() and GradientCheck.possible(model)):
        with torch.no_grad():
            logps_BC = packed()
            return None if logps_BC is None else difference(logps_BC, padded(), scored_BC, dtype)
    check = GradientCheck(model, scored_BC)
    with check.aside():
        packed_BC = packed()
        if packed_BC is None:
            return None
        check.packed(packed_BC)
        packed_BC = packed_BC.detach()
        padded_BC = padded()
        wrong_gradient = check.padded(padded_BC, dtype)
    return difference(packed_BC, padded_BC, scored_BC, dtype) or wrong_gradient


def _finite(value: float) -> bool:
    return value - value == 0.0


def _length(values: list[float]) -> float:
    return sum(value * value for value in values) ** 0.5
