"""The arguments of `EfficientGRPOTrainer`, checked and made ready for TRL."""

from collections.abc import Sized
from typing import Any

from ...engines.vllm.sync_choice import Sync, choose_sync, why_own_base
from ...experimental.one_generation_ahead import ahead
from ..run.arguments import adapter_and_base, check_prompts, completed, with_base_loaded
from ..run.input_checks import columns_of
from .config import EfficientGRPOConfig


def checked_arguments(call: dict[str, Any]) -> tuple[dict[str, Any], Sync, str | None]:
    """The constructor arguments of `trl.GRPOTrainer`, made from the user's arguments, and how vLLM gets the weights.

    The last value is why vLLM holds a base of its own; `None` if it may share the trainer's.

    Raises:
        ValueError: no `prompt` column, an empty or too small dataset, a wrong combination of launch and model.
    """
    call = completed(call, EfficientGRPOConfig, "GRPO")
    args = call["args"]
    dataset = call.get("train_dataset")
    check_prompts(call, needs_prompt=call.get("environment_factory") is None)
    not_single_turn_text = [name for name in ("tools", "environment_factory", "rollout_func") if call.get(name)]
    not_single_turn_text += [name for name in ("image", "images") if name in columns_of(dataset)]
    not_indexed = ["a streaming dataset"] if dataset is not None and not isinstance(dataset, Sized) else []
    if args.dynamic_sampling and (not_single_turn_text or not_indexed):
        raise ValueError(
            "dynamic_sampling draws single-turn completions of further text prompts, by their index in the "
            f"dataset, and there is {', '.join(not_single_turn_text + not_indexed)}: set dynamic_sampling=False"
        )
    ahead.check_call(call)
    # `choose_sync` raises, before anything is loaded, if vLLM cannot serve the model.
    peft_config, quantization = adapter_and_base(call)
    sync = choose_sync(args, peft_config, quantization is not None, ask=True, model=call["model"])
    own_base = why_own_base(args, sync, quantization, call["model"])
    return with_base_loaded(call, needs_reference=args.beta != 0.0), sync, own_base
