"""TRL's rollouts: what its trainers hand from turn to turn, and what they do with prompts, tools and rewards."""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.logging import get_logger
from packaging.version import Version

from ..errors import UserError
from ..utils.substitute import Substitute
from . import trl as trls
from .signatures import module_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import GRPOTrainer

logger = get_logger(__name__)

# A micro-batch's key for the log-probabilities of the old policy, which it may lack.
OLD_LOGPS = "old_per_token_logps"
REFERENCE_LOGPS = "ref_per_token_logps"
SAMPLED_LOGPS = "sampling_per_token_logps"
COMPARED = (OLD_LOGPS, REFERENCE_LOGPS, SAMPLED_LOGPS)
# Ours: for each episode its rows, if any episode has several (`trainers/step/rows.py`).
ROWS = "rows"
IMPORTANCE_RATIO = "importance_sampling_ratio"  # of vLLM's samples, one per token or per completion
# TRL's metrics of the log-probabilities of vLLM and of the policy, and of these ratios.
DIFFERENCE_METRICS = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")
RATIO_METRICS = tuple(f"sampling/{IMPORTANCE_RATIO}/{figure}" for figure in ("min", "mean", "max"))
# Metrics that TRL averages over all tokens of the loss: those of scored tokens, and those of learning completions.
SCORED_MEANS = ("entropy",)
LEARNING_MEANS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
PHI_MEAN = "vespo/phi_seq_mean"  # over completions
GROUP_SPREAD = "frac_reward_zero_std"

# What TRL's `_generate_and_score_completions` returns, and slices of it: the inputs of a loss.
DrawnRows = dict[str, torch.Tensor | Sequence | None]

_OF_EVERY_BATCH = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def with_names(method: types.MethodType, **names: object) -> types.MethodType:
    """A copy of a bound method that finds `names` in the place of those in its module; no other caller sees them.

    What decorates the method decorates the copy, if the decorator's function holds the decorated one in its closure.
    """
    function: Any = getattr(method, "__func__", method)
    return types.MethodType(_function_with_names(function, names), method.__self__)


