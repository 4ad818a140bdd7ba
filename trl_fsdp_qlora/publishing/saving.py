"""What is written beside an adapter whenever a trainer saves it: a card, and logits to prove later that it loads."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType, is_peft_model

from .card import card_of, keeping_card
from .folder import WEIGHTS
from .logits import LOGITS, record_logits

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


@contextmanager
def saving_adapter(folder: str | Path, trainer: Any) -> Iterator[None]:
    """Around the saving of `trainer`'s model in `folder`, on the rank that saves.

    Where the weights are sharded no rank alone can compute a logit, so none are recorded.
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
