"""Faults planted in the packed pass, one of each kind, are caught; a right pass is not; nothing is left behind."""

import pytest
import torch
from peft import get_peft_model

from tests.tiny import lora
from trl_fsdp_qlora.prefix_sharing import PrefixSharing, cascade
from trl_fsdp_qlora.prefix_sharing.layout import PackedLayout
from trl_fsdp_qlora.prefix_sharing.self_check import GradientCheck, difference
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

from .helpers import COMPLETION, SUPPORTED, awkward_batch, build, make_batch, stock_log_probs, with_stock_head


def prepared(model=None, choice="auto"):
    model = with_stock_head(build(SUPPORTED["llama"]) if model is None else model)
    sharing = PrefixSharing(choice, temperature=0.9)
    sharing.prepare("policy", model)
    return model, sharing


def one_pass(model, sharing, batch=None, **asked):
    ids, mask = awkward_batch() if batch is None else batch
    request = PassRequest(Kind.POLICY, model, **asked).on(ids, mask, COMPLETION)
    calls = []

    def padded(request):
        calls.append(1)
        return *stock_log_probs(model, request.input_ids, request.attention_mask), None

    values, _ = sharing.log_probs(request, padded)
    return values[0], len(calls)


def shift_first_token(values_BC):
    return torch.cat([values_BC[:, 1:2], values_BC[:, 1:]], dim=1)


def drop_a_token(values_BC):
    keep = torch.ones_like(values_BC)
    keep[1, 0] = 0
    return values_BC * keep


def move_first_tokens(values_BC):
    moved = values_BC.clone()
    moved[:, 0] += 0.04 * (values_BC[:, 0] != 0)
    return moved


@pytest.mark.parametrize("fault", [shift_first_token, drop_a_token, move_first_tokens])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [True, False])
def test_faults_in_values_are_caught(fault, dtype, grad, monkeypatch):
    model, sharing = prepared(build(SUPPORTED["llama"]).to(dtype))
    scatter = PackedLayout.scatter
    monkeypatch.setattr(PackedLayout, "scatter", lambda self, values_N: fault(scatter(self, values_N)))
    with torch.set_grad_enabled(grad):
        one_pass(model, sharing)
    assert "difference in log-probability" in sharing.describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_rounding_alone_passes(family, dtype):
    model, sharing = prepared(build(SUPPORTED[family]).to(dtype))
    one_pass(model, sharing)
    assert sharing.active(), sharing.describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layout_taken_from_a_global_under_checkpointing_is_caught(reentrant, dtype, monkeypatch):
    """Right values, wrong gradients: when a layer is computed again during backward, the global is long gone."""
    model = build(SUPPORTED["llama"]).to(dtype)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model, sharing = prepared(model.train())
    attend = cascade.attend

    def from_a_global(call):
        if call.layout.is_computed:  # the forward is over
            alone = PackedLayout(**{**vars(call.layout), "cache": {}})
            alone.num_singles, alone.num_families = len(alone.lengths), 0
            alone.children_per_family = alone.children_per_family[:0]
            call.layout = alone
        return attend(call)

    monkeypatch.setattr(cascade, "attend", from_a_global)
    one_pass(model, sharing)
    if reentrant:
        assert "gradients differ" in sharing.describe()
    else:  # torch itself may notice that other tensors were saved; either way nobody trains on it
        assert not sharing.active()


def test_a_wrong_gradient_of_one_layer_is_caught(monkeypatch):
    model, sharing = prepared()
    attend = cascade.attend

    def without_gradient_of_values(call):
        call.value = call.value.detach() if call.module.layer_idx == 1 else call.value
        return attend(call)

    monkeypatch.setattr(cascade, "attend", without_gradient_of_values)
    one_pass(model, sharing)
    assert "gradients differ" in sharing.describe()


