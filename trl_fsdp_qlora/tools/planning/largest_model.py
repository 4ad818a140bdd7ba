"""The largest of the well-known models that a run trains on its cards next to a vLLM engine in its process."""

from dataclasses import replace

from .hardware import GIB
from .known_models import MODELS, known_config
from .model import compute_dtype
from .plan import Plan, make_plan

BASES = ("one base", "a base each")
_PASSES = GIB  # of an engine: buffers of a pass and CUDA graphs; assumed
_EXPERTS = "_moe"


def bytes_with_engine(plan: Plan, name: str) -> dict[str, int]:
    """Bytes that a run like `plan` needs with the model `name`, if trainer and engine hold one base or a base each.

    The engine has a cache for a group of completions, so `vllm_gpu_memory_utilization` is not that of the run.
    """
    settings = plan.settings
    values = {
        "use_vllm": True, "vllm_mode": "colocate", "rollout_sync": "adapter", "vllm_share_base": "on",
        "vllm_gpu_memory_utilization": 0.0,
    }  # fmt: skip
    every_layer = replace(settings.model, lora_target_modules=["all-linear"])
    settings = replace(settings, model=every_layer, values=settings.values | values)
    config = known_config(name)
    alone = make_plan(settings, plan.hardware, config)
    engine = alone.engine.row * settings.num_generations + _PASSES
    dense = alone.parameters[0] * compute_dtype(settings, config).itemsize
    return {"one base": alone.peak + engine, "a base each": alone.peak + engine + dense}


def largest_models(plan: Plan, sizes: dict[str, dict[str, int]] | None = None) -> dict[str, str | None]:
    """For each of [`BASES`], the largest dense model of [`MODELS`] that fits a card; `None` if none does.

    `sizes`: results of [`bytes_with_engine`] by model, which are used and filled in.
    """
    sizes = {} if sizes is None else sizes
    names = [name for name, (shape, _) in MODELS.items() if not shape["model_type"].endswith(_EXPERTS)]
    largest = {}
    for base in BASES:
        fitting = 0  # of so many of the smallest models the largest fits
        too_many = len(names) + 1
        while too_many - fitting > 1:
            count = (fitting + too_many) // 2
            name = names[count - 1]
            if name not in sizes:
                sizes[name] = bytes_with_engine(plan, name)
            if sizes[name][base] <= plan.capacity:
                fitting = count
            else:
                too_many = count
        largest[base] = names[fitting - 1] if fitting else None
    return largest
