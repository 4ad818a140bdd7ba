"""What is written beside an adapter whenever a trainer saves it: a card, and logits to prove later that it loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model

from .card import card_of, keeping_card
from .folder import WEIGHTS
from .logits import LOGITS, record_logits

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


@contextmanager
def saving_adapter(folder: str | Path, trainer: Any) -> Iterator[None]:
    """Around the saving of `trainer`'s model in `folder`, on the rank that saves.

    Where the weights are sharded no rank alone can compute a logit: see [`record_sharded`].
    """
    with keeping_card(folder, partial(card_of, trainer)):
        yield
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model) or not (Path(folder) / WEIGHTS).is_file():
        return
    if trainer.accelerator.distributed_type in _WHOLE:
        record_logits(model, folder)
    else:  # of an earlier save, they would be of another adapter
        (Path(folder) / LOGITS).unlink(missing_ok=True)


def record_sharded(folder: str | Path, trainer: Any) -> None:
    """Record the logits of an adapter whose weights FSDP2 shards, after it was saved in `folder`. Every rank calls it."""
    accelerator, model = trainer.accelerator, trainer.model
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    with trainer.sharding.gathered(model):
        record_logits(model, folder, trainer.args.should_save, accelerator.device, half)
