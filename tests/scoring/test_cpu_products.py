"""Products by oneDNN: outputs and gradients against float64, the same layers afterwards, and only where they serve."""

import platform
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import serve_by_onednn
from trl_fsdp_qlora.compat import onednn
from trl_fsdp_qlora.scoring import cpu_products
from trl_fsdp_qlora.scoring.cpu_products import faster_products, replaced_forward
from trl_fsdp_qlora.scoring.frozen_head import FrozenHeadLogProbFunction

# Sums of up to 300 products of about one, in float32 and in any order: 20 units in the last place of a sum of about 20.
ROUNDING = {"rtol": 0, "atol": 4e-5}


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Every layer counts as large, and the processor as one that oneDNN serves better."""
    serve_by_onednn(monkeypatch)


@pytest.fixture
def counted(monkeypatch):
    """Shapes that went to oneDNN, in order."""
    shapes = []

    def product(x, weight, bias=None):
        shapes.append((tuple(x.shape), tuple(weight.shape)))
        return onednn.product(x, weight, bias)

    monkeypatch.setattr(cpu_products, "product", product)
    return shapes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 300), (2, 3, 300), (0, 300), (1, 1, 300)])
def test_outputs_and_gradients_are_those_of_float64(shape, bias, counted):
    torch.manual_seed(0)
    layer = nn.Linear(300, 70, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    grad = torch.randn(*shape[:-1], 70)
    with faster_products(nn.Sequential(layer)) as count:
        found = layer(x)
        found.backward(grad)
    assert count == 1 and len(counted) == 3
    exact, x64 = nn.Linear(300, 70, bias=bias).double(), x.detach().double().requires_grad_()
    exact.load_state_dict(layer.state_dict())
    expected = exact(x64)
    expected.backward(grad.double())
    torch.testing.assert_close(found.double(), expected, **ROUNDING)
    torch.testing.assert_close(x.grad.double(), x64.grad, **ROUNDING)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), exact.get_parameter(name).grad, **ROUNDING)


def test_any_strides():
    torch.manual_seed(0)
    layer, x = nn.Linear(300, 70), torch.randn(300, 8, 3).permute(2, 1, 0)[:, ::2].requires_grad_()
    layer.weight.data = layer.weight.data.t().contiguous().t()
    with faster_products(nn.Sequential(layer)):
        found = layer(x)
        found.transpose(0, 1).sum(0).sum().backward()
    torch.testing.assert_close(found, nn.functional.linear(x, layer.weight, layer.bias), **ROUNDING)
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x), **ROUNDING)


@pytest.mark.parametrize(("trained", "with_grad", "products"), [(False, True, 2), (True, False, 2), (False, False, 1)])
def test_only_the_gradients_that_are_wanted(trained, with_grad, products, counted):
    layer, x = nn.Linear(20, 30).requires_grad_(trained), torch.randn(4, 20, requires_grad=with_grad)
    with faster_products(nn.Sequential(layer)):
        found = layer(x)
        if found.requires_grad:
            found.sum().backward()
    assert len(counted) == products
    assert (x.grad is not None) == with_grad and (layer.weight.grad is not None) == trained


def tiny():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes))
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()


def loss_and_gradient(model):
    model.zero_grad()
    ids = torch.arange(40).view(2, 20)
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpointed", "reentrant"])
def test_a_models_loss_and_gradient(reentrant, counted):
    model = tiny()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    expected = loss_and_gradient(model)
    assert not counted
    with faster_products(model) as count:
        found = loss_and_gradient(model)
    assert count == 2 * 7 * 3 + 1  # each layer's base, and its adapter's two; the head
    assert len(counted) > 2 * count  # forward and backward, twice forward where checkpointed
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6)


def test_the_frozen_heads_tiles(monkeypatch):
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(37, 24), torch.randn(150, 24), torch.randint(0, 150, (37,))
    calls = []
    product = onednn.product
    monkeypatch.setattr("trl_fsdp_qlora.scoring.frozen_head.product", lambda *args: calls.append(1) or product(*args))
    found = {}
    for name, serves in (("onednn", True), ("torch", False)):
        monkeypatch.setattr(cpu_products, "beats_mkl", lambda serves=serves: serves)
        x = hidden.clone().requires_grad_()
        log_probs, entropy = FrozenHeadLogProbFunction.apply(x, weight, None, targets, 0.7)
        log_probs.sum().backward()
        found[name] = log_probs.detach(), entropy.detach(), x.grad
    assert len(calls) == 2
    for mine, theirs in zip(found["onednn"], found["torch"], strict=True):
        torch.testing.assert_close(mine, theirs, **ROUNDING)


def with_own_forward():
    layer = nn.Linear(20, 30)
    layer.forward = lambda x: x
    return layer


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(20, 30).bfloat16(),
        lambda: nn.Linear(20, 30).double(),
        lambda: nn.Linear(20, 30, device="meta"),
        lambda: Doubled(20, 30),
        with_own_forward,
    ],
    ids=["bfloat16", "float64", "meta", "subclass", "own forward"],
)
def test_other_layers_stay(make):
    layer = make()
    before = dict(vars(layer))
    with faster_products(nn.Sequential(layer)) as count:
        assert count == 0 and vars(layer) == before


def test_a_model_on_another_device_is_not_walked(monkeypatch):
    """Every micro-batch asks, also on a GPU beside a processor that oneDNN serves."""
    model = nn.Sequential(nn.Linear(20, 30, device="meta"), nn.Linear(30, 20, device="meta"))
    monkeypatch.setattr(model, "modules", lambda: pytest.fail("walked"))
    with faster_products(model) as count:
        assert count == 0


def test_autocast_and_other_inputs_go_the_usual_way(counted):
    layer = nn.Linear(20, 30)
    with faster_products(nn.Sequential(layer)):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(4, 20)).dtype == torch.bfloat16
        assert layer(torch.randn(20)).shape == (30,)
    assert not counted


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    layer = nn.Linear(20, 30)
    before = dict(vars(layer))
    try:
        with faster_products(nn.Sequential(layer)):
            assert "forward" in vars(layer) and replaced_forward(layer) is None
            if fails:
                raise OSError
    except OSError:
        assert fails
    assert vars(layer) == before


@pytest.mark.parametrize(("vendor", "expected"), [("AuthenticAMD", True), ("GenuineIntel", False), (None, True)])
def test_which_processors_it_serves(vendor, expected, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(Path, "exists", lambda path: vendor is not None)
    monkeypatch.setattr(Path, "read_text", lambda path: f"vendor_id : {vendor}")
    monkeypatch.setattr(platform, "processor", lambda: "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD")
    assert onednn.beats_mkl.__wrapped__() is expected
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not onednn.beats_mkl.__wrapped__()
