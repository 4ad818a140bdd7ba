"""Bytes of a vLLM engine in the trainer's process: a base of its own or the trainer's, and what its cache gets."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

from torch import nn
from transformers import PretrainedConfig

from ...engines.vllm.adapter_sync import RolloutError
from ...engines.vllm.sync_choice import Place, choose_sync, why_own_base
from ..recipe.checks import lora_config
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
    sends_adapter, is_shared = choices(settings, config)
    drawn = model.compute_dtype(settings, config)
    base = 0
    for name, parameter in skeleton.named_parameters():
        in_4_bits = not parameter.is_floating_point()
        of_packed_experts = in_4_bits and ".experts." in name
        same = is_shared and (in_4_bits or parameter.dtype == drawn) and not of_packed_experts
        if "lora_" not in name and not same:
            base += parameter.numel() * (2 if in_4_bits else 1) * drawn.itemsize
    share = int(hardware.memory * settings.vllm_gpu_memory_utilization)
    # Without a reason to send the adapter alone, TRL's sleep drops the weights.
    return Engine(share, base // settings.vllm_tensor_parallel_size, row, is_shared, keeps_base=sends_adapter)


def choices(settings: Settings, config: PretrainedConfig) -> tuple[bool, bool]:
    """Whether the engine gets the adapter alone, and whether it shares the trainer's base, by the run's own rules.

    Of choices that cannot be, which end the run before it loads a model, neither is so.
    """
    if settings.has_teacher:  # TRL's own engine gets all weights
        return False, False
    base = settings.model
    kwargs = settings.vllm_engine_kwargs  # on a command line the field is JSON
    names = ("use_vllm", "rollout_sync", "vllm_share_base", "vllm_mode", "vllm_tensor_parallel_size")
    args = SimpleNamespace(
        **{name: settings.values[name] for name in names},
        vllm_engine_kwargs=json.loads(kwargs) if isinstance(kwargs, str) else kwargs,
        model_init_kwargs={"dtype": model.dtype_of(settings, config)},
        fp16=settings.mixed == "float16",
        bf16=settings.mixed == "bfloat16",
    )
    quantization = {"load_in_4bit": base.load_in_4bit} if base.load_in_4bit or base.load_in_8bit else None
    place = Place(settings.launch.kind in ("fsdp2", "zero3"), on_gpu=True)
    name = base.model_name_or_path
    try:
        sync = choose_sync(args, lora_config(base), quantization is not None, model=name, place=place)
        own_base = why_own_base(args, sync, quantization, name, place)
    except RolloutError:
        return False, False
    return sync.mode == "adapter", own_base is None
