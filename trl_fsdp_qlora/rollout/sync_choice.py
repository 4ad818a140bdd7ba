"""How the policy gets into a vLLM engine: decided, and refused where it cannot work, before a model is loaded."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..compat.vllm import adapter_misfits
from ..fsdp2_qlora.launch_checks import is_fsdp_launch
from .adapter_sync import RolloutError, served_rank
from .weight_sync_check import truncations

CHOICES = ("auto", "adapter", "merge")
# Where a completion is longer than this, a factor exp(Σ of the tokens' differences) leaves every clip.
LONG_COMPLETION = 512
# Full fine-tuning's learning rates teach an adapter almost nothing; LoRA wants ten to a hundred times as much.
LOW_ADAPTER_RATE = 5e-6


class Sync(NamedTuple):
    """`"adapter"`, `"merge"` or `"off"` (no vLLM), and why."""

    mode: str
    reason: str

    def describe(self) -> str:
        """A line for a start-up report."""
        sent = "the adapter alone" if self.mode == "adapter" else "all weights, the adapter merged"
        return f"vLLM gets {sent}: {self.reason}"


def choose_sync(args: Any, peft_config: Any, quantized: bool, ask: Callable[[Any], dict] | None = None) -> Sync:
    """What `rollout_sync` comes to for a run.

    Args:
        args: of the trainer.
        peft_config: of the adapter that is trained, or `None`.
        quantized: the base is quantized.
        ask: gives what the server of `args` was started with ([`trl_fsdp_qlora.rollout.server.server_info`]), where the
            choice hangs on it; `None` to choose without.

    Raises:
        RolloutError: the choice cannot work; names the line to change.
    """
    if not args.use_vllm:
        return Sync("off", "use_vllm is off")
    if args.rollout_sync == "merge" or peft_config is None:
        if args.rollout_sync == "adapter":
            served_rank(peft_config)  # says that there is no adapter
        if quantized:
            raise RolloutError(
                "rollout_sync='merge' with a quantized base: merging into packed weights is not possible "
                "(trl#4973). Remove rollout_sync, or load the base unquantized"
            )
        return Sync("merge", "asked for" if args.rollout_sync == "merge" else "there is no adapter to send alone")
    try:
        served_rank(peft_config)
        if problems := adapter_misfits():
            raise RolloutError("the installed TRL differs from 1.16 in " + "; ".join(problems))
    except RolloutError as error:
        if args.rollout_sync == "adapter" or quantized:
            raise
        return Sync("merge", str(error))
    if args.rollout_sync == "adapter":
        return Sync("adapter", "asked for")
    if quantized:
        return Sync("adapter", "the base is quantized")
    on_gpu = torch.cuda.is_available()
    if args.vllm_mode == "server" and ask is not None:
        info = ask(args)
        if info["lora_config"] is None:
            return Sync("merge", "the server was started without --enable-lora")
        if info["weight_transfer_config"] is not None and on_gpu:
            return Sync("merge", "the server was started with --weight-transfer-config")
    if is_fsdp_launch() or getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", None) == 3:
        return Sync("adapter", "the base is sharded")
    if args.vllm_mode == "server":
        return Sync("adapter", "the engine is a server" + (" (if it was started to take them)" if ask is None else ""))
    if not on_gpu:
        return Sync("adapter", "there is no GPU, where pushing whole weights does not work")
    return Sync("merge", "one unquantized device: merged weights decode faster than LoRA kernels")


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
    if corrected and (cuts := truncations(args)):
        product = ", in a sequence mode by the product over all of its tokens" if by_sequence else ""
        found.append(
            f"under {', '.join(f'{name}={value}' for name, value in cuts.items())} vLLM's log-probabilities are of the tokens "
            "that are left, and the trainer's of all tokens: importance weights are too small by the probability of what "
            f"was left{product} (trl#6789). Leave {' and '.join(cuts)} out, or set vllm_importance_sampling_correction: false"
        )
    if args.vllm_engine_kwargs and args.vllm_mode == "server":
        found.append(
            "vllm_engine_kwargs is for an engine in this process; give a server its options where it is started"
        )
    if sync.mode == "adapter" and (low := low_adapter_rate(args.learning_rate)) is not None:
        found.append(low)
    return found
