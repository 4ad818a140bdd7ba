"""Linear layers with their adapter and large ones computed faster: the same outputs, nothing left behind, no more memory."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from tests.rollout.test_decoding import PROMPTS, SIZES, build, greedy
from tests.tiny import serve_by_onednn
from trl_fsdp_qlora.rollout.completions import complete
from trl_fsdp_qlora.rollout.decoding_weights import FasterLayers, can_be_faster, faster_layers
from trl_fsdp_qlora.scoring import cpu_products
from trl_fsdp_qlora.scoring.cpu_products import faster_products

# Sums of up to 48 products in another order, through four layers: logits of about 5 move by some units in the last
# place (6e-7 each). A wrong adapter or layer moves them by tenths.
ROUNDING = 2e-5
LAYERS = 4 * 7


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The head's 64 x 32 weights are many, and the processor is one that oneDNN serves better."""
    serve_by_onednn(monkeypatch, 64 * 32)


def adapted(**changes):
    settings = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False, **changes}
    return get_peft_model(build(), LoraConfig(**settings)).eval()


def with_adapter_off():
    model = adapted()
    model.base_model.disable_adapter_layers()
    return model


def merged():
    model = adapted()
    model.merge_adapter()
    return model


def with_bias():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).float().eval()
    for parameter in (p for name, p in model.named_parameters() if name.endswith("bias")):
        nn.init.normal_(parameter)
    return model


def with_heads_bias():
    model = build()
    model.lm_head = nn.Linear(32, 64)
    return model


def both(model) -> tuple[torch.Tensor, torch.Tensor, FasterLayers]:
    ids = torch.tensor([[20, 21, 22, 23], [30, 31, 32, 33]])
    with torch.no_grad():
        expected = model(ids).logits
        with faster_layers(model) as faster:
            found = model(ids).logits
    return found, expected, faster


@pytest.mark.parametrize(
    ("make", "adapters", "products"),
    [
        (build, 0, 1),
        (with_bias, 0, 1),
        (with_heads_bias, 0, 1),
        (adapted, LAYERS, 1),
        (lambda: adapted(target_modules=["q_proj", "down_proj"], use_rslora=True), 8, 1),
        (lambda: adapted(target_modules=["lm_head"]), 1, 1),
        (with_adapter_off, 0, 1),
        (merged, 0, 1),
        (lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]), 4, 0),
    ],
    ids=["full", "bias", "head's bias", "lora", "some layers", "head", "adapter off", "merged", "modules_to_save"],
)
def test_outputs_are_the_layers_own(make, adapters, products):
    model = make()
    found, expected, faster = both(model)
    assert faster == FasterLayers(adapters, products)
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)
    if make is adapted:
        with model.disable_adapter(), torch.no_grad():
            base = model(torch.tensor([[20, 21, 22, 23]])).logits
        assert (base - found[:1]).abs().max() > 100 * ROUNDING  # the adapter does count


def test_where_torchs_own_product_is_as_good_only_adapters_are_faster(monkeypatch):
    monkeypatch.setattr(cpu_products, "beats_mkl", lambda: False)
    assert can_be_faster(adapted()) == FasterLayers(LAYERS, 0)
    assert can_be_faster(build()).reason is not None


def test_inside_a_step_that_multiplies_by_the_same_library():
    model = adapted()
    with faster_products(model) as count:
        during = {name: vars(module).get("forward") for name, module in model.named_modules()}
        found, expected, faster = both(model)
        assert count and faster == FasterLayers(LAYERS, 1)
        assert {name: vars(module).get("forward") for name, module in model.named_modules()} == during
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


def two_adapters():
    model = adapted()
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model


def with_dropout():
    model = adapted(lora_dropout=0.5).train()
    torch.manual_seed(3)
    return model


def hooked():
    model = build()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: adapted(use_dora=True),
        lambda: adapted(lora_bias=True),
        two_adapters,
        with_dropout,
        hooked,
        lambda: build().to(torch.bfloat16),
    ],
    ids=["dora", "lora_bias", "two adapters", "dropout", "hooks", "bfloat16"],
)
def test_what_is_not_a_plain_product_runs_as_before(make, monkeypatch):
    monkeypatch.setattr(cpu_products, "MANY_WEIGHTS", 2**16)  # the head, too
    model = make()
    assert can_be_faster(model).adapters == 0 and "no adapter" in can_be_faster(model).describe()
    torch.manual_seed(3)
    with torch.no_grad():
        expected = model(torch.tensor([[20, 21]])).logits
        torch.manual_seed(3)
        with faster_layers(model):
            found = model(torch.tensor([[20, 21]])).logits
    assert torch.equal(found, expected)


def test_four_bit_layers_run_as_before():
    bnb = pytest.importorskip("bitsandbytes")
    model = build()
    for layer in model.model.layers:
        layer.mlp.down_proj = bnb.nn.Linear4bit(48, 32, bias=False, compute_dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))
    assert can_be_faster(model).adapters == 0


def test_autocast_runs_as_before():
    model = adapted()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected, faster = both(model)
    assert faster.reason == "autocast" and torch.equal(found, expected)
    # Switched on inside the model's forward, as accelerate does it.
    with torch.no_grad(), faster_layers(model), torch.autocast("cpu", torch.bfloat16):
        assert model(torch.tensor([[20, 21]])).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = adapted()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    try:
        with faster_layers(model):
            assert any("forward" in vars(module) for module in model.modules())
            if fails:
                raise OSError
    except OSError:
        assert fails
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_changed_weights_count():
    model = adapted()
    first, _ = complete(model, PROMPTS, greedy())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-2)
    second, _ = complete(model, PROMPTS, greedy())
    assert second == complete(model, PROMPTS, greedy(), compact=False)[0]
    assert second != first


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
        settings = greedy(max_new_tokens=16, eos_token_id=ends)
        complete(model, [list(range(20, 60))] * 8, settings, compact=compact)

    ours, stock = (peak_bytes(lambda compact=compact: run(compact), tmp_path) for compact in (True, False))
    assert 0 < ours <= stock
