"""Linear layers on a CPU: outputs and gradients compared with float64 and the layers' own, memory with stock's."""

import copy
import json
import pickle
import platform
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.engines.decode.test_decoding import SIZES, build, greedy
from tests.tiny import serve_by_onednn
from trl_fsdp_qlora import share_prompts, unshare_prompts
from trl_fsdp_qlora.engines.decode.completions import CompletionOptions, complete
from trl_fsdp_qlora.scoring import cpu_linear as cpu_linear
from trl_fsdp_qlora.scoring.cpu_linear import fast_linears

# Sums of up to 300 products of about one, in float32 and in any order: 20 units in the last place of a sum of about
# 20. A wrong adapter or layer moves logits by tenths.
ROUNDING = {"rtol": 0, "atol": 4e-5}


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Every layer counts as large, and the processor as one that oneDNN serves better."""
    serve_by_onednn(monkeypatch)


@pytest.fixture
def counted(monkeypatch):
    """A number for each product that oneDNN made."""
    calls = []
    product = cpu_linear.product

    def counted(*args):
        calls.append(1)
        return product(*args)

    monkeypatch.setattr(cpu_linear, "product", counted)
    return calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 300), (2, 3, 300), (0, 300), "strided"])
def test_outputs_and_gradients_are_those_of_float64(shape, bias, counted):
    torch.manual_seed(0)
    layer = nn.Linear(300, 70, bias=bias)
    if shape == "strided":
        x = torch.randn(300, 8, 3).permute(2, 1, 0)[:, ::2]
        grad = torch.randn(4, 3, 70).transpose(0, 1)
        layer.weight.data = layer.weight.data.t().contiguous().t()
    else:
        x = torch.randn(shape)
        grad = torch.randn(*shape[:-1], 70)
    x.requires_grad_()
    with fast_linears(layer):
        actual = layer(x)
        actual.backward(grad)
    assert len(counted) == 3
    exact = nn.Linear(300, 70, bias=bias).double()
    x64 = x.detach().double().requires_grad_()
    exact.load_state_dict(layer.state_dict())
    expected = exact(x64)
    expected.backward(grad.double())
    torch.testing.assert_close(actual.double(), expected, **ROUNDING)
    torch.testing.assert_close(x.grad.double(), x64.grad, **ROUNDING)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), exact.get_parameter(name).grad, **ROUNDING)


def test_other_dtypes_autocast_and_other_inputs_go_the_usual_way(counted):
    for layer in (nn.Linear(20, 30).bfloat16(), nn.Linear(20, 30).double()):
        x = torch.randn(4, 20, dtype=layer.weight.dtype)
        with fast_linears(layer):
            assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer = nn.Linear(20, 30)
    with fast_linears(layer):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(4, 20)).dtype == torch.bfloat16
        assert layer(torch.randn(20)).shape == (30,)
    assert not counted


def test_layers_of_other_models_and_the_class_keep_their_forward(counted):
    forward = nn.Linear.forward
    x = torch.randn(4, 20)
    layer = nn.Linear(20, 30)
    other = nn.Linear(20, 30)
    with fast_linears(layer):
        assert nn.Linear.forward is forward and "forward" not in vars(other)
        other(x)
        assert not counted
        with fast_linears(layer):
            layer(x)
        layer(x)
        assert len(counted) == 2
    assert "forward" not in vars(layer)


def test_a_forward_that_replaces_the_classs_later_is_called(counted, monkeypatch):
    layer = nn.Linear(20, 30)
    with fast_linears(layer):
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert layer("what is passed on") == "what is passed on"


def test_a_shared_model_uses_it_until_it_is_taken_back(counted):
    model = share_prompts(adapted())
    ids = torch.tensor([[20, 21, 22, 23], [30, 31, 32, 33]])
    model(ids)
    assert counted
    model = pickle.loads(pickle.dumps(copy.deepcopy(model.model.model.layers)))
    unshared = unshare_prompts(share_prompts(adapted()))
    assert not any(isinstance(x, nn.Linear) and "forward" in vars(x) for x in unshared.modules())
    calls = len(counted)
    unshared(ids)
    assert len(counted) == calls


@pytest.mark.parametrize(("vendor", "expected"), [("AuthenticAMD", True), ("GenuineIntel", False), (None, True)])
def test_which_processors_it_serves(vendor, expected, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(Path, "exists", lambda path: vendor is not None)
    monkeypatch.setattr(Path, "read_text", lambda path: f"vendor_id : {vendor}")
    monkeypatch.setattr(platform, "processor", lambda: "AMD64 Family 25 Model 33 Stepping 0, AuthenticAMD")
    assert cpu_linear.beats_mkl.__wrapped__() is expected


def adapted(**changes):
    settings = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **changes}
    return get_peft_model(build(), LoraConfig(**settings)).eval()


def four_bit():
    bnb = pytest.importorskip("bitsandbytes")
    model = build()
    for layer in model.model.layers:
        layer.mlp.down_proj = bnb.nn.Linear4bit(48, 32, bias=False, compute_dtype=torch.float32)
    return get_peft_model(model.to("cpu"), LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))


MODELS = {"full": build, "lora": adapted, "dora": lambda: adapted(use_dora=True), "4-bit": four_bit}


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_are_the_layers_own(kind, counted):
    model = MODELS[kind]()
    ids = torch.tensor([[20, 21, 22, 23], [30, 31, 32, 33]])
    with torch.no_grad():
        expected = model(ids).logits
        with fast_linears(model):
            actual = model(ids).logits
    assert counted
    torch.testing.assert_close(actual, expected, **ROUNDING)


def peak_bytes(run, folder) -> int:
    """Most bytes alive at once of what `run` allocates, which has to build its own model."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    alive = peak = 0
    for _, change in sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"):
        alive += change
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("ends", [[63], list(range(3, 40))], ids=["late", "early"])
def test_generation_takes_no_more_memory_than_stocks(ends, tmp_path):
    def run(compact):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SIZES, "hidden_size": 64})).float().eval()
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        complete(
            model,
            [list(range(20, 60))] * 8,
            greedy(max_new_tokens=12, eos_token_id=ends),
            CompletionOptions(compact=compact),
        )

    ours, stock = (peak_bytes(lambda compact=compact: run(compact), tmp_path) for compact in (True, False))
    assert 0 < ours <= stock


def test_no_weight_is_copied_per_row_of_a_batch_in_bfloat16():
    """The last hidden states of a prefill are a view; torch multiplies such a batch by a copy of the weight per
    row.
    """
    layer = nn.Linear(20, 30, bias=False).bfloat16().requires_grad_(False)
    last = torch.randn(4, 3, 20).bfloat16()[:, -1:]
    with fast_linears(layer), torch.no_grad(), torch.profiler.profile() as profile:
        out = layer(last)
    names = {event.key for event in profile.key_averages()}
    assert "aten::mm" in names and "aten::bmm" not in names
    torch.testing.assert_close(out, layer(last.contiguous()))
