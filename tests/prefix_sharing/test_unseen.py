"""Passes that nothing else sees have the gradients of an ordinary backward, and change nothing of the model."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trl_fsdp_qlora.prefix_sharing.unseen import Unseen


class Scaled(torch.autograd.Function):
    """Gets a parameter itself, as kernels of libraries do."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).sum(tuple(range(x.ndim - 1)))


class Recomputed(torch.autograd.Function):
    """A checkpoint of a library's own, which runs a backward inside of its backward."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


class Layers(nn.Module):
    """Linear layers, a function that takes a parameter itself, and a table whose rows are read twice."""

    def __init__(self, recompute):
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.dropout = nn.Dropout(0.5)
        self.recompute = recompute

    def layer(self, number, x):
        return Scaled.apply(self.dropout(torch.tanh(self.layers[number](x))), self.scale)

    def forward(self, ids):
        x = self.table(ids)
        for number in range(len(self.layers)):
            x = self.recompute(functools.partial(self.layer, number), x)
        return functional.linear(x, self.table.weight)


RECOMPUTE = {
    "kept": lambda run, x: run(x),
    "re-entrant": lambda run, x: checkpoint(run, x, use_reentrant=True),
    "not re-entrant": lambda run, x: checkpoint(run, x, use_reentrant=False),
    "nested": lambda run, x: checkpoint(lambda x: checkpoint(run, x, use_reentrant=True), x, use_reentrant=True),
    "a library's": lambda run, x: Recomputed.apply(run, x),
}


@pytest.mark.parametrize("name", RECOMPUTE)
def test_gradients_are_those_of_a_backward_and_leave_no_trace(name):
    """Without dropout, which draws nothing inside."""
    torch.manual_seed(0)
    model = Layers(RECOMPUTE[name]).train()
    ids = torch.randint(11, (4, 5))
    model.dropout.p = 0.0
    model(ids).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.dropout.p = 0.5
    seen = []
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
        parameter.register_post_accumulate_grad_hook(seen.append)
        if parameter is not model.scale:  # a hook of what a function takes itself would be called
            parameter.register_hook(seen.append)
    before = [(parameter.grad, parameter.grad._version) for parameter in model.parameters()]
    state = torch.get_rng_state()
    unseen = Unseen(model.parameters())
    with unseen:
        unseen.add_gradients(model(ids).square().sum())
        unseen.add_gradients(model(ids).square().sum())
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen
    for parameter, (gradient, version), twice in zip(model.parameters(), before, expected, strict=True):
        assert parameter.grad is gradient and gradient._version == version
        torch.testing.assert_close(unseen._sums[parameter], 2 * twice, atol=1e-5, rtol=1e-5)
    with unseen:
        unseen.add_gradients(-2 * model(ids).square().sum())
    largest = max(gradient.abs().max() for gradient in expected)
    assert unseen.squared_norm() ** 0.5 < 1e-5 * float(largest)


def test_a_comparison_calls_no_hook_of_a_parameter():
    model = Layers(RECOMPUTE["kept"])
    calls = []
    model.scale.register_hook(calls.append)
    unseen = Unseen(model.parameters())
    with unseen:
        unseen.add_gradients(model(torch.arange(5)).square().sum())
    assert not calls and model.scale not in unseen._sums
    assert model.layers[0].weight in unseen._sums


def test_what_is_drawn_in_training_is_the_same_in_each_pass():
    x = torch.randn(3, 4)
    with Unseen([]):
        assert functional.dropout(x, 0.5, training=True) is x
        assert nn.Dropout(0.9)(x) is x
        assert torch.equal(torch.empty(5).uniform_(0.9, 1.1), torch.ones(5))
        assert torch.equal(torch.empty(5).bernoulli_(0.3), torch.ones(5))
    assert not torch.equal(functional.dropout(x, 0.5, training=True), x)
