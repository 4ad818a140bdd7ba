"""Run by test_ranks.py in two processes, under DDP and FSDP2; compared with the results of one
process.
"""

import sys
from itertools import product
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.prefix_sharing import test_images
from tests.prefix_sharing.helpers import (
    COMPLETION,
    assert_equal_gradients,
    awkward_batch,
    build,
    closed,
    completion_labels,
    gradients,
    one_pass,
    prepared,
    stock_log_probs,
    with_stock_head,
)
from trl_fsdp_qlora.prefix_sharing.attention import cascade
from trl_fsdp_qlora.prefix_sharing.recurrent.known_layers import recurrent_layers
from trl_fsdp_qlora.prefix_sharing.status import Scope


def wrapped(wrapper, model):
    if wrapper == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)  # as transformers' Trainer does
    mesh = init_device_mesh("cpu", (2,))
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[0].endswith(("layers", "blocks")):
            fully_shard(module, mesh=mesh)
    model = fully_shard(model, mesh=mesh)
    assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters() if p.ndim > 1)
    return model


def whole(model):
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients(model)]


# --- what only rank 1 meets, both answer alike -----------------------------------------------------------------------


class Scene:
    """A model under a wrapper that both ranks have alike; six rows of two groups on one, four that hardly share on the
    other.
    """

    def __init__(self, wrapper, name, choice="auto"):
        self.wrapper = wrapper
        self.base = build(name)
        reference = with_stock_head(build(name))
        self.sharing = prepared(self.base, choice)
        self.model = wrapped(wrapper, self.base)
        mine = slice(0, 6) if dist.get_rank() == 0 else slice(6, 10)
        self.batch = tuple(x[mine] for x in awkward_batch())
        expected = stock_log_probs(reference, *awkward_batch())[0]
        (expected.sum() / 2).backward()  # ranks are averaged
        self.expected = expected[mine].detach()
        self.gradients = gradients(reference)

    def run(self, batch=None, **options):
        return one_pass(self.model, self.sharing, batch or self.batch, **options).logps_BC

    def run_alone(self, batch=None):
        """As a trainer that knows nothing of prompt sharing."""
        ids, mask = batch or self.batch
        labels = completion_labels(ids, mask)
        output = self.model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return output.log_probs[:, -COMPLETION:]

    def assert_right(self, logps):
        torch.testing.assert_close(logps, self.expected, atol=2e-5, rtol=1e-5)
        logps.sum().backward()
        assert_equal_gradients(whole(self.model), self.gradients)


def comparing_leaves_nothing(scene):
    logps = scene.run()
    assert scene.sharing.status.packs and all(p.grad is None for p in scene.model.parameters())
    scene.assert_right(logps)


def an_old_policy_pass_is_cut_differently_on_each_rank(scene):
    with torch.no_grad():
        old = scene.run(tokens_per_pass=2 * scene.batch[0].shape[1])
    torch.testing.assert_close(old, scene.expected, atol=2e-5, rtol=1e-5)
    scene.assert_right(scene.run())
    assert scene.sharing.status.packs


def between_micro_batches(scene):
    """The first of two micro-batches is not reduced by itself."""
    for last in (False, True):
        if scene.wrapper == "fsdp2":
            scene.model.set_requires_gradient_sync(last)
        else:
            scene.model.require_backward_grad_sync = last
        scene.run().sum().backward()
    assert scene.sharing.status.packs
    assert_equal_gradients(whole(scene.model), [2 * gradient for gradient in scene.gradients])


def a_kernel_error_on_one_rank(scene):
    def attend(call):
        if dist.get_rank() == 1 and call.module.layer_idx == 0:
            raise RuntimeError("no kernel for this size")
        return original(call)

    original = cascade.attend
    with mock.patch.object(cascade, "attend", attend):
        logps = scene.run()
    assert not scene.sharing.status.packs
    assert ("no kernel for this size" in scene.sharing.describe()) == (dist.get_rank() == 1)
    scene.assert_right(logps)


def an_unpackable_batch_on_one_rank(scene):
    """That rank runs padded, the other one packed."""
    scene.run().sum().backward()
    scene.model.zero_grad()
    ids, mask = (x.clone() for x in scene.batch)
    if dist.get_rank() == 1:
        mask[0, -COMPLETION + 2] = 0
    for _ in range(2):
        logps = scene.run((ids, mask))
        assert scene.sharing.status.packs and scene.sharing.status.compared
        assert bool(scene.sharing.figures.tokens) == (dist.get_rank() == 0)
        with closed(scene.sharing):
            stock = stock_log_probs(scene.model, ids, mask)[0]
        torch.testing.assert_close(logps, stock, atol=2e-5, rtol=1e-5)
        logps.sum().backward()