@pytest.mark.parametrize("adapter", [False, True])
def test_no_gradient_is_left_behind(adapter):
    base = with_stock_head(build(SUPPORTED["llama"]))
    model = get_peft_model(base, lora()) if adapter else base
    sharing = PrefixSharing(temperature=0.9)
    sharing.prepare("policy", model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = [parameter.grad for parameter in model.parameters()]
    one_pass(model, sharing)
    assert sharing.active()
    assert all(p.grad is g and (g is None or (g == 1).all()) for p, g in zip(model.parameters(), before, strict=True))


class Engine(torch.nn.Module):
    """Answers for the attributes of the model in it, as DeepSpeed's engine does, and has a backward of its own."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_gradients_are_left_alone_under_an_engine_with_its_own_backward(monkeypatch):
    base = with_stock_head(build(SUPPORTED["llama"]))
    model = get_peft_model(base, lora())
    sharing = PrefixSharing(temperature=0.9)
    sharing.prepare("policy", model)
    assert GradientCheck.possible(model) and Engine(model).peft_config
    assert not GradientCheck.possible(Engine(model))
    monkeypatch.setattr(torch.Tensor, "backward", None)
    one_pass(Engine(model), sharing)
    assert sharing.active()
    next(model.parameters()).ds_id = 0  # what ZeRO-3 puts on each parameter
    assert not GradientCheck.possible(model)


def test_each_set_of_backends_is_compared_once():
    """A window that reaches over the whole row cuts nothing: short rows take `cascade` alone, long ones `two_part` too."""
    model, sharing = prepared(build(SUPPORTED["qwen3_sliding"]))
    alone = make_batch([3, 2], [2, 2], prompt=3, completion=COMPLETION)
    narrow = (alone[0][:, : 3 + 3], alone[1][:, : 3 + 3])

    def compared(batch, width):
        ids, mask = batch
        request = PassRequest(Kind.POLICY, model).on(ids, mask, width)
        count = []

        def padded(request):
            count.append(1)
            return *stock_log_probs(model, request.input_ids, request.attention_mask, width), None

        sharing.log_probs(request, padded)
        return len(count)

    # Nothing shared and no window; the same again; a window and shared prompts; the same again.
    assert [compared(narrow, 3), compared(narrow, 3)] == [1, 0]
    assert [compared(awkward_batch(), COMPLETION), compared(awkward_batch(), COMPLETION)] == [1, 0]
    with torch.no_grad():
        assert compared(awkward_batch(), COMPLETION) == 0


def test_gradients_are_compared_though_values_were():
    model, sharing = prepared()
    with torch.no_grad():
        assert one_pass(model, sharing)[1] == 1
        assert one_pass(model, sharing)[1] == 0
    assert one_pass(model, sharing)[1] == 1
    assert one_pass(model, sharing)[1] == 0


def test_a_fault_in_a_backend_met_later_is_caught(monkeypatch):
    from trl_fsdp_qlora.prefix_sharing import two_part

    model, sharing = prepared(build(SUPPORTED["qwen3_sliding"]))
    ids, mask = make_batch([3, 2], [2, 2], prompt=3, completion=3)
    request = PassRequest(Kind.POLICY, model).on(ids, mask, 3)
    sharing.log_probs(
        request, lambda request: (*stock_log_probs(model, request.input_ids, request.attention_mask, 3), None)
    )
    assert sharing.active()
    attend = two_part.attend
    monkeypatch.setattr(two_part, "attend", lambda call: 0.9 * attend(call))
    values, _ = one_pass(model, sharing)
    assert not sharing.active()
    torch.testing.assert_close(values, stock_log_probs(model, *awkward_batch())[0])


def test_missing_values_and_first_tokens_by_hand():
    scored = torch.ones(4, 50, dtype=torch.bool)
    padded = -torch.rand(4, 50, generator=torch.Generator().manual_seed(0)) - 0.5
    noise = 0.01 * torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    assert difference(padded + noise, padded, scored, torch.bfloat16) is None
    assert difference(padded * 1, padded, scored, torch.float32) is None
    missing = padded.clone()
    missing[2, 7] = 0.0
    for dtype in (torch.float32, torch.bfloat16):  # one of two hundred, which no mean and no quantile shows
        assert "1 log-probabilities" in difference(missing, padded, scored, dtype)
    assert "largest" in difference(padded + noise, padded, scored, torch.float32)
    first = padded + noise
    first[:, 0] += 0.04
    assert "first tokens" in difference(first, padded, scored, torch.bfloat16)
    tail = padded + noise
    tail[:, ::8] += 0.3  # a mean of 0.04 nats
    assert "quantile" in difference(tail, padded, scored, torch.bfloat16)
    assert "not finite" in difference(padded * float("nan"), padded, scored, torch.float32)
    assert difference(missing, padded, scored & (missing != 0), torch.float32) is None
