"""Run by test_passes.py in two processes: FSDP2 shards, each rank packs other rows; against one process, unsharded."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from prefix_sharing.helpers import (
    COMPLETION,
    RECURRENT,
    SUPPORTED,
    assert_equal_gradients,
    awkward_batch,
    build,
    gradients,
    stock_log_probs,
    with_stock_head,
)

from trl_fsdp_qlora.prefix_sharing import PrefixSharing
from trl_fsdp_qlora.scoring.request import Kind, PassRequest


def main(name: str) -> None:
    make = SUPPORTED.get(name) or RECURRENT[name][0]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ids, mask = awkward_batch()
    # Rank 0 has six rows of two groups, rank 1 four rows that hardly share; with batch_size=2 they cut differently.
    parts = [slice(0, 6), slice(6, 10)]
    weight = torch.randn(len(ids), COMPLETION, generator=torch.Generator().manual_seed(5))

    reference = with_stock_head(build(make), temperature=1.0)
    expected = stock_log_probs(reference, ids, mask)[0]
    ((expected * weight).sum() / 2).backward()  # FSDP averages over ranks
    expected_gradients = gradients(reference)

    model = with_stock_head(build(make), temperature=1.0)
    sharing = PrefixSharing()
    sharing.prepare("policy", model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters() if p.ndim > 1)

    mine = parts[rank]
    request = PassRequest(Kind.POLICY, model).on(ids[mine], mask[mine], COMPLETION)
    padded = lambda request: (stock_log_probs(model, request.input_ids, request.attention_mask)[0], None, None)  # noqa: E731
    with torch.no_grad():
        old = sharing.log_probs(replace(request, kind=Kind.OLD, batch_size=2), padded).values[0]
    torch.testing.assert_close(old, expected[mine].detach(), atol=2e-5, rtol=1e-5)
    (logps, _, _), figures = sharing.log_probs(request, padded)
    assert sharing.active() and figures["layers_cascade"] == (1 if name in SUPPORTED else 0.5)
    torch.testing.assert_close(logps, expected[mine], atol=2e-5, rtol=1e-5)
    (logps * weight[mine]).sum().backward()
    found = [p.grad.full_tensor() for p in model.parameters()]
    assert_equal_gradients(found, expected_gradients)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
