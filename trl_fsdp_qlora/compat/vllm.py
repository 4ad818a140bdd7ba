"""What is borrowed from TRL's vLLM code and from vLLM itself, checked when it is first used."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration, extract_logprobs

from .trl import check_seams

with warnings.catch_warnings():  # that it may change: what is borrowed is checked below
    warnings.simplefilter("ignore")
    from trl.experimental.async_grpo.async_grpo_trainer import round_lora_rank, validate_lora_for_vllm_sync

__all__ = [
    "VLLMClient",
    "VLLMGeneration",
    "extract_logprobs",
    "leave_groups_that_are_gone",
    "round_lora_rank",
    "validate_lora_for_vllm_sync",
]

_INIT = (
    "self model accelerator processing_class mode structured_outputs_regex server_base_url server_host server_port "
    "server_timeout group_port tensor_parallel_size gpu_memory_utilization max_model_length max_num_seqs "
    "enable_sleep_mode model_impl trust_remote_code repetition_penalty temperature top_p top_k min_p "
    "max_completion_length logprobs generation_kwargs"
)
EXPECTED = {
    "VLLMGeneration.__init__": (VLLMGeneration.__init__, _INIT),
    "VLLMGeneration._init_vllm": (VLLMGeneration._init_vllm, "self"),
    "VLLMGeneration._iter_named_params": (VLLMGeneration._iter_named_params, "self"),
    "VLLMGeneration.sync_weights": (VLLMGeneration.sync_weights, "self"),
    "VLLMGeneration.generate": (VLLMGeneration.generate, "self prompts images num_generations profiler"),
    "VLLMClient.check_server": (VLLMClient.check_server, "self total_timeout retry_interval"),
    "VLLMClient._get": (VLLMClient._get, "self url kwargs"),
    "VLLMClient.generate": (
        VLLMClient.generate,
        "self prompts features n repetition_penalty temperature top_p top_k min_p max_tokens logprobs "
        "structured_outputs_regex generation_kwargs",
    ),
    "extract_logprobs": (extract_logprobs, "all_outputs"),
    "round_lora_rank": (round_lora_rank, "adapter_rank"),
    "validate_lora_for_vllm_sync": (validate_lora_for_vllm_sync, "model"),
}
check_seams(EXPECTED)


def leave_groups_that_are_gone(llm: Any) -> None:
    """Let vLLM's `LLM` in this process end without a traceback after `torch.distributed.destroy_process_group()`.

    When its engine is collected, or the process ends, vLLM destroys process groups of its own, which that call has taken along.
    """
    client = getattr(llm.llm_engine, "engine_core", None)
    finalizer = getattr(client, "_finalizer", None)
    ending = None if finalizer is None else finalizer.detach()
    if ending is not None:
        _, shut_down, args, kwargs = ending
        client._finalizer = weakref.finalize(client, _while_there_are_groups, shut_down, *args, **kwargs)


def _while_there_are_groups(shut_down: Callable, *args, **kwargs) -> None:
    if torch.distributed.is_initialized():
        shut_down(*args, **kwargs)
