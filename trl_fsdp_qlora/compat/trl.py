"""Names from undocumented modules of TRL, each imported when it is used first; importing this module imports no TRL.

[`BORROWED`] lists the names that are imported; `trl_seams.py` has the methods and attributes of TRL's trainers. Public
classes of TRL's are imported by the code that extends them, TRL's three trainers through this table.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from transformers import PretrainedConfig, PreTrainedModel

from ..errors import UserError

logger = logging.getLogger(__name__)

OLDEST_TRL = "1.15"
TESTED_TRL = ("1.15", "1.16")
# Names of TRL's: the module that has each, and what needs it. Without it everything else works.
BORROWED = {
    # the trainers that this package extends
    "GRPOTrainer": ("trl", "EfficientGRPOTrainer"),
    "RLOOTrainer": ("trl", "EfficientRLOOTrainer"),
    "DPOTrainer": ("trl", "EfficientDPOTrainer"),
    # the core
    "FusedCausalLMOutput": ("trl.trainer.utils", "calls with fused_lm_head=True"),
    "add_fused_lm_head": ("trl.trainer.utils", "calls with fused_lm_head=True"),
    "ChunkedLogProbFunction": ("trl.kernels.chunked_logprob", "scores by TRL's kernel"),
    "split_pixel_values_by_grid": ("trl.trainer.utils", "prompts with images"),
    "unsplit_pixel_values_by_grid": ("trl.trainer.utils", "prompts with images"),
    # trainers
    "unwrap_model_for_generation": ("trl.models", "completions by transformers' generate"),
    "use_adapter": ("trl.trainer.utils", "reference policies of A*-PO"),
    "VLLMClient": ("trl.generation.vllm_client", "vLLM's engines"),
    "VLLMGeneration": ("trl.generation.vllm_generation", "vLLM's engines"),
    # episodes and images
    "prepare_multimodal_messages": ("trl.data_utils", "prompts with images"),
    "add_response_schema": ("trl.chat_template_utils", "episodes with tools"),
    "get_training_chat_template": ("trl.chat_template_utils", "episodes"),
    "is_chat_template_prefix_preserving": ("trl.chat_template_utils", "episodes"),
    "parse_response": ("trl.chat_template_utils", "episodes with tools"),
    "supports_tool_calling": ("trl.chat_template_utils", "episodes with tools"),
}
# TRL's arguments of images: tensors, lists of tensors by row, and numbers of images.
Vision = dict[str, Any]
INSTALL = f"pip install 'trl~={TESTED_TRL[-1]}.0'"
_this = sys.modules[__name__]  # functions below read borrowed names from it


class MissingName(UserError, ImportError):
    """A name that the installed TRL does not have; the text says what needs it, and what to install."""


def __getattr__(name: str) -> Any:
    """A name of [`BORROWED`].

    Raises:
        MissingName: the installed TRL does not have the name, or there is no TRL.
    """
    if name not in BORROWED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = _borrow(name, *BORROWED[name])
    return globals()[name]


def _borrow(name: str, module: str, needed_by: str) -> Any:
    needed = f"(needed by: {needed_by}); {INSTALL}"
    try:
        version = import_module("trl").__version__
    except ImportError as error:
        raise MissingName(f"TRL is not installed {needed}") from error
    if not is_tested(version) and Version(version) < Version(OLDEST_TRL):
        raise MissingName(f"TRL {version} is too old for trl_fsdp_qlora: {INSTALL}")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise MissingName(f"TRL {version} has no {module}.{name} {needed}") from error


@functools.cache
def is_tested(version: str | None = None) -> bool:
    """Whether this package's tests have run with this version of TRL, the installed one if it is `None`.

    A line is logged once if not; then trainers compare their first step with TRL's own
    (`trainers/starting/first_step.py`).
    """
    version = version or import_module("trl").__version__
    if ".".join(map(str, Version(version).release[:2])) in TESTED_TRL:
        return True
    if Version(version) >= Version(OLDEST_TRL):
        logger.warning(
            "trl_fsdp_qlora was never run with TRL %s: GRPO, RLOO and DPO trainers compare their first step with "
            "TRL's own (tested: %s)",
            version,
            ", ".join(TESTED_TRL),
        )
    return False


@functools.cache
def words_of(trainer: str) -> frozenset[str]:
    """The words that are constants in the methods of TRL's class `trainer`; none if TRL has no such class.

    TRL compares options such as `loss_type` with them, and lists them nowhere else.
    """
    constants: list = []
    for method in vars(getattr(import_module("trl"), trainer, object)).values():
        function = inspect.unwrap(method) if callable(method) else None
        constants += getattr(getattr(function, "__code__", None), "co_consts", ())
    words = set()
    for constant in constants:
        parts = constant if isinstance(constant, (tuple, frozenset)) else (constant,)
        words.update(part for part in parts if isinstance(part, str) and part.isidentifier())
    return frozenset(words)


def is_padded_by_row(vision: Vision) -> bool:
    """Whether pixels are padded to as many images in each row as any row has (Idefics, SmolVLM).

    The mask over pixels then is `(B, images, height, width)`. TRL 1.16 compares the number of rows with that of
    images, which may be equal by chance: a row with two images and a row with none.
    """
    mask = vision.get("pixel_attention_mask")
    return isinstance(mask, torch.Tensor) and mask.ndim == 4


def images_by_row(vision: Vision) -> Vision:
    """`split_pixel_values_by_grid`: pixels and grids as lists with an entry per row, or padded tensors as they are."""
    if "pixel_values" not in vision or is_padded_by_row(vision):
        return vision
    return _this.split_pixel_values_by_grid(vision)


def rows_of_images(vision: Vision, rows: Iterable[int]) -> Vision:
    """TRL's vision arguments for some rows of a batch: pixels and grids per image, everything else per row."""
    by_row = images_by_row(vision)
    rows = [int(row) for row in rows]
    chosen = {}
    for name, x in by_row.items():
        parts = [x[row] for row in rows]
        # `x[rows]` would make the host wait until the list is on the device.
        chosen[name] = torch.stack(parts) if isinstance(x, torch.Tensor) and rows else parts
    return joined_images(chosen)


def joined_images(batch: Vision) -> Vision:
    """`unsplit_pixel_values_by_grid`, without pixels if no row has an image: vision towers refuse empty tensors."""
    if batch.get("num_images") is not None and not any(batch["num_images"]):
        of_images = ("pixel_", "image_", "num_images", "num_tiles", "spatial_")
        return {name: x for name, x in batch.items() if not name.startswith(of_images)}
    return _this.unsplit_pixel_values_by_grid(batch) if "pixel_values" in batch else batch


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
