"""The fields that configs of several trainers have, and how a config is copied and stored."""

import copy
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..long_rows.tiles import tile_size
from ..prefix_sharing.attention.backends import BACKENDS
from ..scoring.logprobs import HEAD_KERNELS
from ..utils import redaction
from .config_fields import SWITCHES, option, spelled
from .experimental_fields import experiment
from .reporting.phases import MODES as CLOCKS

if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclass(repr=False)
class EfficientConfig:
    """Mixin for a config that extends one of TRL's, placed before TRL's class in the bases; fields of all trainers.

    The dataclass sets `STOCK` and is made with `repr=False`.
    """

    STOCK: ClassVar[type]  # the TRL config that the dataclass extends

    prefix_sharing: str = option(
        "auto",
        "How the forward and backward passes treat what rows of a batch begin with alike: the prompt of a "
        "group's completions or of a preference pair. 'auto' computes it once, without padding, if that is exact, "
        "and otherwise runs as stock TRL and logs why; "
        f"{' and '.join(map(repr, BACKENDS))} insist on one attention backend; 'off' is stock TRL.",
    )
    lm_head_kernel: str = option(
        "auto",
        "With prefix_sharing, what scores tokens under a frozen LM head: 'trl' (TRL's chunked kernel), 'frozen' "
        "(two matrix products instead of three), or 'auto': 'frozen' on CPUs and under FSDP2, 'trl' on a GPU. "
        "Values agree up to rounding.",
        choices=HEAD_KERNELS,
    )
    mlp_tokens_per_tile: str = option(
        "auto",
        "Long rows: MLPs, experts and norms compute so many tokens at a time, and again in the backward, instead "
        "of keeping several times the width of an MLP for every token. Same gradients, up to the order of sums. "
        "'auto': 4,096 tokens (experts 8,192), if a row has more than twice as many and the layer's activations "
        "are checkpointed; a number: if a row has more, with and without checkpointing; 'off': never.",
    )
    fsdp_keep_gathered: bool = option(
        False,
        "Under FSDP2 with a 4-bit base, gather it once for all micro-batches of an optimizer step. Every rank "
        "then holds the whole 4-bit base while it trains.",
    )
    phase_metrics: str = option(
        "on",
        "Seconds and peak memory of each phase of a step, as metrics: 'on'; 'peaks', which on CUDA also resets "
        "the allocator's peak after each phase, so that every phase of every step has its own "
        "(`torch.cuda.max_memory_allocated` then goes back to the last phase only); 'off'.",
        choices=CLOCKS,
    )

    def __post_init__(self):
        self._take_numpy()
        for name in {item.name for item in fields(self)}.intersection(SWITCHES):
            setattr(self, name, spelled(vars(self)[name]))
        super().__post_init__()
        self._check_choices()

    def _check_choices(self) -> None:
        """Raise `ValueError` if a field of this package has an unknown value."""
        tokens = vars(self).get("tokens_per_pass")  # DPO has no such field
        if tokens is not None and tokens < 0:
            raise ValueError(f"tokens_per_pass={tokens} is a number of tokens; use one from 0, or leave it out")
        if vars(self).get("rollouts_ahead"):
            experiment("rollouts_ahead").check_config(self)
        self.mlp_tokens_per_tile = tile_size(self.mlp_tokens_per_tile)
        for item in fields(self):
            value = vars(self)[item.name]
            choices = item.metadata.get("choices")
            if choices and item.name not in self.STOCK.__dataclass_fields__ and value not in choices:
                raise ValueError(f"{item.name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")

    def _take_numpy(self) -> None:
        # With a numpy number as the learning rate, optimizer.pt could be written, but not read again.
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                setattr(self, name, value.item())

    @classmethod
    def complete(cls, args: "TrainingArguments | None") -> "TrainingArguments | None":
        """A copy of `args` with defaults for the fields of this class that it lacks, so a plain TRL config works."""
        if args is None or isinstance(args, cls):
            return args
        completed = copy.copy(args)
        if type(args) is cls.STOCK:
            completed.__class__ = cls  # so that the methods below hide its secrets too
        completed.__dict__ = {item.name: item.default for item in fields(cls)} | vars(args)
        cls._take_numpy(completed)
        return completed

    # --- secrets stay in memory: `torch.save` puts a config into every checkpoint, trackers are sent `to_dict` -------

    def __getstate__(self):
        return redaction.without_secrets(self.__dict__)

    def __copy__(self):
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)  # copies within a process keep the secrets that a pickle leaves out
        return twin

    def __deepcopy__(self, memo):
        twin = copy.copy(self)
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    def to_dict(self):
        return redaction.without_secrets(super().to_dict())

    def __str__(self):
        values = redaction.without_secrets({item.name: vars(self)[item.name] for item in fields(self)})
        lines = "".join(f"{name}={value},\n" for name, value in sorted(values.items()))
        return f"{type(self).__name__}(\n{lines})"

    __repr__ = __str__