def _function_with_names(function: types.FunctionType, names: dict[str, object]) -> types.FunctionType:
    module = function.__globals__
    cells = function.__closure__ or ()
    decorated = vars(function).get("__wrapped__")
    if decorated is None:
        module = {**module, **names}
    else:
        inner = _function_with_names(decorated, names)
        if not any(cell.cell_contents is decorated for cell in cells):
            return inner
        cells = tuple(types.CellType(inner) if cell.cell_contents is decorated else cell for cell in cells)
    copy = types.FunctionType(function.__code__, module, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def reads(method: Callable, name: str) -> bool:
    """Whether a method, behind its decorators, reads `name` of its module."""
    return name in inspect.unwrap(method).__code__.co_names


def check_batch(batch: dict) -> None:
    """Refuse a generation batch without the tensors that every step of this package reads.

    Raises:
        UserError: this TRL names them otherwise.
    """
    missing = [name for name in _OF_EVERY_BATCH if name not in batch]
    if missing:
        raise UserError(
            f"the batches of this TRL have no {', '.join(missing)}, which every step needs: {trls.INSTALL}"
        )


def weighs_as_1_16() -> bool:
    """Whether TRL weighs vLLM's samples by the formula in `engines/vllm/correction.py`, that of TRL 1.16.

    TRL 1.17 corrects them for `top_p`, `top_k` and `min_p` (trl#6789), so a newer TRL computes its own.
    """
    return Version(import_module("trl").__version__).release[:2] <= (1, 16)


def unwrapped_for_generation(*args, gradient_checkpointing_kwargs: dict | None, **options) -> AbstractContextManager:
    """`unwrap_model_for_generation`, which takes `gradient_checkpointing_kwargs` from TRL 1.16 on."""
    unwrap = trls.unwrap_model_for_generation
    if "gradient_checkpointing_kwargs" in inspect.signature(unwrap).parameters:
        options["gradient_checkpointing_kwargs"] = gradient_checkpointing_kwargs
    return unwrap(*args, **options)


def rewards_of_rank(trainer: GRPOTrainer, rows: list, prompts: list, completions: list, ids: list) -> torch.Tensor:
    """TRL's rewards of R completions by K functions, `(R, K)`, of this rank alone and not logged.

    TRL itself gathers the rewards at the end.

    Raises:
        MissingName: this TRL gathers them by another name.
    """
    unlogged = Substitute(trainer, _log_completion_extra=lambda *_: None, _log_metric=lambda *_: None)
    calculate = types.MethodType(trls.GRPOTrainer._calculate_rewards, unlogged)
    if not reads(calculate, "gather"):
        raise trls.MissingName(f"this TRL gathers rewards otherwise, which stage 1 of A*-PO needs: {trls.INSTALL}")
    return with_names(calculate, gather=lambda rewards: rewards)(rows, prompts, completions, ids)


def log_rollout(trainer: GRPOTrainer, rollout: dict, episodes: tuple) -> None:
    """Let TRL's `_generate` log the figures of completions that were drawn elsewhere. Collective.

    Args:
        rollout: what a `rollout_func` returns.
        episodes: what `_tool_call_loop` returns.
    """
    drawn = Substitute(trainer, rollout_func=lambda *_: rollout, _tool_call_loop=lambda *_: episodes)
    texts = [""] * len(rollout["completion_ids"])
    trls.GRPOTrainer._generate(drawn, texts)


def has_response_format(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `parse_response` can read a completion's parts, such as tool calls."""
    return bool(getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None))


def with_response_schema(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """`tokenizer`, changed as in `GRPOTrainer` to read tool calls; a `response_template` of its own stays."""
    return tokenizer if has_response_format(tokenizer) else trls.add_response_schema(tokenizer)


def training_chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template that `GRPOTrainer` uses for episodes instead of the tokenizer's own.

    It is `None` if `GRPOTrainer` uses the tokenizer's own.
    """
    if trls.is_chat_template_prefix_preserving(tokenizer):
        return None
    return trls.get_training_chat_template(tokenizer)


def token_types_of_images(
    trainer: GRPOTrainer, prompt_ids: list[list[int]], fields: dict
) -> dict[str, list[list[int]]]:
    """The field by which a model distinguishes an image's tokens from text, for prompts that got images from tools.

    `GRPOTrainer._generate_single_turn` makes it too, inside of its own call of `generate`. Nothing if no prompt has an
    image, or if TRL did not find the placeholder token of the model's images.
    """
    image = vars(trainer).get("_image_pad_token_id")
    if "pixel_values" not in fields or image is None:
        return {}
    name = "mm_token_type_ids" if "image_grid_thw" in fields else "token_type_ids"
    return {name: [[int(token == image) for token in ids] for ids in prompt_ids]}


class Turn(NamedTuple):
    """The arguments of `GRPOTrainer._generate_single_turn`, which gets them by name; RLOO's takes the first three."""

    prompt_ids: list[list[int]]
    images: list[list | None] | None
    multimodal_fields: trls.Vision
    num_generations: int
    has_tool_images: bool = False


# Digests of the source of `_generate_single_turn` in TRL 1.16, by module. On a TRL that was not tested our loop draws
# only if the source is this one: what a changed body does to a completion does not show in its arguments.
_KNOWN_TURNS = {
    "trl.trainer.grpo_trainer": "e0f02e4fc094cefd",
    "trl.trainer.rloo_trainer": "c68ae4ca477d5382",
}


def foreign_turn(method: Callable) -> str | None:
    """Why a turn is to be drawn by `method` itself, a `_generate_single_turn`; `None` if our loop does the same.

    It does not if the code is not TRL's (a user's engine that replaces the method, on TRL's class or in a class
    between), or if TRL is of a version that was not tested and has another body.
    """
    function = getattr(method, "__func__", method)
    while module_of(function).startswith("trl.") and hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # TRL's own decorators
    module = module_of(function)
    if module not in _KNOWN_TURNS:
        return f"{module}.{getattr(function, '__qualname__', type(function).__name__)} draws them"
    if trls.is_tested() or source_digest(function) == _KNOWN_TURNS[module]:
        return None
    return f"{module}._generate_single_turn is not that of a TRL that was tested"


def source_digest(function: Callable) -> str:
    """A digest of a function's source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def turn_of(stock: Callable, args: tuple, kwargs: dict[str, object], num_generations: int) -> Turn | None:
    """The arguments of a call of `stock`, TRL's `_generate_single_turn`; `None`, and a line, if it has to draw itself.

    It has to if its code is not TRL's, or if an argument is not known.
    """
    reason = foreign_turn(stock)
    if reason is None:
        arguments = inspect.signature(stock).bind(*args, **kwargs).arguments
        unknown = arguments.keys() - set(Turn._fields)
        if not unknown:
            return Turn(**{"num_generations": num_generations, **arguments})
        reason = f"_generate_single_turn gets {', '.join(unknown)}"
    logger.warning_once(f"Completions are drawn as in stock TRL: {reason}")
    return None


class Generated(NamedTuple):
    """What `GRPOTrainer._generate` returns, in TRL's order; lists have an entry for each completion of this rank."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    completions: list
    logprobs: list[list[float]] | None
    extra_fields: dict[str, list]
    images: list[list | None] | None
    tool_images: list[list]
