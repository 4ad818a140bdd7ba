"""Logits kept beside an adapter when it is saved for good, to prove later that it loads."""

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model

from ..fsdp2_qlora.prepare import has_sharded_adapter
from ..run.nonfatal import nonfatal
from .logits import LOGITS, record_logits

_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


@nonfatal("recording logits for `publish`")
def record(folder: str | Path, trainer: Any) -> None:
    """Record the logits of the adapter that `trainer` has saved in `folder`. Every rank calls it.

    Two forwards of eight tokens, so not for each checkpoint. Where FSDP2 shards the weights all ranks compute together; under
    DeepSpeed nothing is recorded.
    """
    accelerator, model = trainer.accelerator, trainer.accelerator.unwrap_model(trainer.model)
    writes = trainer.args.should_save
    if writes:
        (Path(folder) / LOGITS).unlink(missing_ok=True)  # of an earlier save, they would be of another adapter
    if not is_peft_model(model):
        return
    if accelerator.distributed_type in _WHOLE and writes:
        record_logits(model, folder)
    elif has_sharded_adapter(trainer.model):
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        with trainer.sharding.gathered(trainer.model):
            record_logits(trainer.model, folder, writes, accelerator.device, half)