@dataclass(repr=False)
class OnPolicyConfig(EfficientConfig):
    """[`EfficientConfig`] with the fields of trainers that draw completions."""

    tokens_per_pass: int | None = option(
        None,
        "With prefix_sharing, how many tokens (of prompts and completions, each prompt counted once) a pass with "
        "gradients holds at most. Several micro-batches of an optimizer step run at once: the largest divisor of "
        "their number that fits. Not set: as many tokens as a padded micro-batch of stock TRL has; 0: each "
        "micro-batch is computed by itself, prompts included.",
    )
    compact_generation: bool = option(
        True,
        "When transformers generates: prefill each prompt once, let finished rows leave the batch, and sample "
        "with one random number per row: the same distribution, but not the completions that stock TRL draws from"
        " the same seed. If that is not exact, it runs as stock and logs the reason.",
    )
    rollout_sync: str = option(
        "auto",
        "With vLLM, what is sent to the engine after an optimizer step: 'adapter' (the LoRA adapter alone), "
        "'merge' (every weight, the adapter merged, as in TRL), or 'auto': the adapter if the base is quantized, "
        "sharded, not on a GPU, or held by a server that takes adapters.",
        choices=("auto", "adapter", "merge"),
    )
    vllm_adapter_dir: str | None = option(
        None,
        "With vLLM and rollout_sync 'adapter': the folder through which adapters reach the engine, which has to "
        "see it under the same path. By default a folder under output_dir.",
    )
    vllm_share_base: str = option(
        "off",
        "With vLLM in this process and only the adapter sent: whether engine and trainer hold one copy of a "
        "frozen base, in bitsandbytes' 4 bits or in the dtype in which both compute. 'on' also makes rollout_sync"
        " 'auto' send the adapter alone, and is an error if the base cannot be shared. Tried on CPUs alone.",
        choices=("on", "off"),
    )
    vllm_engine_kwargs: dict | str | None = option(  # noqa: RUF009 (a string, as in TRL, is JSON)
        None,
        "With vLLM in this process: further arguments of `vllm.LLM`, such as {'quantization': 'fp8'}, which take "
        "precedence.",
    )
    fsdp_gather: str = option(
        "auto",
        "Under FSDP2, how weights come together while completions are generated and scored. 'once': the whole "
        "model is gathered for the phase (a 4-bit base as it is packed); 'per_layer': in every forward pass, so "
        "for every token; 'auto': once, if it fits into half of the free memory of every rank.",
        choices=("auto", "once", "per_layer"),
    )

    def __post_init__(self):
        is_named = self.generation_batch_size is not None
        steps = "gradient_accumulation_steps" if self.steps_per_generation is None else "steps_per_generation"
        try:
            super().__post_init__()
        except ValueError as error:
            if is_named or not str(error).startswith("generation_batch_size"):
                raise
            # TRL's message names `generation_batch_size` alone, which most configs leave to TRL.
            raise ValueError(self._why_no_whole_groups(steps)) from None

    def _why_no_whole_groups(self, steps: str) -> str:
        """A line with the fields of which a generation batch is made; `steps` is that with the micro-batches."""
        size = f"per_device_train_batch_size {self.per_device_train_batch_size} × {steps} {vars(self)[steps]}"
        if self.world_size > 1:
            size += f" × {self.world_size} processes"
        return (
            f"a generation batch has {self.generation_batch_size} completions ({size}), and num_generations="
            f"{self.num_generations} does not divide them: change one of these"
        )
