"""Run by test_images.py in two processes: prompts with images on both ranks, and on one of them only."""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.prefix_sharing.helpers import assert_equal_gradients, gradients
from tests.prefix_sharing.test_images import COMPLETION, Stock, freeze_tower, with_images
from trl_fsdp_qlora.prefix_sharing import PrefixSharing
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

# Of with_images(): rows 5 and 6 are a prompt without an image. The ranks' rows of each pass, in turn.
TEXT = [5, 6, 5, 6]
PASSES = {
    "both": [(range(5), range(7, 11))],
    "one rank first": [(TEXT, range(4)), (range(5), TEXT), (range(5, 9), range(5))],
    "text first": [(TEXT, TEXT), (TEXT, range(7, 11))],
}


def wrapped(wrapper, model):
    if wrapper == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)  # as transformers' Trainer does
    mesh = init_device_mesh("cpu", (2,))
    tower = [module for name, module in model.named_modules() if name.endswith((".layers.0", ".blocks.0"))]
    assert len(tower) == 2  # the vision tower's and the language model's
    for layer in [*tower, *model.get_decoder().layers[1:]]:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model):
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    model.zero_grad(set_to_none=True)
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found]


def scenario(name, wrapper, frozen, passes):
    model, ids, mask, vision = with_images(name)
    reference, *_ = with_images(name)
    for one in (model, reference):
        if frozen:
            freeze_tower(one)
    weight = torch.randn(len(ids), COMPLETION, generator=torch.Generator().manual_seed(5))
    sharing = PrefixSharing(temperature=0.9, expects_images=True)
    expected_of, stock = Stock(reference), Stock(model)
    sharing.prepare("policy", model)
    model = wrapped(wrapper, model)
    for parts in passes:
        every = PassRequest(Kind.POLICY, reference).on(ids, mask, COMPLETION, **vision)
        expected, total = [], 0
        for part in parts:
            expected.append(expected_of(every.rows(list(part)))[0])
            total = total + (expected[-1] * weight[list(part)]).sum() / 2  # ranks are averaged
        total.backward()
        mine = list(parts[dist.get_rank()])
        scored = mask[mine, -COMPLETION:].bool()
        request = replace(every, model=model).rows(mine)
        with torch.no_grad():
            old = sharing.log_probs(replace(request, kind=Kind.OLD, batch_size=2), stock).values[0]
        (logps, _, _), figures = sharing.log_probs(request, stock)
        assert figures and sharing._models["policy"].images.reason is None
        for found in (old, logps):
            wanted = expected[dist.get_rank()].detach()
            torch.testing.assert_close(found[scored], wanted[scored], atol=1e-4, rtol=1e-5)
        (logps * weight[mine]).sum().backward()
        assert_equal_gradients(whole(model), gradients(reference), tolerance=2e-5)


def main(name: str, wrapper: str) -> None:
    dist.init_process_group("gloo")
    for frozen in (False, True):
        for title, passes in PASSES.items():
            print(title, "frozen" if frozen else "trained", flush=True)
            scenario(name, wrapper, frozen, passes)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
