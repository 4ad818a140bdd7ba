"""Generation aside from training's own rollouts, on whatever the model is wrapped in; a mixin in front of a trainer."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..fsdp2_qlora.generation import choose, gathered
from ..upstream.trl import unwrap_model_for_generation


class GeneratesAside:
    """Accuracy, evaluation and V* generate for other prompts than a training batch's, with other numbers on each rank."""

    @property
    def _sharded(self) -> bool:
        """Whether a forward is a collective operation, and possible only after `Trainer.train` prepared the model."""
        return self.accelerator.num_processes > 1 and (self._dist.is_fsdp or self._dist.is_zero3)

    def _refuse_unprepared(self, what: str) -> None:
        prepared = self.model_wrapped is not self.model or any(isinstance(p, DTensor) for p in self.model.parameters())
        if self._sharded and not prepared:
            raise RuntimeError(
                f"{what} needs a forward of a model that is sharded over ranks, and only train() prepares it: let train() "
                f"run stage 1 in its first step, or run stage 1 without FSDP or ZeRO-3 first (--stage estimate)"
            )

    @contextmanager
    def generating(self, wrapped: nn.Module | None = None) -> Iterator[tuple[nn.Module, bool]]:
        """A model to call `generate` on, without gradients. Every rank has to enter.

        Under FSDP2 the weights are gathered once for the whole block, if `args.fsdp_gather` and the free memory say so:
        each rank then generates on its own. Otherwise every forward is a collective operation.

        Args:
            wrapped: the policy by default, or the reference model.

        Yields:
            The unwrapped model, and whether it works in lockstep: every rank has to call `generate` equally often, and
            with `synced_gpus=True`.
        """
        wrapped = self.model_wrapped if wrapped is None else wrapped
        mode = "per_layer"
        if isinstance(wrapped, FSDPModule):
            mode = choose(wrapped, self.accelerator.device, self.args.fsdp_gather)
        with (
            gathered(wrapped) if mode == "once" else nullcontext(),
            unwrap_model_for_generation(
                wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(wrapped, recurse=False),
        ):
            yield model, self._sharded and mode != "once"
