"""What a vLLM engine in the trainer's process takes of a card."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

from transformers import PretrainedConfig

from ...engines.vllm.adapter_sync import RolloutError
from ...engines.vllm.sync_choice import Place, choose_sync, why_own_base
from ..recipe.checks import lora_config
from . import model
from .fake_run import FakeRun
from .hardware import Hardware
from .settings import Settings


@dataclass(frozen=True)
class Engine:
    """What a vLLM engine takes of a card.

    Attributes:
        share: bytes that it may take next to a base that it shares; with a base of its own, that one included.
        base: bytes of its own copy of the base, or of the part that is not shared.
        row: bytes of a row's cache at full length. vLLM does not start with a smaller cache.
        keeps_base: whether its own copy stays when the engine sleeps.
    """

    share: int
    base: int
    row: int
    keeps_base: bool

    @property
    def rest(self) -> int:
        """Bytes of its cache and its passes."""
        return max(0, self.share - self.base)

    @property
    def starts(self) -> bool:
        return self.rest >= self.row


def plan_engine(run: FakeRun, hardware: Hardware) -> Engine | None:
    """The [`Engine`] of a run; `None` if it runs on another machine or not at all."""
    settings = run.settings
    if settings.is_paired or not settings.use_vllm or settings.vllm_mode != "colocate" or not hardware.gpu:
        return None
    sends_adapter, is_shared = choices(settings, run.config)
    dtype = model.compute_dtype(settings, run.config)
    base = 0
    for name, parameter in run.whole.named_parameters():
        is_packed = not parameter.is_floating_point()
        same = is_shared and (is_packed or parameter.dtype == dtype) and ".experts." not in name
        if "lora_" not in name and not same:
            base += model.weights_in(parameter) * dtype.itemsize
    share = int(hardware.memory * settings.vllm_gpu_memory_utilization)
    row = run.generation_bytes().cache // settings.rollout_rows
    # Without a reason to send the adapter alone, TRL's sleep drops the weights.
    return Engine(share, base // settings.vllm_tensor_parallel_size, row, keeps_base=sends_adapter)


def choices(settings: Settings, config: PretrainedConfig) -> tuple[bool, bool]:
    """Whether the engine gets the adapter alone, and whether it shares the trainer's base, by the run's own rules.

    For a choice that the run refuses before it loads a model, both are false.
    """
    base = settings.model
    kwargs = settings.vllm_engine_kwargs  # on a command line the field is JSON
    of_config = {
        "vllm_engine_kwargs": json.loads(kwargs) if isinstance(kwargs, str) else kwargs,
        "model_init_kwargs": {"dtype": model.dtype_of(settings, config)},
        "fp16": settings.mixed == "float16",
        "bf16": settings.mixed == "bfloat16",
    }
    args = SimpleNamespace(**settings.values | of_config)
    quantization = {"load_in_4bit": base.load_in_4bit} if base.load_in_4bit or base.load_in_8bit else None
    place = Place(settings.launch.is_sharded, on_gpu=True)
    name = base.model_name_or_path
    try:
        sync = choose_sync(args, lora_config(base), quantization is not None, model=name, place=place)
        own_base = why_own_base(args, sync, quantization, name, place)
    except RolloutError:
        return False, False
    return sync.mode == "adapter", own_base is None
