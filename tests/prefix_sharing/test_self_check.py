"""Faults planted in the packed pass, one of each kind, are caught; a right pass is not; nothing is left behind."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from torch.distributed.fsdp import FSDPModule

from tests.distributed.launch import launch
from tests.tiny import lora
from trl_fsdp_qlora.prefix_sharing import PrefixSharing, cascade
from trl_fsdp_qlora.prefix_sharing.layout import PackedLayout
from trl_fsdp_qlora.prefix_sharing.self_check import (
    NOISE_PASSES,
    compares_gradients,
    moved,
    rounding_unit,
    statistics,
    verdict,
)
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
    moved[:, 0] += 0.1 * (values_BC[:, 0] != 0)  # seven times what rounding moves them in bfloat16
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
            alone.num_singles = len(alone.lengths)
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
    assert compares_gradients(model) and Engine(model).peft_config
    assert not compares_gradients(Engine(model))
    monkeypatch.setattr(torch.Tensor, "backward", None)
    one_pass(Engine(model), sharing)
    assert sharing.active()
    next(model.parameters()).ds_id = 0  # what ZeRO-3 puts on each parameter
    assert not compares_gradients(model)


def test_another_release_of_torch_compares_log_probabilities_alone_under_fsdp2(monkeypatch):
    """Where FSDP2's private parts differ, none of them is touched: this model has no state of FSDP2 at all."""
    model, sharing = prepared()
    model.__class__ = type("Sharded", (FSDPModule, type(model)), {})
    monkeypatch.setattr("trl_fsdp_qlora.prefix_sharing.self_check.misfit", lambda: "torch 9.9")
    found, padded = one_pass(model, sharing)
    torch.testing.assert_close(found, stock_log_probs(model, *awkward_batch())[0], atol=2e-5, rtol=1e-5)
    assert sharing.active() and padded == 4 and sharing._models["policy"].checked == {(False, False, False)}


def test_gradients_are_compared_though_values_were():
    model, sharing = prepared()
    rows = 4  # one padded pass for each row that is compared
    with torch.no_grad():
        assert one_pass(model, sharing)[1] == rows
        assert one_pass(model, sharing)[1] == 0
    assert one_pass(model, sharing)[1] == rows
    assert one_pass(model, sharing)[1] == 0


def test_equal_completions_of_one_token():
    """Yes/no answers: under signs of one and minus one the gradients of two equal rows cancelled to nothing."""
    for seed in range(8):
        model, sharing = prepared()
        ids, mask = make_batch([5, 5], [1, 1], seed=seed)
        ids[1] = ids[0]
        one_pass(model, sharing, (ids, mask))
        assert sharing.active(), sharing.describe()


def test_ten_thousand_healthy_starts_in_half_precision():
    """Real rounding of a model in bfloat16, resampled: eight completions of one token on each of one or eight ranks."""
    model, sharing = prepared(build(SUPPORTED["llama"]).to(torch.bfloat16))
    off, noise = [], []
    with torch.no_grad():
        for seed in range(30):
            ids, mask = make_batch([5, 5, 9, 9], [9, 9, 9, 9], seed=seed)
            request = PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION)
            packed = sharing._packed_sample(request)
            padded = stock_log_probs(model, ids, mask)[0]
            off.append((packed - padded).flatten())
            moves = []
            for move in range(NOISE_PASSES):
                with moved(model.get_input_embeddings(), rounding_unit(model, ids.device), move):
                    moves.append((stock_log_probs(model, ids, mask)[0] - padded).flatten())
            noise.append(torch.stack(moves))
    off, noise = torch.cat(off), torch.cat(noise, 1)
    assert off.abs().max() > 0.01  # there is something to explain
    draw = torch.Generator().manual_seed(0)
    for rows in (8, 64):
        for _ in range(10_000):
            mine = torch.randint(0, len(off), (rows, 1), generator=draw)
            zeros = torch.full(mine.shape, -1.0)
            found = statistics(zeros + off[mine], zeros, noise[:, mine], torch.ones_like(mine).bool())
            assert verdict(found, exact=False) is None


def test_rows_that_nothing_can_be_learnt_from_are_compared_too():
    model, sharing = prepared()
    one_pass(model, sharing, scored_BC=torch.zeros(10, COMPLETION, dtype=torch.bool))
    assert sharing._models["policy"].checked


def test_nothing_to_compare_is_no_comparison():
    model, sharing = prepared()
    ids, mask = awkward_batch()
    mask[:, -COMPLETION:] = 0
    one_pass(model, sharing, (ids, mask))
    assert sharing.active() and not sharing._models["policy"].checked


def test_what_fails_later_raises(monkeypatch):
    model, sharing = prepared()
    one_pass(model, sharing)

    def attend(call):
        raise RuntimeError("no kernel for this size")

    monkeypatch.setattr(cascade, "attend", attend)
    with pytest.raises(RuntimeError, match="no kernel for this size"):
        one_pass(model, sharing)


def judged(packed, padded, noise, exact=False, scored=None):
    scored = torch.ones_like(padded).bool() if scored is None else scored
    return verdict(statistics(packed, padded, noise, scored), exact)


def test_missing_values_and_first_tokens_by_hand():
    draw = torch.Generator().manual_seed(0)
    padded = -torch.rand(4, 50, generator=draw) - 0.6
    noise = 0.005 * torch.randn(5, 4, 50, generator=draw)
    packed, moved = padded + noise[0], noise[1:]
    assert judged(packed, padded, moved) is None
    assert judged(padded * 1, padded, [], exact=True) is None
    missing = padded.clone()
    missing[2, 7] = 0.0
    for exact in (True, False):  # one of two hundred, which no mean shows
        assert "1 log-probabilities" in judged(missing, padded, moved, exact)
    assert "mean" in judged(packed, padded, [], exact=True)
    first = packed.clone()
    first[:, 0] += 0.04
    assert "first tokens" in judged(first, padded, moved)
    tail = packed.clone()
    tail[:, ::4] += 0.3
    assert "mean" in judged(tail, padded, moved)
    assert judged(tail, padded, 40 * moved) is None  # where rounding moves tokens that far
    assert "not finite" in judged(padded * float("nan"), padded, moved)
    assert judged(missing, padded, moved, scored=missing != 0) is None


@pytest.mark.processes
@pytest.mark.parametrize("case", ["ddp qwen3", "fsdp2 qwen3", "fsdp2 qwen3_5", "fsdp2 falcon_h1"])
def test_two_ranks_answer_together_what_one_of_them_meets_alone(case):
    launch(Path(__file__).with_name("agreement_worker.py"), *case.split(), timeout=120)
