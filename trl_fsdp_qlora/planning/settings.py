"""What a plan needs to know of a run: from a recipe's parsed arguments, or from its YAML without building a config.

A config cannot be built for another machine's hardware (`bf16: true` is refused where there is no GPU), so the command reads
the fields and takes what is not set from the defaults of TRL's own dataclasses.
"""

import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from trl import GRPOConfig, ModelConfig

from ..fsdp2_qlora.launch_checks import is_fsdp2_launch
from ..recipe.arguments import ConfigError, ScriptArguments, check_key, read_yaml
from ..run.config_fields import SWITCHES, spelled
from ..run.shipped import accelerate_config

# Fields of this package's configs that are read where they are set.
_OWN = {"prefix_sharing": "auto", "lm_head_kernel": "auto", "compact_generation": True, "fsdp_gather": "auto"}
_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "max_completion_length")


@dataclass(frozen=True)
class Launch:
    """How a run is spread."""

    kind: str = "single"  # or ddp, fsdp2, zero2, zero3
    processes: int = 1  # ranks, one per card
    offload: bool = False  # FSDP2's shards lie in host memory
    use_cpu: bool = False  # the ranks compute on the host
    mixed_precision: str | None = None  # bf16, fp16, no; `None` where the accelerate config is silent


@dataclass(frozen=True)
class Settings:
    """One run, as far as its memory depends on it; `values` are the trainer's fields, and attributes too."""

    model: ModelConfig
    values: dict[str, Any] = field(repr=False)
    launch: Launch
    prompt_tokens: int = 256  # of the longest prompt of a batch
    prompt_source: str = "--prompt_tokens sets it"

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("values", ()):
            return self.values[name]
        raise AttributeError(name)

    @property
    def rollout_rows(self) -> int:
        """Completions that one rank generates at once."""
        return self.per_device_train_batch_size * self.rollout_batches

    @property
    def rollout_batches(self) -> int:
        """Micro-batches of one generation."""
        if self.steps_per_generation:
            return self.steps_per_generation
        if self.generation_batch_size:
            return max(1, self.generation_batch_size // (self.per_device_train_batch_size * self.launch.processes))
        return self.gradient_accumulation_steps

    @property
    def groups(self) -> int:
        """Groups, whole or in part, in a micro-batch."""
        return max(1, -(-self.per_device_train_batch_size // self.num_generations))

    @property
    def mixed(self) -> str | None:
        """Dtype of the mixed precision, or `None`."""
        if self.launch.mixed_precision == "no":
            return None
        if self.fp16 or self.launch.mixed_precision == "fp16":
            return "float16"
        # TRL's default is bf16 where nothing is set; the accelerate config's word comes second.
        return "bfloat16" if self.bf16 or self.bf16 is None or self.launch.mixed_precision == "bf16" else None

    @property
    def scores_again(self) -> bool:
        """A pass without gradients comes before the loss: the policy's old log-probabilities, or the reference's."""
        return bool(self.beta) or self.num_iterations > 1 or self.rollout_batches > self.gradient_accumulation_steps


def _defaults() -> dict[str, Any]:
    found = {
        item.name: item.default if item.default_factory is MISSING else item.default_factory()
        for item in fields(GRPOConfig)
    }
    return found | _OWN


def from_config(config: Any, model: ModelConfig, **more: Any) -> Settings:
    """The settings of a run that is about to start, from its parsed arguments; `more`: `prompt_tokens`, `prompt_source`."""
    values = {name: getattr(config, name, default) for name, default in _defaults().items()}
    kind = config.distributed_state.distributed_type.value
    # Accelerate says FSDP of itself only once a trainer has made its `Accelerator`; on a CPU it makes DDP of it.
    if is_fsdp2_launch() and kind in ("NO", "MULTI_GPU") and config.device.type != "cpu":
        kind = "FSDP"
    kinds = {"FSDP": "fsdp2", "DEEPSPEED": f"zero{getattr(config.deepspeed_plugin, 'zero_stage', None)}"}
    launch = Launch(
        kinds.get(kind, "single" if config.world_size == 1 else "ddp"),
        config.world_size,
        os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true",
        config.device.type == "cpu",
        None if config.bf16 or config.fp16 else "no",
    )
    return Settings(model, values, launch, **more)


def read_launch(path: str | None, processes: int | None = None) -> Launch:
    """The launch that an accelerate config (a file or a name; `None` is one process) describes, with `processes` if given.

    Raises:
        UserError: no such file or name.
    """
    if path is None:
        return Launch("single" if (processes or 1) == 1 else "ddp", processes or 1)
    content = read_yaml(path if Path(path).exists() else accelerate_config(path), "--accelerate_config")
    ranks = int(processes or content.get("num_processes") or 1)
    zero = (content.get("deepspeed_config") or {}).get("zero_stage")
    kind = {"FSDP": "fsdp2", "DEEPSPEED": f"zero{zero}"}.get(str(content.get("distributed_type")), "ddp")
    return Launch(
        "single" if ranks == 1 and kind == "ddp" else kind,
        ranks,
        bool((content.get("fsdp_config") or {}).get("fsdp_offload_params")),
        bool(content.get("use_cpu")),
        content.get("mixed_precision"),
    )


def from_yaml(
    path: str | None, overrides: dict[str, Any], launch: Launch, types: Sequence[type] = (), **more: Any
) -> Settings:
    """The settings of a recipe's YAML at `path`, with `overrides` (as text or typed) over it; `more`: `prompt_tokens`,
    `prompt_source`. Fields of the dataclasses `types` are known too; without them an unknown key is let pass.

    Raises:
        ConfigError: the file cannot be read; a key that none of the types has; a value of the wrong kind.
    """
    content = {} if path is None else read_yaml(path)
    content.pop("env", None)
    content |= {key: yaml.safe_load(value) if isinstance(value, str) else value for key, value in overrides.items()}
    of_model = {item.name for item in fields(ModelConfig)}
    known = {item.name for kind in (GRPOConfig, ScriptArguments, *types) for item in fields(kind)} | of_model
    for key in content if types else ():
        check_key(key, known, "command line" if key in overrides else path)
    model = ModelConfig(**{key: value for key, value in content.items() if key in of_model})
    # No config is built that would read what YAML makes of `off`.
    values = _defaults() | {key: spelled(value) if key in SWITCHES else value for key, value in content.items()}
    for name in _COUNTS:
        if not str(values[name]).isdigit() or not int(values[name]):
            raise ConfigError(f"{name}={values[name]!r} is not a whole number of at least 1")
        values[name] = int(values[name])
    if launch.kind == "single" and launch.mixed_precision is None and values.get("use_cpu"):
        launch = Launch(launch.kind, launch.processes, use_cpu=True)
    return Settings(model, values, launch, **more)
