"""Names from undocumented modules of TRL, each imported when it is used first; importing this module imports no TRL.

[`BORROWED`] lists all names of TRL's that this package imports from this module. A few more are in the files of this
room that need them: `vllm.py`, `memory.py` and `older_gpus.py`. Public classes of TRL's (trainers, configs) are
imported by the code that extends them.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from packaging.version import Version
from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

TESTED_TRL = "1.16"
# A micro-batch's key for the log-probabilities of the old policy, which it may lack.
OLD_LOGPS = "old_per_token_logps"
REFERENCE_LOGPS = "ref_per_token_logps"
SAMPLED_LOGPS = "sampling_per_token_logps"
COMPARED = (OLD_LOGPS, REFERENCE_LOGPS, SAMPLED_LOGPS)
IMPORTANCE_RATIO = "importance_sampling_ratio"  # of vLLM's samples, one per token or per completion
# TRL's metrics of these ratios.
SAMPLING_METRICS = (
    "sampling/sampling_logp_difference/mean",
    "sampling/sampling_logp_difference/max",
    *(f"sampling/{IMPORTANCE_RATIO}/{figure}" for figure in ("min", "mean", "max")),
)
# Metrics that TRL averages over all tokens of the loss: those of scored tokens, and those of learning completions.
SCORED_MEANS = ("entropy",)
LEARNING_MEANS = ("kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")
PHI_MEAN = "vespo/phi_seq_mean"  # over completions
GROUP_SPREAD = "frac_reward_zero_std"

# Names of TRL's: the module that has each, and what needs it. Without it everything else works.
BORROWED = {
    # the core
    "FusedCausalLMOutput": ("trl.trainer.utils", "calls with fused_lm_head=True"),
    "add_fused_lm_head": ("trl.trainer.utils", "calls with fused_lm_head=True"),
    "maybe_gather_lm_head_ctx": ("trl.trainer.utils", "calls with fused_lm_head=True"),
    "ChunkedLogProbFunction": ("trl.kernels.chunked_logprob", "scores by TRL's kernel"),
    "split_pixel_values_by_grid": ("trl.trainer.utils", "prompts with images"),
    "unsplit_pixel_values_by_grid": ("trl.trainer.utils", "prompts with images"),
    # trainers
    "RepeatSampler": ("trl.trainer.utils", "micro-batches of whole groups"),
    "split_tensor_dict": ("trl.trainer.utils", "micro-batches of whole groups"),
    "unwrap_model_for_generation": ("trl.models", "completions by transformers' generate"),
    "use_adapter": ("trl.trainer.utils", "reference policies of A*-PO"),
    "ensure_master_addr_port": ("trl.trainer.utils", "vLLM engines in a trainer's process"),
    "ForwardRedirection": ("trl.models.utils", "losses in tiles"),
    # episodes and images
    "prepare_multimodal_messages": ("trl.data_utils", "prompts with images"),
    "add_response_schema": ("trl.chat_template_utils", "episodes with tools"),
    "get_training_chat_template": ("trl.chat_template_utils", "episodes"),
    "is_chat_template_prefix_preserving": ("trl.chat_template_utils", "episodes"),
    "parse_response": ("trl.chat_template_utils", "episodes with tools"),
    "supports_tool_calling": ("trl.chat_template_utils", "episodes with tools"),
}
_this = sys.modules[__name__]  # functions below read borrowed names from it
_SPELLED = {"ForwardRedirection": "_ForwardRedirection"}  # as TRL does


def __getattr__(name: str) -> Any:
    """A name of [`BORROWED`], or a fact about the installed TRL of [`_FACTS`].

    Raises:
        ImportError: the installed TRL does not have the name, or there is no TRL.
    """
    if name in _FACTS:
        value = _FACTS[name]()
    elif name in BORROWED:
        value = _borrow(name, *BORROWED[name])
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _borrow(name: str, module: str, needed_by: str) -> Any:
    borrowed = _SPELLED.get(name, name)
    install = f"and {needed_by} need it: pip install 'trl~={TESTED_TRL}.0'"
    try:
        version = import_module("trl").__version__
    except ImportError as error:
        raise ImportError(f"TRL is not installed, {install}") from error
    _warn_of_another_version(version)
    try:
        return getattr(import_module(module), borrowed)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"TRL {version} has no {module}.{borrowed}, {install}") from error


@functools.cache
def _warn_of_another_version(version: str) -> None:
    if Version(version).release[:2] != Version(TESTED_TRL).release:
        logger.warning(
            "trl_fsdp_qlora is written for TRL %s and was never run with TRL %s: compare a few steps with stock TRL "
            "(`trl-fsdp-qlora compare`), or install the version in constraints.txt",
            TESTED_TRL,
            version,
        )


def _weighs_as_1_16() -> bool:
    """Whether TRL's importance weights of vLLM's samples have the formula in `vllm/correction.py`, that of TRL 1.16.

    TRL 1.17 corrects them for `top_p`, `top_k` and `min_p` (trl#6789), so a newer TRL computes its own.
    """
    return Version(import_module("trl").__version__).release[:2] <= (1, 16)


# Facts about the installed TRL, found out when they are used first.
_FACTS = {"WEIGHS_AS_1_16": _weighs_as_1_16}


def is_padded_by_row(vision: dict[str, Any]) -> bool:
    """Whether pixels are padded to as many images in each row as any row has (Idefics, SmolVLM).

    The mask over pixels then is `(B, images, height, width)`. TRL 1.16 compares the number of rows with that of
    images, which may be equal by chance: a row with two images and a row with none.
    """
    mask = vision.get("pixel_attention_mask")
    return isinstance(mask, torch.Tensor) and mask.ndim == 4


def images_by_row(vision: dict[str, Any]) -> dict[str, Any]:
    """`split_pixel_values_by_grid`: pixels and grids as lists with an entry per row, or padded tensors as they are."""
    return vision if is_padded_by_row(vision) else _this.split_pixel_values_by_grid(vision)


def rows_of_images(vision: dict[str, Any], rows: Iterable[int]) -> dict[str, Any]:
    """TRL's vision arguments for some rows of a batch: pixels and grids per image, everything else per row."""
    by_row = images_by_row(vision)
    rows = [int(row) for row in rows]
    chosen = {}
    for name, x in by_row.items():
        parts = [x[row] for row in rows]
        # `x[rows]` would make the host wait until the list is on the device.
        chosen[name] = torch.stack(parts) if isinstance(x, torch.Tensor) and rows else parts
    return joined_images(chosen)


def joined_images(batch: dict[str, Any]) -> dict[str, Any]:
    """`unsplit_pixel_values_by_grid`, without pixels if no row has an image: vision towers refuse empty tensors."""
    if batch.get("num_images") is not None and not any(batch["num_images"]):
        of_images = ("pixel_", "image_", "num_images", "num_tiles", "spatial_")
        return {name: x for name, x in batch.items() if not name.startswith(of_images)}
    return _this.unsplit_pixel_values_by_grid(batch)


def counts_experts(text_config: PretrainedConfig) -> bool:
    """Whether TRL's fused forward can compute a router loss, for which it reads `num_experts` of the config.

    The field is added if a family has another name for it, such as Granite's, for which TRL 1.16 raises an
    AttributeError. The number decides, because dense models of Granite have a coefficient of the router loss too.
    """
    if not hasattr(text_config, "num_experts"):
        local = getattr(text_config, "num_local_experts", None)
        routed = getattr(text_config, "n_routed_experts", None)
        text_config.num_experts = local or routed or 0
    return bool(text_config.num_experts)


class FusedHead(NamedTuple):
    """The arguments of `add_fused_lm_head`, and the model's transformation of its logits."""

    temperature: float
    cast_lm_head_to_fp32: bool
    outputs: tuple[str, ...]
    softcap: float | None
    logit_scale: float


def fused_head(forward: Callable) -> FusedHead | None:
    """The settings of TRL's fused head, or `None` if `forward` is not the method that `add_fused_lm_head` makes.

    TRL keeps the settings in the closure of that method.
    """
    function = forward.__func__ if inspect.ismethod(forward) else None
    if function is None or "final_logit_softcapping" not in function.__code__.co_freevars:
        return None
    settings = inspect.getclosurevars(function).nonlocals
    return FusedHead(
        settings["temperature"],
        settings["cast_lm_head_to_fp32"],
        tuple(settings["outputs"]),
        settings["final_logit_softcapping"],
        settings["logit_scale"],
    )


def logit_settings(model: PreTrainedModel) -> FusedHead:
    """How TRL's fused head would transform the logits of `model`: TRL reads it from the config. Nothing is changed."""

    class Shell:
        """All that `add_fused_lm_head` looks at."""

        config = model.config

        def forward(self) -> None: ...

    shell = Shell()
    _this.add_fused_lm_head(shell)
    return fused_head(shell.forward)
