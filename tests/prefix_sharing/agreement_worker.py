"""Run by test_agreement.py in two processes: what only rank 1 meets, both answer alike, under DDP and under FSDP2."""

import sys
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.prefix_sharing.helpers import (
    COMPLETION,
    SUPPORTED,
    awkward_batch,
    build,
    stock_log_probs,
    with_stock_head,
)
from trl_fsdp_qlora.prefix_sharing import PrefixSharing, cascade
from trl_fsdp_qlora.scoring.request import Kind, PassRequest


def wrapped(wrapper, choice="auto"):
    model = with_stock_head(build(SUPPORTED["qwen3"]), temperature=1.0)
    sharing = PrefixSharing(choice)
    sharing.prepare("policy", model)
    if wrapper == "ddp":
        return DistributedDataParallel(model), sharing
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule) and isinstance(next(model.parameters()), DTensor)
    return model, sharing


def my_batch():
    ids, mask = awkward_batch()
    part = slice(0, 6) if dist.get_rank() == 0 else slice(6, 10)
    return ids[part], mask[part]


def one_pass(model, sharing, batch=None, scored_BC=None):
    ids, mask = my_batch() if batch is None else batch
    request = PassRequest(Kind.POLICY, model, scored_BC=scored_BC).on(ids, mask, COMPLETION)
    return sharing.log_probs(
        request, lambda request: (*stock_log_probs(model, request.input_ids, request.attention_mask), None)
    ).values[0]


def gradients(model):
    found = [p.grad for p in model.parameters()]
    return [None if g is None else (g.full_tensor() if isinstance(g, DTensor) else g).clone() for g in found]


@contextmanager
def planted(attend):
    original, cascade.attend = cascade.attend, attend
    try:
        yield original
    finally:
        cascade.attend = original


def assert_right(model, sharing, logps, expected, expected_gradients):
    torch.testing.assert_close(logps, expected, atol=2e-5, rtol=1e-5)
    logps.sum().backward()
    for found, reference in zip(gradients(model), expected_gradients, strict=True):
        torch.testing.assert_close(found, reference, atol=1e-4, rtol=1e-4)


def reference(wrapper):
    model, _ = wrapped(wrapper, "off")
    expected = stock_log_probs(model, *my_batch())[0]
    expected.sum().backward()
    return expected.detach(), gradients(model)


def check_leaves_nothing(wrapper, expected, expected_gradients):
    model, sharing = wrapped(wrapper)
    logps = one_pass(model, sharing)
    assert sharing.active(), sharing.describe()
    assert gradients(model) == [None] * len(expected_gradients)
    assert_right(model, sharing, logps, expected, expected_gradients)


def check_between_micro_batches(wrapper, expected, expected_gradients):
    """The first of two micro-batches is not reduced by itself."""
    model, sharing = wrapped(wrapper)
    for last in (False, True):
        if wrapper == "fsdp2":
            model.set_requires_gradient_sync(last)
        else:
            model.require_backward_grad_sync = last
        one_pass(model, sharing).sum().backward()
    assert sharing.active()
    for found, wanted in zip(gradients(model), expected_gradients, strict=True):
        torch.testing.assert_close(found, 2 * wanted, atol=2e-4, rtol=1e-4)


def kernel_error_on_one_rank_in_the_first_comparison(wrapper, expected, expected_gradients):
    model, sharing = wrapped(wrapper)

    def attend(call):
        if dist.get_rank() == 1 and call.module.layer_idx == 0:
            raise RuntimeError("no kernel for this size")
        return original(call)

    with planted(attend) as original:
        logps = one_pass(model, sharing)
    assert ("no kernel for this size" if dist.get_rank() else "another rank") in sharing.describe()
    assert_right(model, sharing, logps, expected, expected_gradients)


def unpackable_batch_on_one_rank(wrapper, expected, expected_gradients):
    """In the comparison and later: that rank runs padded, the other one packed."""
    model, sharing = wrapped(wrapper)
    ids, mask = my_batch()
    if dist.get_rank() == 1:
        mask = mask.clone()
        mask[0, -COMPLETION + 2] = 0
    for _ in range(2):
        logps = one_pass(model, sharing, (ids, mask))
        assert sharing.active() and sharing._states["policy"].checked
        torch.testing.assert_close(logps, stock_log_probs(model, ids, mask)[0], atol=2e-5, rtol=1e-5)
        logps.sum().backward()


def wrong_gradient_on_one_rank(wrapper, expected, expected_gradients):
    model, sharing = wrapped(wrapper)

    def attend(call):
        if dist.get_rank() == 1:
            call.value = 2 * call.value.detach() - call.value
        return original(call)

    with planted(attend) as original:
        logps = one_pass(model, sharing)
    assert not sharing.active()
    assert_right(model, sharing, logps, expected, expected_gradients)


def error_outside_of_attention(wrapper, expected, expected_gradients):
    model, sharing = wrapped(wrapper)
    layer = (model.module if wrapper == "ddp" else model).model.layers[1].mlp
    forward = layer.forward

    def mlp(x):
        if x.shape[0] == 1:
            raise TypeError("rows of this kind are not for me")
        return forward(x)

    layer.forward = mlp
    logps = one_pass(model, sharing)
    assert "rows of this kind" in sharing.describe()
    assert_right(model, sharing, logps, expected, expected_gradients)


def nothing_to_score_on_one_rank_at_first(wrapper, expected, expected_gradients):
    """Both ranks count the first pass as compared: a rank that compared again in the next one would be alone."""
    model, sharing = wrapped(wrapper)
    mine = my_batch()[1][:, -COMPLETION:].bool()
    one_pass(model, sharing, scored_BC=mine & (dist.get_rank() == 0)).sum().backward()
    model.zero_grad()
    logps = one_pass(model, sharing)
    assert sharing.active(), sharing.describe()
    assert_right(model, sharing, logps, expected, expected_gradients)


def fewer_rows_on_one_rank(wrapper, expected, expected_gradients):
    """The comparison goes row by row, and a forward of a sharded model is one of all ranks."""
    model, sharing = wrapped(wrapper)
    ids, mask = my_batch()
    rows = 4 if dist.get_rank() == 0 else 2
    one_pass(model, sharing, (ids[:rows], mask[:rows])).sum().backward()
    model.zero_grad()
    assert sharing.active(), sharing.describe()
    assert_right(model, sharing, one_pass(model, sharing), expected, expected_gradients)


SCENARIOS = (
    check_leaves_nothing,
    check_between_micro_batches,
    kernel_error_on_one_rank_in_the_first_comparison,
    unpackable_batch_on_one_rank,
    wrong_gradient_on_one_rank,
    error_outside_of_attention,
    nothing_to_score_on_one_rank_at_first,
    fewer_rows_on_one_rank,
)


def main(wrapper: str) -> None:
    dist.init_process_group("gloo")
    expected = reference(wrapper)
    for scenario in SCENARIOS:
        print(scenario.__name__, flush=True)
        scenario(wrapper, *expected)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
