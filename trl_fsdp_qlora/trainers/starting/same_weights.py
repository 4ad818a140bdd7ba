"""Whether all nodes of a launch have loaded the same base.

Each node reads its own disk, and two nodes may have different files under one name: another revision in a cache, or a
copy that ended early. Training would then mix shards or gradients of two models, and no figure would show it.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ...errors import UserError
from ...fsdp2_qlora.loading import reads_checkpoint

BYTES = 2**16  # of each weight that are summed; a fine-tuned weight differs everywhere


def check_nodes(model: nn.Module, accelerator: Accelerator) -> None:
    """Compare sums of the frozen weights of the ranks that have read a checkpoint. Collective, before any is sharded.

    Raises:
        UserError: on all ranks, with the first weight that differs.
    """
    if accelerator.num_processes == 1:
        return
    # Other ranks of a node hold no weights, or those that they will get from these.
    has_read = accelerator.is_local_main_process or reads_checkpoint(accelerator.process_index)
    sums = frozen_sums(model) if has_read else {}
    sums_of_readers = [sums for sums in gather_object([sums]) if sums]
    if not sums_of_readers:
        return  # every weight is trained, or none has data here
    first, *others = sums_of_readers
    for name, value in first.items():
        if any(sums.get(name) != value for sums in others):
            raise UserError(
                f"the nodes loaded different weights under one name (the first that differs is {name}): let them "
                "share a folder, or name one commit as the model's revision"
            )


def frozen_sums(model: nn.Module) -> dict[str, int]:
    """For each frozen weight by name, a sum of its first bytes; none for a weight that has no data here."""
    sums = []
    names = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or parameter.is_meta or not parameter.numel():
            continue
        data = parameter.detach().reshape(-1)[:BYTES].contiguous().view(torch.uint8)[:BYTES]
        # Even bytes are counted twice, so that swapped neighbours are found as well.
        sums.append(data.sum(dtype=torch.int64) + data[::2].sum(dtype=torch.int64))
        names.append(name)
    values = torch.stack(sums).tolist() if sums else []  # one transfer from the device
    return dict(zip(names, values, strict=True))