def an_unpackable_batch_on_one_rank_in_passes(scene):
    """Then no rank packs: they meet in as many forwards of stock's."""
    ids, mask = (x.clone() for x in scene.batch)
    if dist.get_rank() == 1:
        mask[0, -COMPLETION + 2] = 0
    with torch.no_grad():
        logps = scene.run((ids, mask), tokens_per_pass=6 * ids.shape[1])
        assert scene.sharing.status.packs and not scene.sharing.figures.tokens
        with closed(scene.sharing):
            stock = stock_log_probs(scene.model, ids, mask)[0]
    torch.testing.assert_close(logps, stock, atol=2e-5, rtol=1e-5)
    scene.assert_right(scene.run())


def no_trainer_compares(scene):
    """`share_prompts` alone: prompt sharing compares from inside the forward."""
    logps = scene.run_alone()
    assert scene.sharing.status.packs and scene.sharing.status.compared and scene.sharing.figures.tokens
    assert all(p.grad is None for p in scene.model.parameters())
    scene.assert_right(logps)
    scene.assert_right(scene.run_alone())


def no_trainer_compares_and_one_rank_cannot_pack(scene):
    """A rank that compared by itself would wait for the other one."""
    ids, mask = (x.clone() for x in scene.batch)
    if dist.get_rank() == 1:
        mask[0, -COMPLETION + 2] = 0
    for _ in range(2):
        logps = scene.run_alone((ids, mask))
        with closed(scene.sharing):
            stock = stock_log_probs(scene.model, ids, mask)[0]
        torch.testing.assert_close(logps, stock, atol=2e-5, rtol=1e-5)
        logps.sum().backward()
        scene.model.zero_grad()
    scene.assert_right(scene.run_alone())
    assert scene.sharing.status.packs and scene.sharing.status.compared and scene.sharing.figures.tokens


def a_hook_on_one_rank_after_the_comparison(scene):
    """A comparison would wait for the other rank: the rank with the hook runs padded until it is taken off."""
    scene.assert_right(scene.run())
    handle = None
    if dist.get_rank() == 1:
        handle = scene.base.model.layers[0].register_forward_hook(lambda module, args, output: output)
    for _ in range(2):
        scene.assert_right(scene.run())
        assert bool(scene.sharing.figures.tokens) == (handle is None)
    if handle is not None:
        handle.remove()
    scene.assert_right(scene.run())
    assert scene.sharing.figures.tokens


def no_trainer_compares_and_one_rank_is_wrong(scene):
    def attend(call):
        return original(call) * (1 + 0.2 * dist.get_rank())

    original = cascade.attend
    with mock.patch.object(cascade, "attend", attend):
        logps = scene.run_alone()
        # Ranks that each have the whole model judge alone.
        assert scene.sharing.status.packs == (scene.wrapper == "ddp" and dist.get_rank() == 0)
        scene.assert_right(logps)


def a_wrong_gradient_on_one_rank(scene):
    """Of a sharded model values alone are compared."""
    if scene.wrapper == "fsdp2":
        return

    def attend(call):
        if dist.get_rank() == 1:
            call.value = 2 * call.value.detach() - call.value
        return original(call)

    original = cascade.attend
    with mock.patch.object(cascade, "attend", attend):
        logps = scene.run()
    assert not scene.sharing.status.packs
    scene.assert_right(logps)


def an_error_outside_of_attention(scene):
    mlp = scene.base.model.layers[1].mlp
    forward = mlp.forward

    def refuses(x):
        if x.shape[1] > scene.batch[0].shape[1]:  # a packed row
            raise TypeError("rows of this kind are not for me")
        return forward(x)

    mlp.forward = refuses
    logps = scene.run()
    assert "rows of this kind" in scene.sharing.describe()
    scene.assert_right(logps)


def nothing_to_score_on_one_rank_at_first(scene):
    """Nothing is compared before both ranks have something to compare."""
    scene.run(scored_BC=scene.batch[1][:, -COMPLETION:].bool() & (dist.get_rank() == 0)).sum().backward()
    scene.model.zero_grad()
    assert scene.sharing.status.packs, scene.sharing.describe()
    scene.assert_right(scene.run())


def fewer_rows_on_one_rank_at_first(scene):
    scene.run(tuple(x[: 4 - 2 * dist.get_rank()] for x in scene.batch)).sum().backward()
    scene.model.zero_grad()
    scene.assert_right(scene.run())


