"""Linear layers from copies in oneDNN's order: the same outputs, and nothing left behind."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.rollout.test_decoding import PROMPTS, build, greedy
from trl_fsdp_qlora.rollout import decoding_weights
from trl_fsdp_qlora.rollout.completions import complete
from trl_fsdp_qlora.rollout.decoding_weights import copied_weights, copyable
from trl_fsdp_qlora.upstream import onednn

pytestmark = pytest.mark.skipif(onednn.misfit() is not None, reason=str(onednn.misfit()))
# Sums of up to 48 products in another order, through four layers: logits of about 5 move by some units in the last
# place (6e-7 each). A wrong adapter or layer moves them by tenths.
ROUNDING = 2e-5
LAYERS = 4 * 7 + 1


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
    from transformers import AutoModelForCausalLM, Qwen2Config

    from tests.rollout.test_decoding import SIZES

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).float().eval()
    for parameter in (p for name, p in model.named_parameters() if name.endswith("bias")):
        nn.init.normal_(parameter)
    return model


def both(model) -> tuple[torch.Tensor, torch.Tensor, decoding_weights.Copies]:
    ids = torch.tensor([[20, 21, 22, 23], [30, 31, 32, 33]])
    with torch.no_grad():
        expected = model(ids).logits
        with copied_weights(model, 2) as copies:
            found = model(ids).logits
    return found, expected, copies


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (build, LAYERS),
        (with_bias, LAYERS),
        (adapted, LAYERS),
        (lambda: adapted(target_modules=["q_proj", "down_proj"], use_rslora=True), LAYERS),
        (with_adapter_off, LAYERS),
        (merged, LAYERS),
        (lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]), LAYERS - 1),
    ],
    ids=["full", "bias", "lora", "some layers", "adapter off", "merged", "modules_to_save"],
)
def test_outputs_are_the_layers_own(make, layers):
    model = make()
    found, expected, copies = both(model)
    assert (copies.layers, copies.reason) == (layers, None)
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)
    if isinstance(model, nn.Module) and make is adapted:
        with model.disable_adapter(), torch.no_grad():
            base = model(torch.tensor([[20, 21, 22, 23]])).logits
        assert (base - found[:1]).abs().max() > 100 * ROUNDING  # the adapter does count


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
    ("make", "kept"),
    [
        (lambda: adapted(use_dora=True), 1),
        (lambda: adapted(lora_bias=True), 1),
        (two_adapters, 1),
        (with_dropout, 1),
        (hooked, 0),
        (lambda: build().to(torch.bfloat16), 0),
    ],
    ids=["dora", "lora_bias", "two adapters", "dropout", "hooks", "bfloat16"],
)
def test_what_is_not_a_plain_product_runs_as_before(make, kept):
    """`kept`: the head, which the adapter leaves alone."""
    model = make()
    assert copyable(model).layers == kept
    torch.manual_seed(3)
    with torch.no_grad():
        expected = model(torch.tensor([[20, 21]])).logits
        torch.manual_seed(3)
        with copied_weights(model, 1):
            found = model(torch.tensor([[20, 21]])).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


def test_four_bit_layers_run_as_before():
    bnb = pytest.importorskip("bitsandbytes")
    model = build()
    for layer in model.model.layers:
        layer.mlp.down_proj = bnb.nn.Linear4bit(48, 32, bias=False, compute_dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))
    assert copyable(model).layers == LAYERS - 4


def test_autocast_runs_as_before():
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        assert copyable(model).reason == "autocast"
        found, expected, copies = both(model)
    assert copies.layers == 0 and torch.equal(found, expected)
    # Switched on inside the model's forward, as accelerate does it.
    with torch.no_grad(), copied_weights(model, 1), torch.autocast("cpu", torch.bfloat16):
        assert model(torch.tensor([[20, 21]])).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = adapted()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    try:
        with copied_weights(model, 2):
            assert any("forward" in vars(module) for module in model.modules())
            if fails:
                raise OSError
    except OSError:
        assert fails
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_an_error_while_copying_leaves_nothing_behind(monkeypatch):
    model, made = build(), []

    def reordered(weight, rows):
        made.append(weight)
        if len(made) == 3:
            raise MemoryError
        return weight

    monkeypatch.setattr(onednn, "reordered", reordered)
    with pytest.raises(MemoryError), copied_weights(model, 2):
        pass
    assert not any("forward" in vars(module) for module in model.modules())


def test_copies_are_made_anew_for_changed_weights():
    model = adapted()
    first, _ = complete(model, PROMPTS, greedy())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-2)
    second, _ = complete(model, PROMPTS, greedy())
    assert second == complete(model, PROMPTS, greedy(), compact=False)[0]
    assert second != first


def test_copies_stay_within_their_share_of_the_memory(monkeypatch):
    model = build()
    head = model.lm_head.weight.nbytes
    monkeypatch.setattr(decoding_weights, "free_bytes", lambda _: head / decoding_weights.MEMORY_SHARE)
    copies = copyable(model)
    assert (copies.layers, copies.bytes) == (1, head)  # the largest is the first
    monkeypatch.setattr(decoding_weights, "free_bytes", lambda _: 0)
    assert "no room" in copyable(model).describe()
    assert both(model)[2].bytes == 0


def test_without_onednn_layers_are_as_they_are(monkeypatch):
    monkeypatch.setattr(onednn, "misfit", lambda: "torch runs without oneDNN")
    assert copyable(build()).describe() == "weights as they are (torch runs without oneDNN)"
