"""The facts about a run that a plan needs: from a recipe's parsed arguments, or from its command line alone.

A config cannot be built for another machine's hardware: on a machine without a GPU it refuses `bf16: true`.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import str_to_bool
from trl import ModelConfig

from ...errors import UserError
from ...fsdp2_qlora.launch_checks import is_fsdp2_launch
from ...utils.resources import accelerate_config
from ..recipe.arguments import ScriptArguments, recipe_fields


@dataclass(frozen=True)
class Launch:
    """The processes of a run, and the way in which they share the model.

    Attributes:
        kind: single, ddp, fsdp2 (of FSDP1 the same bytes are planned), or deepspeed, which is not planned.
        processes: ranks, one per card, on all machines together.
        machines: number of machines; each has as many ranks.
        offload: whether weights, gradients and optimizer are held in host memory.
        use_cpu: the ranks compute on the host.
        mixed_precision: bf16, fp16 or no; `None` if the accelerate config does not set it.
    """

    kind: str = "single"
    processes: int = 1
    machines: int = 1
    offload: bool = False
    use_cpu: bool = False
    mixed_precision: str | None = None

    @property
    def ranks_per_machine(self) -> int:
        return -(-self.processes // self.machines)


@dataclass(frozen=True)
class Settings:
    """The settings of a run on which its memory depends; the trainer's fields, `values`, are attributes as well."""

    model: ModelConfig
    values: dict[str, Any] = field(repr=False)
    launch: Launch
    prompt_tokens: int = 256  # of the longest prompt of a batch

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", ())
        if name in values:
            return values[name]
        raise AttributeError(name)

    @property
    def groups(self) -> int:
        """Groups, whole or in part, in a micro-batch."""
        return max(1, -(-self.per_device_train_batch_size // self.num_generations))

    @property
    def rollout_batches(self) -> int:
        """Micro-batches of one generation."""
        if self.generation_batch_size and not self.steps_per_generation:
            return max(1, self.generation_batch_size // (self.per_device_train_batch_size * self.launch.processes))
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def rollout_rows(self) -> int:
        """Completions that one rank generates at once."""
        return self.per_device_train_batch_size * self.rollout_batches

    @property
    def mixed(self) -> str | None:
        """Dtype of the mixed precision, or `None`."""
        launched = self.launch.mixed_precision
        if launched == "no":
            return None
        if self.fp16 or launched == "fp16":
            return "float16"
        # TRL's default is bf16 if nothing is set; the accelerate config comes second.
        return "bfloat16" if self.bf16 or self.bf16 is None or launched == "bf16" else None

    @property
    def checkpointing_kwargs(self) -> dict[str, Any]:
        """How activations are checkpointed; on a command line the field is JSON."""
        kwargs = self.gradient_checkpointing_kwargs or {}
        return json.loads(kwargs) if isinstance(kwargs, str) else kwargs

    @property
    def offloads(self) -> bool:
        """Whether checkpointed activations wait for the backward in the host's memory."""
        return bool(self.gradient_checkpointing and self.checkpointing_kwargs.get("offload"))

    @property
    def scores_again(self) -> bool:
        """Whether a pass without gradients comes before the loss, for the old log-probabilities or the reference."""
        reuses_rollouts = self.num_iterations > 1 or self.rollout_batches > self.gradient_accumulation_steps
        return bool(self.values.get("beta")) or reuses_rollouts


def from_words(words: Sequence[str], config: type, launch: Launch, prompt_tokens: int = 256) -> Settings:
    """The settings of a recipe's command line; `config` is the config class of the recipe's method.

    Raises:
        UserError: the file of `--config` cannot be read; an unknown key; a value of the wrong kind.
    """
    values = vars(recipe_fields((ScriptArguments, config, ModelConfig), words, {"dataset": None}))
    if launch == Launch() and values["use_cpu"]:
        launch = Launch(use_cpu=True)
    if values.get("deepspeed"):
        launch = replace(launch, kind="deepspeed")
    model = ModelConfig(**{item.name: values[item.name] for item in fields(ModelConfig)})
    return Settings(model, values, launch, prompt_tokens)


def from_config(config: Any, model: ModelConfig, prompt_tokens: int = 256) -> Settings:
    """The settings of a run that is about to start, from its parsed arguments."""
    kind = "single" if config.world_size == 1 else "ddp"
    offload = False
    if config.deepspeed_plugin is not None:
        kind = "deepspeed"
    elif is_fsdp2_launch():
        kind = "fsdp2"
        offload = bool(str_to_bool(os.environ.get("FSDP_OFFLOAD_PARAMS", "false")))
    mixed = None if config.bf16 or config.fp16 else "no"
    launch = Launch(kind, config.world_size, 1, offload, config.device.type == "cpu", mixed)
    return Settings(model, dict(vars(config)), launch, prompt_tokens)


def read_launch(path: str | None, processes: int | None = None) -> Launch:
    """The launch that an accelerate config describes, with `processes` if given.

    `path` is a file or the name of one of this package's configs; `None` is one machine without sharding.

    Raises:
        UserError: there is no such file or name, or accelerate cannot read it.
    """
    if path is None:
        return Launch("single" if (processes or 1) == 1 else "ddp", processes or 1)
    file = str(path if Path(path).exists() else accelerate_config(path))
    try:
        config = load_config_from_file(file)
        ranks = processes or max(1, int(getattr(config, "num_processes", 1)))
        use_cpu = bool(str_to_bool(str(config.use_cpu)))
        kinds = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp2"}
        kind = kinds.get(config.distributed_type, "single" if ranks == 1 else "ddp")
        offload = bool(str_to_bool(str(config.fsdp_config.get("fsdp_offload_params", False))))  # it may be quoted
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"--accelerate_config {path} cannot be read: {error}") from None
    return Launch(kind, ranks, int(config.num_machines or 1), offload, use_cpu, config.mixed_precision)