def wrapped_below_a_recurrent_layer() -> None:
    """By FSDP1 or FSDP2: weights are gathered in each call of the layer, and ranks call it differently often."""
    mesh = init_device_mesh("cpu", (2,))
    for wrapper in ("fsdp1", "fsdp2"):
        scene = Scene("ddp", "qwen3_5")
        scene.model = scene.base
        for layer in recurrent_layers(scene.base):
            if wrapper == "fsdp2":
                fully_shard(layer.out_proj, mesh=mesh)
            else:
                layer.out_proj = FullyShardedDataParallel(
                    layer.out_proj, use_orig_params=True, device_id=torch.device("cpu")
                )
        logps = scene.run()
        torch.testing.assert_close(logps, scene.expected, atol=2e-5, rtol=1e-5)
        assert not scene.sharing.status.packs, wrapper


EVERY = (comparing_leaves_nothing, an_old_policy_pass_is_cut_differently_on_each_rank, no_trainer_compares)
ATTENTION = (
    between_micro_batches, a_kernel_error_on_one_rank, an_unpackable_batch_on_one_rank, a_wrong_gradient_on_one_rank,
    an_error_outside_of_attention, nothing_to_score_on_one_rank_at_first, fewer_rows_on_one_rank_at_first,
    an_unpackable_batch_on_one_rank_in_passes, no_trainer_compares_and_one_rank_cannot_pack,
    no_trainer_compares_and_one_rank_is_wrong, a_hook_on_one_rank_after_the_comparison,
)  # fmt: skip


def text() -> None:
    for wrapper, name in (("ddp", "qwen3"), ("fsdp2", "qwen3"), ("fsdp2", "qwen3_5"), ("fsdp2", "falcon_h1")):
        for scenario in EVERY + ATTENTION * (name == "qwen3"):
            print(wrapper, name, scenario.__name__, flush=True)
            scenario(Scene(wrapper, name))
            dist.barrier()
    wrapped_below_a_recurrent_layer()


# --- prompts with images on both ranks, and on one of them only ------------------------------------------------------

# Of with_images(): rows 5 and 6 are a prompt without an image. The ranks' rows of each pass, in turn.
TEXT = [5, 6, 5, 6]
PASSES = {
    "both": [(range(5), range(7, 11))],
    "one rank first": [(TEXT, range(4)), (range(5), TEXT), (range(5, 9), range(5))],
    "text first": [(TEXT, TEXT), (TEXT, range(7, 11))],
}


def images() -> None:
    for (name, wrapper), frozen, title in product((("llava", "ddp"), ("qwen3_vl", "fsdp2")), (False, True), PASSES):
        print(name, wrapper, title, "frozen" if frozen else "trained", flush=True)
        equals_one_process(name, wrapper, frozen, PASSES[title])
        dist.barrier()


def equals_one_process(name, wrapper, frozen, passes):
    model, batch = test_images.with_images(name)
    reference, _ = test_images.with_images(name)
    for one in (model, reference) if frozen else ():
        test_images.freeze_tower(one)
    weight = torch.randn(len(batch.input_ids), test_images.COMPLETION, generator=torch.Generator().manual_seed(5))
    with_stock_head(reference)
    sharing = prepared(model)
    model = wrapped(wrapper, model)
    for parts in passes:
        expected = [test_images.stock(reference, batch.rows(np.array(part))).log_probs for part in parts]
        expected = [x[:, -test_images.COMPLETION :] for x in expected]
        # Ranks are averaged.
        sum((x * weight[list(part)]).sum() / 2 for x, part in zip(expected, parts, strict=True)).backward()
        mine = list(parts[dist.get_rank()])
        few = batch.rows(np.array(mine))
        with torch.no_grad():
            old = test_images.packed(model, sharing, few, tokens_per_pass=2 * few.input_ids.shape[1]).log_probs
        logps = test_images.packed(model, sharing, few).log_probs[:, -test_images.COMPLETION :]
        assert sharing.figures.tokens and sharing.status.reason(Scope.IMAGES) is None, sharing.status.reason(
            Scope.IMAGES
        )
        for ours in (old[:, -test_images.COMPLETION :], logps):
            torch.testing.assert_close(ours, expected[dist.get_rank()].detach(), atol=1e-4, rtol=1e-5)
        (logps * weight[mine]).sum().backward()
        assert_equal_gradients(whole(model), gradients(reference), tolerance=2e-5)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"text": text, "images": images}[sys.argv[1]]()
    dist.destroy_process_group()
