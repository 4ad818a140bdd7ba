"""The micro-batches of an optimizer step, scored together: what several of them begin with is computed once.

Their weights are the same, and TRL has drawn them all before it uses the first. So the trainer looks ahead: which tokens each
of them will score is known, and [`trl_fsdp_qlora.prefix_sharing.door.Door.step_forwards`] says how to compute them. As many
micro-batches as fit run in one pass. Each gets its scores when TRL asks for them: the last one of a pass with the graph, those
before it as constants, whose gradients wait for the last one's backward (see `prefix_sharing/across_passes.py`). So TRL's loss
is taken of each micro-batch as it is, and every backward is one that the trainer calls.
"""

from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..compat.replaced import replaced
from ..compat.trl import FusedCausalLMOutput
from ..prefix_sharing.across_passes import Account, StepForwards, hand_over, lend
from ..prefix_sharing.door import Batch


class StepScores:
    """Scores of the micro-batches of one optimizer step.

    Args:
        forwards: how to compute them.
        per_pass: how many micro-batches one pass scores.
        batches: the micro-batches.
        ends_update: the optimizer steps behind the last of them.
    """

    def __init__(self, forwards: StepForwards, per_pass: int, batches: list[Batch], ends_update: bool):
        self.forwards, self.batches, self.per_pass, self.ends_update = forwards, batches, per_pass, ends_update
        self._waiting: list[FusedCausalLMOutput] = []  # scores of the pass at hand that nobody asked for yet

    def score(self, number: int, model: nn.Module) -> FusedCausalLMOutput:
        """The scores of a micro-batch. Asked for in their order."""
        place = number % self.per_pass
        if place == 0:
            self._waiting = self._scores_of_pass(number // self.per_pass, model)
        return self._waiting.pop(0)

    def computes(self, number: int) -> bool:
        """Whether asking for a micro-batch's scores runs the model."""
        return number % self.per_pass == 0

    def _scores_of_pass(self, number: int, model: nn.Module) -> list[FusedCausalLMOutput]:
        first = number * self.per_pass
        batches = self.batches[first : first + self.per_pass]
        batch = Batch.joined(batches)
        of_images = {"num_images": batch.num_images, "image_keys": batch.image_keys}
        # DDP asks in the forward whether its backward will reduce gradients. That of a pass is its last micro-batch's.
        is_last = self.ends_update and first + self.per_pass == len(self.batches)
        reduces = isinstance(model, DistributedDataParallel) and is_last
        for forward in self.forwards.of_pass(number):
            with replaced(model, require_backward_grad_sync=True) if reduces else nullcontext():
                output = model(**batch.arguments(), **of_images, forward=forward, fused_lm_head=True)
        return _parts(output, [len(batch.input_ids) for batch in batches])


def _parts(output: FusedCausalLMOutput, rows: list[int]) -> list[FusedCausalLMOutput]:
    """The output of a pass by micro-batch, of so many `rows` each."""
    if len(rows) == 1:
        return [output]
    # The loss is that of all rows.
    values = {item.name: getattr(output, item.name) for item in fields(output) if item.name != "loss"}
    values = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.ndim == 2}
    pieces: list[dict[str, Any]] = [{} for _ in rows]
    owed = []
    for name, value in values.items():
        split = value.split(rows)
        for piece, part in zip(pieces[:-1], split[:-1], strict=True):
            account = Account()
            piece[name] = lend(part, account)
            owed.append((part, account))
        pieces[-1][name] = split[-1]
    pieces[-1]["log_probs"] = hand_over(pieces[-1]["log_probs"], owed)
    return [FusedCausalLMOutput(**piece) for piece in pieces]
