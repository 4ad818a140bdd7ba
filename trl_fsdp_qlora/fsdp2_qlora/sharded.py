"""What a trainer does otherwise under FSDP2, as functions: weights gathered for a while, an adapter that is sharded.

`ShardedQLoRAMixin` calls them for any TRL trainer; the trainers of this package call them in their own methods. Under
every other config they change nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, register_fsdp_forward_method
from transformers import Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..compat.transformers import no_optimizer_read
from .adapters import gather_adapter, gather_optimizer, has_sharded_adapter, load_adapter, load_optimizer
from .generation import gathered_as, keep_gathered


def base_bytes_of(model: nn.Module) -> Any | None:
    """[`distribute.BaseBytes`] of this rank, measured when the model was prepared; `None` if no base is sharded."""
    return getattr(model, "base_bytes", None)


def gather_for_step(args: TrainingArguments, model: nn.Module, last_micro_batch: bool) -> None:
    """With `fsdp_keep_gathered`, gather a sharded base once for an optimizer step; call before each micro-batch."""
    if vars(args).get("fsdp_keep_gathered") and base_bytes_of(model) is not None:
        keep_gathered(model, last_micro_batch)


def weights_gathered(args: TrainingArguments, model: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Keep all weights gathered inside the block, if `args.fsdp_gather` and the free memory allow it.

    The block is meant for generation and for the passes of the old policy and the reference: many forwards without
    gradient, with the same weights.
    """
    # With vLLM the model does not generate, and TRL's sync of the weights expects them sharded.
    options = vars(args)  # TRL's own configs have not every field
    mode = "per_layer" if options.get("use_vllm") else options.get("fsdp_gather", "auto")
    return gathered_as(mode, model, device)


@contextmanager
def head_on_device(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Let TRL's fused LM head find its weight on the device although the shards are offloaded.

    The fused head computes on the device of its weight. If that is the host, the device's collectives refuse the
    results.
    """
    plugin = accelerator.state.fsdp_plugin if isinstance(model, FSDPModule) else None
    if plugin is None or not isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield
        return
    language_model = model.get_base_model() if isinstance(model, PeftModel) else model
    head = language_model.get_output_embeddings()
    device = accelerator.device

    def moved_head():
        bias = getattr(head, "bias", None)
        return SimpleNamespace(weight=head.weight.to(device), bias=None if bias is None else bias.to(device))

    with patch.multiple(language_model, get_output_embeddings=moved_head):
        yield


def prepare_for_evaluation(trainer: Trainer) -> None:
    """Shard a trainer's model if an evaluation comes before training."""
    if trainer.accelerator.is_fsdp2 and not isinstance(trainer.model, FSDPModule):
        # Accelerate prepares the optimizer with the model, and an evaluation alone does not create it.
        trainer.create_optimizer()
        trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        register_fsdp_forward_method(trainer.model, "generate")
        trainer.model_wrapped = trainer.model


# --- saving and loading: `stock` is the trainer's own method, which does it unless the adapter is sharded ------------


def save_adapter(trainer: Trainer, output_dir: str | None) -> None:
    adapter = gather_adapter(trainer.model)
    if trainer.args.should_save:  # transformers 5.17's `_save` writes on every rank that calls it
        trainer._save(output_dir or trainer.args.output_dir, state_dict=adapter)
    trainer.accelerator.wait_for_everyone()


def save_model(stock: Callable, trainer: Trainer, output_dir: str | None) -> None:
    """Save the weights, and push nothing."""
    if has_sharded_adapter(trainer.model):
        save_adapter(trainer, output_dir)
    else:
        stock(output_dir, _internal_call=True)


def save_optimizer_and_scheduler(stock: Callable, trainer: Trainer, output_dir: str) -> None:
    if not has_sharded_adapter(trainer.model):
        stock(output_dir)
        return
    state = gather_optimizer(trainer.optimizer)
    if trainer.args.should_save:
        torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
        torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)


def load_from_checkpoint(stock: Callable, trainer: Trainer, checkpoint: str, model: nn.Module | None) -> None:
    model = trainer.model if model is None else model
    if has_sharded_adapter(model):
        load_adapter(model, checkpoint)
    else:
        stock(checkpoint, model)


def load_optimizer_and_scheduler(above: Any, trainer: Trainer, checkpoint: str | None) -> None:
    """`above` is the trainer's `super()`, whose method is looked up only when transformers' is out of the way."""
    if checkpoint is None or not has_sharded_adapter(trainer.model):
        above._load_optimizer_and_scheduler(checkpoint)
        return
    optimizer = Path(checkpoint) / OPTIMIZER_NAME
    schedule = Path(checkpoint) / SCHEDULER_NAME
    if optimizer.is_file() and schedule.is_file():  # otherwise both start anew, as in transformers
        load_optimizer(trainer.optimizer, torch.load(optimizer, map_location="cpu", weights_only=True))
        trainer.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
    with no_optimizer_read():  # TRL's own method restores its other states, such as its entropy controller
        above._load_optimizer_and_scheduler(checkpoint)


def load_best_model(stock: Callable, trainer: Trainer) -> None:
    if has_sharded_adapter(trainer.model):
        load_adapter(trainer.model, trainer.state.best_model_checkpoint)
    else:
        stock()
