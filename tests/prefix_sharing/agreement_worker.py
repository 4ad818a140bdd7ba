"""Run by test_self_check.py in two processes, under DDP or FSDP2: what only rank 1 meets, both answer alike; against one process."""

import sys
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.prefix_sharing.helpers import (
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
from trl_fsdp_qlora.prefix_sharing import PrefixSharing, cascade
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

WRAPPER, NAME = sys.argv[1:]


def small_model():
    return with_stock_head(build(SUPPORTED.get(NAME) or RECURRENT[NAME][0]), temperature=1.0)


def wrapped():
    model = small_model()
    sharing = PrefixSharing()
    sharing.prepare("policy", model)
    if WRAPPER == "ddp":
        return DistributedDataParallel(model), sharing
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters() if p.ndim > 1)
    return model, sharing


def mine() -> slice:
    """Six rows of two groups, or four that hardly share."""
    return slice(0, 6) if dist.get_rank() == 0 else slice(6, 10)


def my_batch():
    ids, mask = awkward_batch()
    return ids[mine()], mask[mine()]


def one_pass(model, sharing, batch=None, scored_BC=None, **changes):
    ids, mask = my_batch() if batch is None else batch
    request = PassRequest(Kind.POLICY, model, scored_BC=scored_BC).on(ids, mask, COMPLETION)
    return sharing.log_probs(
        replace(request, **changes), lambda few: (*stock_log_probs(model, few.input_ids, few.attention_mask), None)
    ).values[0]


def whole(model):
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients(model)]


@contextmanager
def planted(attend):
    original, cascade.attend = cascade.attend, attend
    try:
        yield original
    finally:
        cascade.attend = original


def assert_right(model, logps, expected, expected_gradients):
    torch.testing.assert_close(logps, expected, atol=2e-5, rtol=1e-5)
    logps.sum().backward()
    assert_equal_gradients(whole(model), expected_gradients)


def comparing_leaves_nothing(expected, expected_gradients):
    model, sharing = wrapped()
    logps = one_pass(model, sharing)
    assert sharing.active(), sharing.describe()
    assert all(p.grad is None for p in model.parameters())
    assert_right(model, logps, expected, expected_gradients)


def an_old_policy_pass_is_cut_differently_on_each_rank(expected, expected_gradients):
    model, sharing = wrapped()
    with torch.no_grad():
        old = one_pass(model, sharing, kind=Kind.OLD, batch_size=2)
    torch.testing.assert_close(old, expected, atol=2e-5, rtol=1e-5)
    assert_right(model, one_pass(model, sharing), expected, expected_gradients)
    assert sharing.active()


def between_micro_batches(expected, expected_gradients):
    """The first of two micro-batches is not reduced by itself."""
    model, sharing = wrapped()
    for last in (False, True):
        if WRAPPER == "fsdp2":
            model.set_requires_gradient_sync(last)
        else:
            model.require_backward_grad_sync = last
        one_pass(model, sharing).sum().backward()
    assert sharing.active()
    assert_equal_gradients(whole(model), [2 * gradient for gradient in expected_gradients])


def a_kernel_error_on_one_rank(expected, expected_gradients):
    model, sharing = wrapped()

    def attend(call):
        if dist.get_rank() == 1 and call.module.layer_idx == 0:
            raise RuntimeError("no kernel for this size")
        return original(call)

    with planted(attend) as original:
        logps = one_pass(model, sharing)
    assert ("no kernel for this size" if dist.get_rank() else "another rank") in sharing.describe()
    assert_right(model, logps, expected, expected_gradients)


def an_unpackable_batch_on_one_rank(expected, expected_gradients):
    """In the comparison and later: that rank runs padded, the other one packed."""
    model, sharing = wrapped()
    ids, mask = my_batch()
    if dist.get_rank() == 1:
        mask = mask.clone()
        mask[0, -COMPLETION + 2] = 0
    for _ in range(2):
        logps = one_pass(model, sharing, (ids, mask))
        assert sharing.active() and sharing._models["policy"].checked
        torch.testing.assert_close(logps, stock_log_probs(model, ids, mask)[0], atol=2e-5, rtol=1e-5)
        logps.sum().backward()


def a_wrong_gradient_on_one_rank(expected, expected_gradients):
    model, sharing = wrapped()

    def attend(call):
        if dist.get_rank() == 1:
            call.value = 2 * call.value.detach() - call.value
        return original(call)

    with planted(attend) as original:
        logps = one_pass(model, sharing)
    assert not sharing.active()
    assert_right(model, logps, expected, expected_gradients)


def an_error_outside_of_attention(expected, expected_gradients):
    model, sharing = wrapped()
    layer = (model.module if WRAPPER == "ddp" else model).model.layers[1].mlp
    forward = layer.forward

    def mlp(x):
        if x.shape[0] == 1:
            raise TypeError("rows of this kind are not for me")
        return forward(x)

    layer.forward = mlp
    logps = one_pass(model, sharing)
    assert "rows of this kind" in sharing.describe()
    assert_right(model, logps, expected, expected_gradients)


def nothing_to_score_or_fewer_rows_on_one_rank_at_first(expected, expected_gradients):
    """Both ranks count the first pass as compared, row by row: a rank that did something else would be alone."""
    ids, mask = my_batch()
    rows = 4 if dist.get_rank() == 0 else 2
    scored_BC = mask[:, -COMPLETION:].bool() & (dist.get_rank() == 0)
    for batch, scored in (((ids, mask), scored_BC), ((ids[:rows], mask[:rows]), None)):
        model, sharing = wrapped()
        one_pass(model, sharing, batch, scored).sum().backward()
        model.zero_grad()
        assert sharing.active(), sharing.describe()
        assert_right(model, one_pass(model, sharing), expected, expected_gradients)


SCENARIOS = (
    an_old_policy_pass_is_cut_differently_on_each_rank,
    comparing_leaves_nothing,
    between_micro_batches,
    a_kernel_error_on_one_rank,
    an_unpackable_batch_on_one_rank,
    a_wrong_gradient_on_one_rank,
    an_error_outside_of_attention,
    nothing_to_score_or_fewer_rows_on_one_rank_at_first,
)


def main() -> None:
    dist.init_process_group("gloo")
    reference = small_model()
    expected = stock_log_probs(reference, *awkward_batch())[0]
    (expected.sum() / 2).backward()  # ranks are averaged
    expected = expected[mine()].detach(), gradients(reference)
    for scenario in SCENARIOS if NAME in SUPPORTED else SCENARIOS[:2]:
        print(scenario.__name__, flush=True)
        scenario(*expected)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
