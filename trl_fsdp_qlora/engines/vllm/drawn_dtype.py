"""The dtype in which an engine in this process draws: the trainer's, unless the user names another.

vLLM alone would take the checkpoint's. A run in fp16 of a checkpoint in bfloat16 would then draw from another
rounding.
"""

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

if TYPE_CHECKING:
    from trl import GRPOConfig


def trainer_dtype(model: nn.Module, accelerator: Accelerator) -> torch.dtype:
    """The dtype in which a model's matrix products are computed in training.

    Autocast decides if it is on, also for a 4-bit base, whose layers pass their inputs to a product under autocast.
    """
    of_autocast = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)
    of_layers = (getattr(layer, "compute_dtype", None) for layer in model.modules())
    of_4_bit_base = next(filter(None, of_layers), None)
    return of_autocast or of_4_bit_base or model.dtype


def engine_options(args: "GRPOConfig", model: nn.Module, accelerator: Accelerator) -> dict[str, object]:
    """Further arguments of `vllm.LLM` in this process: the trainer's dtype, and the user's, which take precedence."""
    dtype = str(trainer_dtype(model, accelerator)).removeprefix("torch.")
    return {"dtype": dtype, **(args.vllm_engine_kwargs or {})}


def other_dtype(held: str, drawn: str) -> str:
    """Why a base that is held in one dtype cannot be shared with an engine that draws in another."""
    return f"the base is held in {held} and vLLM draws in {drawn}; load it with dtype: {drawn}"


def describe_dtype(args: "GRPOConfig", model: nn.Module, accelerator: Accelerator) -> str:
    """A line of the start-up block on the dtype in which an engine in this process draws."""
    dtype = engine_options(args, model, accelerator)["dtype"]
    source = "vllm_engine_kwargs" if "dtype" in (args.vllm_engine_kwargs or {}) else "as the trainer computes"
    return f"vLLM draws in {dtype} ({source})"
