"""Bytes of a vLLM engine in the trainer's process: a base of its own or the trainer's, and what its cache gets."""

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig

from . import model
from .hardware import Hardware
from .settings import Settings


@dataclass(frozen=True)
class Engine:
    """What an engine takes of a card.

    Attributes:
        share: bytes that it may take beside a base that it shares; with a base of its own, that one included.
        base: bytes of its own copy of the base, or of the part that is not shared.
        row: bytes of a row's cache at full length. vLLM does not start with a smaller cache.
        is_shared: whether trainer and engine hold one base.
        keeps_base: whether its own copy stays when the engine sleeps.
    """

    share: int
    base: int
    row: int
    is_shared: bool
    keeps_base: bool

    @property
    def rest(self) -> int:
        """Bytes of its cache and its passes."""
        return max(0, self.share - self.base)

    @property
    def starts(self) -> bool:
        return self.rest >= self.row


def plan_engine(settings: Settings, config: PretrainedConfig, hardware: Hardware, skeleton: nn.Module, row: int):
    """The [`Engine`] of a run; `None` if it runs on another machine or not at all.

    Args:
        skeleton: the trainer's model without data.
        row: see [`Engine`].
    """
    if settings.is_paired or not settings.use_vllm or settings.vllm_mode != "colocate" or not hardware.gpu:
        return None
    is_shared = shares_base(settings, config)
    drawn = model.compute_dtype(settings, config)
    base = 0
    for name, parameter in skeleton.named_parameters():
        in_4_bits = not parameter.is_floating_point()
        same = is_shared and (in_4_bits or parameter.dtype == drawn) and ".experts." not in name
        if "lora_" not in name and not same:
            base += parameter.numel() * (2 if in_4_bits else 1) * drawn.itemsize
    # As in `vllm/sync_choice.py`: without a reason to send the adapter alone, TRL's sleep drops the weights.
    sends_adapter = settings.model.use_peft and (
        settings.rollout_sync == "adapter"
        or is_shared
        or settings.model.load_in_4bit
        or settings.launch.kind in ("fsdp2", "zero3")
    )
    share = int(hardware.memory * settings.vllm_gpu_memory_utilization)
    return Engine(share, base // settings.vllm_tensor_parallel_size, row, is_shared, sends_adapter)


def shares_base(settings: Settings, config: PretrainedConfig) -> bool:
    """Whether `vllm/sync_choice.py: why_own_base` finds no reason against it on the planned cards."""
    choice = settings.vllm_share_base
    is_whole = settings.launch.kind not in ("fsdp2", "zero3") and settings.vllm_tensor_parallel_size == 1
    in_4_bits = settings.model.load_in_4bit
    same_dtype = in_4_bits or model.dtype_of(settings, config) == model.compute_dtype(settings, config)
    if choice == "off" or not (is_whole and same_dtype and settings.model.use_peft):
        return False
    return choice == "on" or (settings.rollout_sync == "adapter" and not in_4_bits)
