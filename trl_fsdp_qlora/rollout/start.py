"""Starting the engine of a run whose policy is an adapter, in the place where TRL starts its own."""

import logging
import os
import uuid
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..run.ranks import on_main
from ..run.shipped import cache_folder
from .adapter_sync import AdapterVersions, RolloutError, served_rank
from .dequantized_base import DONE, dequantized_base, has_packed_base
from .sync_choice import Sync

logger = logging.getLogger(__name__)


def trl_starts_engine(args: Any, sync: Sync) -> AbstractContextManager:
    """Inside, TRL's trainer starts the engine of `sync`: [`start_engine`]'s, or its own with `vllm_engine_kwargs`."""
    if sync.mode == "off":
        return nullcontext()
    from ..compat.vllm import trl_starts

    return trl_starts(partial(start_engine, args) if sync.mode == "adapter" else None, args.vllm_engine_kwargs)


def start_engine(args: Any, *, model, accelerator, processing_class, mode: str, **options: Any):
    """An [`trl_fsdp_qlora.rollout.engine.AdapterEngine`], holding the base that `model` trains on. Collective.

    Args:
        args: of the trainer.
        model: with its adapter; its weights may be on rank 0 alone (FSDP2), but are not sharded yet.
        accelerator, processing_class, mode, **options: of TRL's `VLLMGeneration`.

    Raises:
        RolloutError: the server cannot take adapters, or a 4-bit base cannot be dequantized.
    """
    from .engine import AdapterEngine

    peft_config = model.peft_config[model.active_adapters[0]]
    rank = served_rank(peft_config)  # what PEFT made of the targets, before anything is written
    base, packed = model.name_or_path, has_packed_base(model)
    if packed and mode == "colocate":
        # What the base computes with: bfloat16 on GPUs; on a CPU the engine runs in float32 (see AdapterEngine).
        dtype = torch.float32 if accelerator.device.type == "cpu" else torch.bfloat16
        cache = cache_folder() / "dequantized"
        try:
            base = str(on_main(lambda: dequantized_base(model, processing_class, cache, dtype)))
        except OSError as error:
            raise RolloutError(str(error)) from error
    one_node = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes)) == accelerator.num_processes
    folder = args.vllm_adapter_dir or Path(args.output_dir) / ".rollout"
    in_memory = args.vllm_adapter_dir is None and mode == "colocate" and one_node
    engine = AdapterEngine(
        base=base,
        peft_config=peft_config,
        max_lora_rank=rank,
        versions=AdapterVersions(f"policy-{uuid.uuid4().hex[:8]}", folder, in_memory),
        engine_kwargs=args.vllm_engine_kwargs,
        model=model,
        accelerator=accelerator,
        processing_class=processing_class,
        mode=mode,
        **options,
    )
    if packed and not (Path(engine.base) / DONE).is_file() and accelerator.is_main_process:
        logger.warning(
            f"the base is trained in 4 bits and the vLLM server holds {engine.base}: serve the dequantized copy instead, "
            "which `trl-fsdp-qlora dequantize --model_name_or_path ...` writes, or rollouts come from another rounding"
        )
    return engine
