"""The facts about a run that a plan needs: from a recipe's parsed arguments, or from its command line alone.

A config cannot be built for another machine's hardware: on a machine without a GPU it refuses `bf16: true`.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from trl import ModelConfig

from ...fsdp2_qlora.launch_checks import is_fsdp_launch
from ...trainers.methods import METHODS, Method
from ..recipe.arguments import ScriptArguments, recipe_fields
from .launches import Launch, deepspeed_of_file, deepspeed_of_plugin, fsdp_of_process

if TYPE_CHECKING:
    from transformers import TrainingArguments


# Tokens of the longest prompt, and of the longest answer of a pair, if nothing is known of them.
ASSUMED_PROMPT = 256
ASSUMED_ANSWER = 256


@dataclass(frozen=True)
class Settings:
    """The settings of a run on which its memory depends; the trainer's fields, `values`, are attributes as well.

    Attributes:
        prompt_tokens: of the longest prompt of a batch.
        assumes_prompt: whether that number is neither the user's nor measured.
    """

    model: ModelConfig
    values: dict[str, Any] = field(repr=False)
    launch: Launch
    method: Method
    prompt_tokens: int = ASSUMED_PROMPT  # of the longest prompt of a batch
    assumes_prompt: bool = False  # whether that number is neither the user's nor measured

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", ())
        if name in values:
            return values[name]
        raise AttributeError(name)

    @property
    def is_paired(self) -> bool:
        """Whether rows are preference pairs, and nothing is generated."""
        return self.method.is_paired

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.per_device_train_batch_size * (2 if self.is_paired else 1)

    @property
    def group_size(self) -> int:
        """Rows with the same prompt."""
        return 2 if self.is_paired else self.num_generations

    @property
    def length_field(self) -> str:
        """The field that limits the length of rows."""
        return "max_length" if self.is_paired else "max_completion_length"

    @property
    def completion_tokens(self) -> int:
        """Tokens of the longest completion, or of the longest answer of a pair, whose `max_length` has the prompt."""
        if not self.is_paired:
            return self.max_completion_length
        if self.max_length is None:
            return self.values.get("max_completion_length", ASSUMED_ANSWER)
        return max(1, self.max_length - self.prompt_tokens)

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
        is_bf16 = self.bf16 or self.bf16 is None
        if is_bf16 or launched == "bf16":
            return "bfloat16"
        return None

    @property
    def optimizer(self) -> str:
        """Name of the optimizer; a config that was built has an enumeration."""
        return str(getattr(self.optim, "value", self.optim))

    @property
    def checkpointing_kwargs(self) -> dict[str, bool | int]:
        """How activations are checkpointed."""
        return _mapping(self.gradient_checkpointing_kwargs)

    @property
    def generation_options(self) -> dict[str, Any]:
        """Further options of `generate`."""
        return _mapping(self.generation_kwargs)

    @property
    def checkpoints(self) -> bool:
        """Whether layers are computed again in the backward."""
        return bool(self.gradient_checkpointing or self.launch.checkpoints)

    @property
    def offloads(self) -> bool:
        """Whether checkpointed activations wait for the backward in the host's memory."""
        by_model = self.gradient_checkpointing and self.checkpointing_kwargs.get("offload")
        return bool(by_model or self.launch.offloads_checkpoints)

    @property
    def scores_again(self) -> bool:
        """Whether a pass without gradients comes before the loss, for the old log-probabilities or the reference."""
        if self.is_paired:
            return bool(self.precompute_ref_log_probs)
        reuses_rollouts = self.num_iterations > 1 or self.rollout_batches > self.gradient_accumulation_steps
        return bool(self.values.get("beta")) or reuses_rollouts


def _mapping(value: dict[str, Any] | str | None) -> dict[str, Any]:
    """The value of a field that is a mapping; on a command line it is JSON."""
    return json.loads(value) if isinstance(value, str) else value or {}


def from_words(
    words: Sequence[str],
    config: type,
    launch: Launch,
    prompt_tokens: int | None = None,
    script: type = ScriptArguments,
) -> Settings:
    """The settings of a recipe's command line.

    Args:
        prompt_tokens: of the longest prompt; assumed if `None`.
        config, script: the classes of the config and of the further arguments of the recipe's method.

    Raises:
        UserError: the file of `--config` cannot be read; an unknown key; a value of the wrong kind.
    """
    values = vars(recipe_fields((script, config, ModelConfig), words, {"dataset": None, "pairs": None}))
    if launch == Launch() and values["use_cpu"]:
        launch = Launch(use_cpu=True)
    if values.get("deepspeed"):
        launch = replace(launch, **deepspeed_of_file(values["deepspeed"]))
    model = ModelConfig(**{item.name: values[item.name] for item in fields(ModelConfig)})
    is_assumed = prompt_tokens is None
    return Settings(model, values, launch, _method_of(config), prompt_tokens or ASSUMED_PROMPT, is_assumed)


def _method_of(config: type) -> Method:
    """The method whose config this class is, or extends."""
    by_name = {method.config: method for method in METHODS}
    names = [base.__name__ for base in config.__mro__ if base.__name__ in by_name]
    return by_name[names[0]]


def from_config(config: "TrainingArguments", model: ModelConfig, prompt_tokens: int = ASSUMED_PROMPT) -> Settings:
    """The settings of a run that is about to start, from its parsed arguments."""
    ranks = config.world_size
    machines = max(1, ranks // int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    sharing = {"kind": "single" if ranks == 1 else "ddp"}
    if config.deepspeed_plugin is not None:
        sharing = deepspeed_of_plugin(config.deepspeed_plugin)
    elif is_fsdp_launch() and ranks > 1:
        sharing = fsdp_of_process(machines)
    mixed = None if config.bf16 or config.fp16 else "no"
    launch = Launch(
        processes=ranks, machines=machines, use_cpu=config.device.type == "cpu", mixed_precision=mixed, **sharing
    )
    return Settings(model, dict(vars(config)), launch, _method_of(type(config)), prompt_tokens)
