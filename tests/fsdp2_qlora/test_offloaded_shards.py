"""A shard that is offloaded stays on the host when it is filled, whatever device the mesh is on."""

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trl_fsdp_qlora.compat.fsdp import filled_shard


def test_a_filled_shard_stays_where_it_lies(tmp_path):
    """`meta` stands for a device that is not the mesh's; `DTensor.from_local` would move a shard from it."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        layer = torch.nn.Linear(4, 6, bias=False)
        fully_shard(layer)
        local = torch.arange(24.0).view(6, 4)
        filled = filled_shard(layer.weight.data, local)
        assert isinstance(filled, DTensor) and filled.to_local().data_ptr() == local.data_ptr()
        assert filled.placements == layer.weight.placements and torch.equal(filled.full_tensor(), local)
        elsewhere = filled_shard(layer.weight.data, local.to("meta"))
        assert elsewhere.to_local().device == torch.device("meta")
        assert elsewhere.device_mesh.device_type == "cpu"
    finally:
        torch.distributed.destroy_process_group()
