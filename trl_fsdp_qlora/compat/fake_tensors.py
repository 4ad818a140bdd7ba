"""torch's fake tensors, on which `plan` runs a step: what code that meets them has to ask.

Fake tensors of a plan are on the CPU, because autograd refuses those of a device that the installed torch lacks. Their
mode has the type of the device for which the plan is made.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

__all__ = [
    "ATTENTION",
    "DataDependentOutputException",
    "DeviceMode",
    "FakeTensor",
    "array_of",
    "device_type",
    "has_numbers",
    "is_fake",
    "list_of",
    "real_tensors",
    "scratch_of_flash_backward",
    "without_repetition",
]

T = TypeVar("T")
# The name of the attention that a plan gives a model (`fake_forms.py`).
ATTENTION = "planned_attention"
# A larger tensor is not computed in a plan: masks over pairs of tokens would be as large as in the run.
_MOST_NUMBERS = 2**24


class DeviceMode(FakeTensorMode):
    """A mode whose tensors are those of a device of another type, as far as our kernels see it.

    Real tensors may be among the inputs. Tokens and masks of a batch have numbers ([`DeviceMode.with_numbers`]),
    because a trainer reads which tokens are scored.

    Attributes:
        device_type: of this device.
    """

    def __init__(self, device_type: str):
        super().__init__(allow_non_fake_inputs=True)
        self.device_type = device_type

    def with_numbers(self, tensor: torch.Tensor) -> FakeTensor:
        """A fake tensor that can be read: torch computes what follows from such tensors alone, as of constants."""
        return self.fake_tensor_converter.from_real_tensor(self, tensor, make_constant=True)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        # torch's own limit is a single number.
        return t.numel() <= _MOST_NUMBERS and not isinstance(t, FakeTensor) and t.device.type == "cpu"


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no numbers."""
    return isinstance(tensor, FakeTensor)


def has_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be read: a real one, or a fake one whose numbers are known."""
    return not isinstance(tensor, FakeTensor) or tensor.constant is not None


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """The numbers of a tensor on the host, which may be a fake one that has them."""
    if isinstance(tensor, FakeTensor):
        tensor = tensor.constant
    with unset_fake_temporarily():
        return tensor.numpy()


def list_of(tensor: torch.Tensor) -> list:
    """`tensor.tolist()`, which takes a millisecond for each number of a fake tensor."""
    if not isinstance(tensor, FakeTensor):
        return tensor.tolist()
    return array_of(tensor).tolist()


def device_type(tensor: torch.Tensor) -> str:
    """The type of a tensor's device; of a fake tensor, of the device for which a plan is made."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor.fake_mode, "device_type", tensor.device.type)
    return tensor.device.type


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Autocast's dtype if autocast is on, else the dtype of `x`; autocast has no effect inside a custom function."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def real_tensors() -> AbstractContextManager:
    """A context in which new tensors are real, also inside of a mode of fake tensors."""
    return unset_fake_temporarily()


def without_repetition(tiles: Sequence[T], tensor: torch.Tensor) -> Sequence[T]:
    """The tiles in which a kernel computes `tensor`; the first two if it is fake: each later one takes their bytes."""
    return tiles[:2] if is_fake(tensor) else tiles


def scratch_of_flash_backward(query: torch.Tensor, key: torch.Tensor) -> None:
    """Allocate and free what torch's flash backward needs inside, `(B, H, T, D)`, which its fake form leaves out.

    It adds up the gradient of q in float32, and has those of k and v for each head of q until it ends
    (`mha_varlen_bwd`).
    """
    scratch = [torch.empty_like(query, dtype=torch.float32)]
    if query.shape[1] != key.shape[1]:
        scratch += [key.new_empty(*query.shape[:2], *key.shape[2:]) for _ in range(2)]
    del scratch
