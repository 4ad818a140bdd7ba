"""Starting the engine of a run whose policy is an adapter."""

import logging
import uuid
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel

from ..compat.vllm import VLLMGeneration, leave_groups_that_are_gone
from ..run.ranks import on_main
from ..run.shipped import cache_folder
from .adapter_sync import AdapterVersions, RolloutError, served_rank
from .dequantized_base import DONE, dequantized_base, has_packed_base
from .engine import AdapterEngine, count_steps, together
from .server import not_watched, watch_completions
from .stall import EngineStall

logger = logging.getLogger(__name__)


def start_engine(args: Any, model: PeftModel, accelerator: Accelerator, tokenizer) -> AdapterEngine:
    """The engine that `args` describes, colocated or a server's, holding the base that `model` trains on. Collective.

    Args:
        args: of the trainer.
        model: with its adapter; its weights may be on rank 0 alone (FSDP2), but are not sharded yet.
        accelerator, tokenizer: of the trainer.

    Raises:
        RolloutError: on every rank.
    """
    peft_config = model.peft_config[model.active_adapters[0]]
    base = model.name_or_path
    if has_packed_base(model) and args.vllm_mode == "colocate":
        base = _shared_dequantized(model, accelerator, tokenizer)
    engine = AdapterEngine(
        base=base,
        peft_config=peft_config,
        max_lora_rank=served_rank(peft_config),
        versions=AdapterVersions(f"policy-{uuid.uuid4().hex[:8]}", Path(args.output_dir) / ".rollout"),
        stall_timeout=args.vllm_stall_timeout,
        model=model,
        accelerator=accelerator,
        processing_class=tokenizer,
        mode=args.vllm_mode,
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        server_base_url=args.vllm_server_base_url,
        server_host=args.vllm_server_host,
        server_port=args.vllm_server_port,
        group_port=args.vllm_group_port,
        server_timeout=args.vllm_server_timeout,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        gpu_memory_utilization=args.vllm_gpu_memory_utilization,
        max_model_length=args.vllm_max_model_length,
        max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
        enable_sleep_mode=args.vllm_enable_sleep_mode,
        model_impl=args.vllm_model_impl,
        trust_remote_code=args.trust_remote_code,
        repetition_penalty=args.repetition_penalty,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        max_completion_length=args.max_completion_length,
        logprobs=0,
        generation_kwargs=args.generation_kwargs,
    )
    if has_packed_base(model) and not (Path(engine.base) / DONE).is_file() and accelerator.is_main_process:
        logger.warning(
            f"the base is trained in 4 bits and the vLLM server holds {engine.base}: serve the dequantized copy instead, "
            "which `trl-fsdp-qlora dequantize --model_name_or_path ...` writes, or rollouts come from another rounding"
        )
    return engine


def limit_stalls(engine: Any, seconds: float) -> None:
    """Give up TRL's own engine, which is sent whole weights, where it stands still, as an [`AdapterEngine`] does by itself.

    Completions of a server are waited for as long as it counts tokens, by the rank that asks; everything else as long as
    weights are passed on or steps of the engine end, on every rank.

    Args:
        engine: of the trainer; anything but TRL's is left alone.
        seconds: without progress that are too many; 0 for no limit.
    """
    if not isinstance(engine, VLLMGeneration) or isinstance(engine, AdapterEngine):
        return
    colocated = engine.mode == "colocate"
    if colocated:
        leave_groups_that_are_gone(engine.llm)
    if not seconds:
        return
    stall = EngineStall(seconds, on_cpu=engine.accelerator.device.type == "cpu")
    sync, passed_on, generate = engine.sync_weights, engine._iter_named_params, engine.generate

    def counted_params():
        for named in passed_on():
            stall.steps += 1
            yield named

    def watched_sync() -> None:
        with stall.watching("take the weights"):
            sync()

    def watched_generate(*args, **kwargs) -> tuple:
        with together("generate"), stall.watching("generate"):
            return generate(*args, **kwargs)

    engine._iter_named_params, engine.sync_weights = counted_params, watched_sync
    if colocated:
        count_steps(engine.llm, stall)
        engine.generate = watched_generate
    elif engine.accelerator.is_main_process and not watch_completions(engine.vllm_client, seconds):
        logger.warning(not_watched(engine.vllm_client.base_url))


def _shared_dequantized(model: PeftModel, accelerator: Accelerator, tokenizer) -> str:
    # What the base computes with: bfloat16 on GPUs; on a CPU the engine runs in float32 (see AdapterEngine).
    dtype = torch.float32 if accelerator.device.type == "cpu" else torch.bfloat16
    try:
        return str(on_main(lambda: dequantized_base(model, tokenizer, cache_folder() / "dequantized", dtype)))
    except OSError as error:
        raise RolloutError(str(error)) from error
