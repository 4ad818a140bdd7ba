"""The facts about a run that a plan needs: from a recipe's parsed arguments, or from its command line alone.

A config cannot be built for another machine's hardware: on a machine without a GPU it refuses `bf16: true`.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trl import ModelConfig

from ...compat.deepspeed import zero_stage
from ...fsdp2_qlora.launch_checks import is_fsdp2_launch
from ...utils.resources import accelerate_config
from ..recipe.arguments import ScriptArguments, recipe_fields
from ..recipe.checks import load_tokenizer
from ..recipe.keys import read_yaml
from ..recipe.privileged import SDFTScriptArguments, privileged_prompts
from .drawn import Data, Drawn, longest_privileged, read_data

# What fields of this package's trainers are in TRL's own with a teacher, which lack some of them.
_OF_TRLS_OWN = {
    "num_generations": 1,
    "num_iterations": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "prefix_sharing": "auto",  # by `share_prompts`
    "compact_generation": False,
    "mlp_tokens_per_tile": "off",
    "lm_head_kernel": "trl",
    "fsdp_gather": "per_layer",
    "tokens_per_pass": 0,
}
_KINDS = {"FSDP": "fsdp2", "DEEPSPEED": "zero{}"}  # accelerate's names -> those of a [`Launch`]


@dataclass(frozen=True)
class Launch:
    """The processes of a run, and the way in which they share the model."""

    kind: str = "single"  # or ddp, fsdp2, zero2, zero3
    processes: int = 1  # ranks, one per card
    offload: bool = False  # FSDP2's shards lie in host memory
    use_cpu: bool = False  # the ranks compute on the host
    mixed_precision: str | None = None  # bf16, fp16, no; `None` if the accelerate config does not set it


@dataclass(frozen=True)
class Settings:
    """The settings of a run on which its memory depends; the trainer's fields, `values`, are attributes as well."""

    model: ModelConfig
    values: dict[str, Any] = field(repr=False)
    launch: Launch
    prompt_tokens: int = 256  # of the longest prompt of a batch
    data: Data | None = field(default=None, repr=False)  # source of the drawn micro-batches, if it was read
    privileged_tokens: int = 0  # of what a teacher that is the model itself reads besides the prompt

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", ())
        if name in values:
            return values[name]
        if name in _OF_TRLS_OWN and self.has_teacher:
            return _OF_TRLS_OWN[name]
        raise AttributeError(name)

    @property
    def rollout_rows(self) -> int:
        """Completions that one rank generates at once."""
        return self.per_device_train_batch_size * self.rollout_batches

    @property
    def rollout_batches(self) -> int:
        """Micro-batches of one generation."""
        if self.generation_batch_size and not self.steps_per_generation:
            return max(1, self.generation_batch_size // (self.per_device_train_batch_size * self.launch.processes))
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def compares_states(self) -> bool:
        """The trainer is TRL's `DistillationTrainer`, whose teacher is another model."""
        return "teacher_model_name_or_path" in self.values

    @property
    def has_teacher(self) -> bool:
        """The trainer is one of TRL's own with a teacher: `DistillationTrainer`, SDFT or SDPO."""
        return self.compares_states or "teacher_model_kind" in self.values

    @property
    def teacher_is_a_copy(self) -> bool:
        """The teacher of SDFT or SDPO is a copy of the model, because that is trained whole."""
        kind = self.values.get("teacher_model_kind", "live")
        return kind != "live" and not self.model.use_peft

    @property
    def teacher_loading(self) -> dict[str, Any]:
        """How another model that is the teacher is loaded; on a command line the field is JSON."""
        loading = self.teacher_model_init_kwargs or {}
        return json.loads(loading) if isinstance(loading, str) else loading

    @property
    def has_reference(self) -> bool:
        """A reference model scores the completions; `beta` of TRL's trainers with a teacher is something else."""
        return bool(self.values.get("beta")) and not self.has_teacher

    @property
    def is_paired(self) -> bool:
        """Rows are preference pairs, and nothing is generated."""
        return "num_generations" not in self.values and not self.has_teacher

    @property
    def keeps_turns(self) -> bool:
        """Episodes have several turns, and rows keep their caches between turns."""
        has_turns = bool(self.values.get("tools") or self.values.get("environment"))
        return has_turns and not self.use_vllm and self.compact_generation

    @property
    def group(self) -> int:
        """Number of rows with the same prompt."""
        return 2 if self.is_paired else self.num_generations

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        return self.per_device_train_batch_size * (2 if self.is_paired else 1)

    @property
    def groups(self) -> int:
        """Groups, whole or in part, in a micro-batch."""
        return max(1, -(-self.rows // self.group))

    @property
    def length_field(self) -> str:
        """The field that limits the length of rows."""
        return "max_length" if self.is_paired else "max_completion_length"

    @property
    def completion_tokens(self) -> int:
        """Tokens of the longest completion, or of the longest answer of a pair."""
        if not self.is_paired:
            return self.max_completion_length
        longest = self.max_completion_length if self.data is None else self.data.longest_answer
        return longest if self.max_length is None else max(1, min(longest, self.max_length - self.prompt_tokens))

    @property
    def drawn(self) -> Drawn | None:
        """The drawn micro-batch with the most tokens; `None` without data."""
        if self.data is None:
            return None
        limit = self.max_length if self.is_paired else None
        return self.data.draw(self.rows, self.group, self.completion_tokens, limit)

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
    def every_n_layers(self) -> int:
        """One of so many layers is checkpointed."""
        return self.checkpointing_kwargs.get("every_n_layers") or 1

    @property
    def scores_again(self) -> bool:
        """Whether a pass without gradients comes before the loss, for the old log-probabilities or the reference."""
        if self.is_paired:
            return bool(self.precompute_ref_log_probs)
        if self.compares_states:
            return False
        if self.has_teacher:
            drawn_once = self.rollout_batches * self.num_iterations
            return not self.values.get("generate_from_teacher") and self.gradient_accumulation_steps % drawn_once != 0
        return self.has_reference or self.num_iterations > 1 or self.rollout_batches > self.gradient_accumulation_steps


def optimizer_name(settings: Settings) -> str:
    return str(getattr(settings.optim, "value", settings.optim))


def from_config(config: Any, model: ModelConfig, **further: Any) -> Settings:
    """The settings of a run that is about to start, from its parsed arguments.

    `further` are other fields of [`Settings`], such as `prompt_tokens`.
    """
    kind = config.distributed_state.distributed_type.value
    # Accelerate reports FSDP only after a trainer has made its `Accelerator`; on a CPU it turns FSDP into DDP.
    if is_fsdp2_launch() and kind in ("NO", "MULTI_GPU") and config.device.type != "cpu":
        kind = "FSDP"
    zero = zero_stage(config.deepspeed_plugin)
    kind = _KINDS.get(kind, "single" if config.world_size == 1 else "ddp").format(zero)
    offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    mixed = None if config.bf16 or config.fp16 else "no"
    launch = Launch(kind, config.world_size, offload, config.device.type == "cpu", mixed)
    return Settings(model, dict(vars(config)), launch, **further)


def read_launch(path: str | None, processes: int | None = None) -> Launch:
    """The launch that an accelerate config describes, with `processes` if given.

    `path` is a file or a name; `None` is one process.

    Raises:
        UserError: there is no such file or name.
    """
    if path is None:
        return Launch("single" if (processes or 1) == 1 else "ddp", processes or 1)
    content = read_yaml(path if Path(path).exists() else accelerate_config(path), "--accelerate_config")
    ranks = int(processes or content.get("num_processes") or 1)
    zero = (content.get("deepspeed_config") or {}).get("zero_stage")
    unsharded = "single" if ranks == 1 else "ddp"
    kind = _KINDS.get(str(content.get("distributed_type")), unsharded).format(zero)
    offload = bool((content.get("fsdp_config") or {}).get("fsdp_offload_params"))
    return Launch(kind, ranks, offload, bool(content.get("use_cpu")), content.get("mixed_precision"))


def from_words(
    words: Sequence[str],
    config: type,
    launch: Launch,
    script: type = ScriptArguments,
    counts_data: bool = False,
    **further: Any,
) -> Settings:
    """The settings of a recipe's command line.

    Args:
        config: the config class of the recipe's method.
        script: the class of the recipe's script arguments.
        counts_data: read the recipe's data and draw micro-batches from it.
        **further: other fields of [`Settings`].

    Raises:
        ConfigError: the file of `--config` cannot be read; an unknown key; a value of the wrong kind.
    """
    values = vars(recipe_fields((script, config, ModelConfig), words, {"dataset": None}))
    if launch == Launch() and values["use_cpu"]:
        launch = Launch(use_cpu=True)
    script_arguments = script(**{item.name: values[item.name] for item in fields(script)})
    model = ModelConfig(**{item.name: values[item.name] for item in fields(ModelConfig)})
    data = read_data(script_arguments, model) if counts_data else None
    if "teacher_model_kind" not in values:
        further.pop("privileged_tokens", None)
    if data is not None:
        if isinstance(script_arguments, SDFTScriptArguments):
            tokenizer = load_tokenizer(model.model_name_or_path, model.model_revision, script_arguments.chat)
            contexts = privileged_prompts(script_arguments)["privileged_context"]
            template = values["teacher_prompt_template"]
            further["privileged_tokens"] = longest_privileged(contexts, tokenizer, template)
        further["data"] = data
        further["prompt_tokens"] = data.longest_prompt
    return Settings(model, values, launch, **further)
