"""How the policy gets into a vLLM engine: decided, and refused where it cannot work, before a model is loaded."""

import os
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from packaging.version import Version

from ..fsdp2_qlora.launch_checks import is_fsdp_launch
from .adapter_sync import RolloutError, served_rank
from .reshaped import reshaping_warning

CHOICES = ("auto", "adapter", "merge")
# vLLM versions that TRL 1.16 names as supported end here; the tests here run 0.31.0.
TESTED_VLLM = ("0.22", "0.31")
# Where a completion is longer than this, a factor exp(Σ of the tokens' differences) leaves every clip.
LONG_COMPLETION = 512
# Full fine-tuning's learning rates teach an adapter almost nothing; LoRA wants ten to a hundred times as much.
LOW_ADAPTER_RATE = 5e-6


_SENT = {"adapter": "the adapter alone", "merge": "all weights, the adapter merged"}


class Sync(NamedTuple):
    """`"adapter"`, `"merge"` or `"off"` (no vLLM), and why."""

    mode: str
    reason: str

    def describe(self) -> str:
        """A line for a start-up report."""
        return f"vLLM gets {_SENT[self.mode]}: {self.reason}"


def choose_sync(args: Any, peft_config: Any, quantized: bool) -> Sync:
    """What `rollout_sync` comes to for a run.

    Args:
        args: of the trainer.
        peft_config: of the adapter that is trained, or `None`.
        quantized: the base is quantized.

    Raises:
        RolloutError: the choice cannot work; names the line to change.
    """
    if args.rollout_sync not in CHOICES:
        raise RolloutError(
            f"rollout_sync={args.rollout_sync!r} is unknown; use one of {', '.join(map(repr, CHOICES))}"
        )
    if not args.use_vllm:
        return Sync("off", "use_vllm is off")
    sharded = _is_sharded(args)
    if args.rollout_sync == "merge" or peft_config is None:
        if args.rollout_sync == "adapter":
            served_rank(peft_config)  # says that there is no adapter
        if quantized:
            raise RolloutError(
                "rollout_sync='merge' with a quantized base: merging into packed weights is not possible "
                "(trl#4973). Remove rollout_sync, or load the base unquantized"
            )
        return Sync("merge", "asked for" if args.rollout_sync == "merge" else "there is no adapter to send alone")
    reason = None
    if quantized:
        reason = "the base is quantized"
    elif sharded:
        reason = "the base is sharded"
    elif args.vllm_mode == "server":
        reason = "the engine is a server"
    elif not torch.cuda.is_available():
        reason = "there is no GPU, where pushing whole weights does not work"
    try:
        served_rank(peft_config)
    except RolloutError as error:
        if args.rollout_sync == "adapter" or quantized:
            raise
        return Sync("merge", str(error))
    if args.rollout_sync == "adapter":
        return Sync("adapter", "asked for")
    if reason is not None:
        return Sync("adapter", reason)
    return Sync("merge", "one unquantized device: merged weights decode faster than LoRA kernels")


def _is_sharded(args: Any) -> bool:
    return is_fsdp_launch() or getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", None) == 3


def low_adapter_rate(rate: float) -> str | None:
    """Why an adapter learns little at a learning rate; `None` where it may learn."""
    if rate >= LOW_ADAPTER_RATE:
        return None
    return f"learning_rate={rate:g} is one for full fine-tuning; adapters usually need 1e-5 to 1e-4"


def warnings_for(args: Any, sync: Sync) -> list[str]:
    """What is likely to go wrong in a run with vLLM, each with the line to change; for the log before the first step."""
    if sync.mode == "off":
        return []
    found = []
    corrected = args.vllm_importance_sampling_correction
    by_sequence = args.vllm_importance_sampling_mode.startswith("sequence")
    if corrected and by_sequence and (args.max_completion_length or 0) > LONG_COMPLETION:
        found.append(
            f"vllm_importance_sampling_mode={args.vllm_importance_sampling_mode!r} with completions of up to "
            f"{args.max_completion_length} tokens: the weight is exp(sum of all differences), which long completions push "
            "out of any clip; consider token_truncate"
        )
    if (reshaped := reshaping_warning(args)) is not None:
        found.append(reshaped)
    if sync.mode == "adapter" and (low := low_adapter_rate(args.learning_rate)) is not None:
        found.append(low)
    sleeps = sync.mode == "adapter" and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode
    if sleeps and "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        found.append("vllm_enable_sleep_mode does not work with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return found
    low, high = map(Version, TESTED_VLLM)
    if not low.release <= Version(installed).release[:2] <= high.release:
        found.append(
            f"vLLM {installed} is outside {TESTED_VLLM[0]} to {TESTED_VLLM[1]}, which TRL 1.16 was written for"
        )
    return found


@contextmanager
def withheld(args: Any, withhold: bool):
    """Let TRL build a trainer without its own engine, which cannot take an adapter; ours stands in its place afterwards."""
    if not withhold:
        yield
        return
    # TRL's own check, which it makes with use_vllm only.
    by_token = args.vllm_importance_sampling_mode in ("token_truncate", "token_mask")
    if args.loss_type == "vespo" and args.vllm_importance_sampling_correction and not by_token:
        raise ValueError(
            "loss_type='vespo' needs vllm_importance_sampling_mode to be 'token_truncate' or 'token_mask', got "
            f"{args.vllm_importance_sampling_mode!r}"
        )
    args.use_vllm = False
    try:
        yield
    finally:
        args.use_vllm = True
