"""`Sharding`: a 4-bit base sharded by FSDP2 and its plain PEFT adapter, for a trainer that asks at each point."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, register_fsdp_forward_method
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import logging

from ..compat.replaced import replaced
from ..compat.transformers import no_optimizer_read
from .adapters import gather_adapter, gather_optimizer, load_adapter, load_optimizer
from .generation import choose, gathered, keep_gathered
from .prepare import has_sharded_adapter, shard_quantized_base

if TYPE_CHECKING:
    from .accounting import BaseBytes

logger = logging.get_logger(__name__)


class Sharding:
    """What FSDP2 with a 4-bit base needs of a training run. Without them every hook leaves things to the trainer.

    The model is handed to each hook, because wrapping replaces it. Hooks that return `bool` say whether they did the
    work; every rank has to call them.

    Args:
        args: of the trainer; `fsdp_gather` and `fsdp_keep_gathered` where it has them.
        accelerator: of the trainer, before it prepares a model.
    """

    def __init__(self, args: TrainingArguments, accelerator: Accelerator):
        self.args = args
        self.accelerator = accelerator
        shard_quantized_base(accelerator)

    def base_bytes(self, model: nn.Module) -> "BaseBytes | None":
        """Bytes of the base on this rank, measured when the model was prepared; `None` where it is not sharded."""
        return getattr(model, "base_bytes", None)

    def is_unprepared(self, model: nn.Module) -> bool:
        """Whether `model` is to be sharded and was not yet (evaluation before training)."""
        return self.accelerator.is_fsdp2 and not isinstance(model, FSDPModule)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Shard the model; accelerate wants the optimizer with it, and evaluation alone gives it none."""
        model, optimizer = self.accelerator.prepare(model, optimizer)
        register_fsdp_forward_method(model, "generate")
        return model, optimizer

    def before_micro_batch(self, model: nn.Module) -> None:
        """Keep the base gathered over the micro-batches of an optimizer step, if `fsdp_keep_gathered`."""
        if getattr(self.args, "fsdp_keep_gathered", False) and self.base_bytes(model) is not None:
            keep_gathered(model, last_micro_batch=self.accelerator.sync_gradients)

    @contextmanager
    def gathered(self, model: nn.Module) -> Iterator[None]:
        """Hold the whole model while weights do not change, if `args.fsdp_gather` and the free memory say so.

        For generation, and the old and reference policies' passes: many forwards, no gradient, the same weights.
        """
        # With vLLM the model does not generate, and TRL's sync of the weights expects them sharded.
        if not isinstance(model, FSDPModule) or getattr(self.args, "use_vllm", False):
            yield
            return
        mode = choose(model, self.accelerator.device, getattr(self.args, "fsdp_gather", "auto"))
        with gathered(model) if mode == "once" else nullcontext():
            yield

    @contextmanager
    def head_on_device(self, model: nn.Module) -> Iterator[None]:
        """Let TRL's fused LM head find its weight on the device although the shards are offloaded.

        It computes where the weight lies: on the host, whose results no collective of the device takes.
        """
        plugin = self.accelerator.state.fsdp_plugin if isinstance(model, FSDPModule) else None
        if plugin is None or not isinstance(plugin.cpu_offload, CPUOffloadPolicy):
            yield
            return
        language_model = model.get_base_model() if isinstance(model, PeftModel) else model
        head = language_model.get_output_embeddings()

        def there():
            bias = getattr(head, "bias", None)
            device = self.accelerator.device
            return SimpleNamespace(weight=head.weight.to(device), bias=None if bias is None else bias.to(device))

        with replaced(language_model, get_output_embeddings=there):
            yield

    def save_adapter(self, model: nn.Module, output_dir: str, write: Callable) -> bool:
        """Gather a sharded adapter and let one rank `write(output_dir, state_dict=...)` it."""
        if not has_sharded_adapter(model):
            return False
        adapter = gather_adapter(model)
        if self.args.should_save:  # transformers 5.17 leaves it to the caller that one rank alone writes
            write(output_dir, state_dict=adapter)
        self.accelerator.wait_for_everyone()
        return True

    def load_adapter(self, model: nn.Module, checkpoint: str) -> bool:
        """Load a plain PEFT adapter into a sharded one."""
        if not has_sharded_adapter(model):
            return False
        logger.info(f"Loading the adapter from {checkpoint}.")
        load_adapter(model, checkpoint)
        return True

    def save_optimizer(self, model: nn.Module, optimizer, scheduler, output_dir: str) -> bool:
        """Write the whole optimizer state of a sharded adapter, and the scheduler's."""
        if not has_sharded_adapter(model):
            return False
        state = gather_optimizer(optimizer)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))
        return True

    @contextmanager
    def loading_optimizer(self, model: nn.Module, optimizer, scheduler, checkpoint: str | None) -> Iterator[None]:
        """Read what [`save_optimizer`] wrote, where there is a sharded adapter; inside, transformers' own reading does nothing.

        What a trainer restores beside it (TRL its entropy controller) is restored inside as always.
        """
        if checkpoint is None or not has_sharded_adapter(model):
            yield
            return
        optimizer_file, scheduler_file = Path(checkpoint) / OPTIMIZER_NAME, Path(checkpoint) / SCHEDULER_NAME
        if optimizer_file.is_file() and scheduler_file.is_file():
            load_optimizer(optimizer, torch.load(optimizer_file, map_location="cpu", weights_only=True))
            scheduler.load_state_dict(torch.load(scheduler_file, weights_only=True))
        else:
            logger.warning(f"{checkpoint} holds no {OPTIMIZER_NAME} and {SCHEDULER_NAME}: the optimizer starts anew")
        with no_optimizer_read():
            yield
