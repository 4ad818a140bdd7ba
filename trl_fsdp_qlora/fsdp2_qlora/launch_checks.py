"""Combinations of accelerate config, quantization and adapter that train wrongly or not at all.

They are reported before a model is loaded.
"""

import os
from importlib.metadata import version

from packaging.version import Version

from ..errors import UserError


class LaunchError(UserError):
    """The accelerate config, the quantization and the adapter do not go together."""


def is_fsdp_launch() -> bool:
    """Whether `accelerate launch` was given a config with FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def is_fsdp2_launch() -> bool:
    """Whether the processes of this launch will share one model by FSDP2."""
    return is_fsdp_launch() and os.environ.get("FSDP_VERSION") == "2" and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _asks_for(quantization: object, name: str) -> bool:
    value = quantization.get(name) if isinstance(quantization, dict) else getattr(quantization, name, False)
    return bool(value)


def check_launch(quantization_config=None, zero_stage: int | None = None) -> None:
    """Refuse combinations that are known not to work.

    The check reads the environment variables that `accelerate launch` sets from its config, the run's
    `BitsAndBytesConfig` (or the checkpoint's own entry, a mapping) and DeepSpeed's stage. An argument is `None` if the
    run has no such thing.

    Raises:
        LaunchError: the combination does not work; the message has the line to change.
    """
    eight_bit = _asks_for(quantization_config, "load_in_8bit")
    if not (eight_bit or _asks_for(quantization_config, "load_in_4bit")):
        return
    if zero_stage == 3:
        raise LaunchError(
            "zero_stage: 3 with a quantized base: ZeRO-3 does not partition packed weights, so every rank keeps all "
            "of them. Launch with --accelerate_config fsdp2_qlora, which shards them, or set `zero_stage: 2` in the "
            "accelerate config"
        )
    if is_fsdp_launch() and os.environ.get("FSDP_VERSION", "1") != "2":
        raise LaunchError(
            "fsdp_version is 1 (which is the default): FSDP1 flattens weights into one dtype and cannot shard a "
            "quantized base with an adapter. In the accelerate config, under fsdp_config, set `fsdp_version: 2`"
        )
    if is_fsdp_launch() and eight_bit:
        raise LaunchError(
            "load_in_8bit with FSDP2: int8 layers keep statistics that FSDP2 cannot shard. In the recipe set "
            "`load_in_4bit: true` instead of `load_in_8bit: true`, or launch with --accelerate_config ddp"
        )


def check_reference(needs_reference: bool) -> None:
    """Refuse a separate reference model (full fine-tuning with a KL term) if it would be zeros on other ranks.

    With rank-0 loading, transformers before 5.23 relies on a broadcast, which TRL does for the policy alone.
    """
    installed = version("transformers")
    loads_on_rank_0 = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false").lower() == "true"
    if needs_reference and is_fsdp2_launch() and loads_on_rank_0 and Version(installed) < Version("5.23"):
        raise LaunchError(
            f"transformers {installed} with FSDP2 leaves zeros in a reference model that rank 0 loads. In the "
            "accelerate config, under fsdp_config, set `fsdp_cpu_ram_efficient_loading: false`, or pip install "
            "'transformers>=5.23', or train an adapter"
        )
