"""Faults planted in the packed pass, one of each kind, are caught; a right pass is not; nothing is left behind."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed.launch import launch
from tests.tiny import lora
from trl_fsdp_qlora.prefix_sharing import verdict as verdict_module
from trl_fsdp_qlora.prefix_sharing.attention import cascade
from trl_fsdp_qlora.prefix_sharing.row import PackedRow
from trl_fsdp_qlora.prefix_sharing.verdict import compares_gradients, rounding_unit, statistics, verdict

from .helpers import COMPLETION, PROMPT, VOCABULARY, awkward_batch, build, make_batch, one_pass, prepared

# The column of each completion's first token among values `(B, L - 1)`.
FIRST = -COMPLETION


def llama(dtype=torch.float32):
    model = build("llama").to(dtype)
    return model, prepared(model)


def move_first_tokens(values_BL):
    is_scored_BL = values_BL != 0
    is_first_BL = is_scored_BL & (is_scored_BL.cumsum(1) == 1)  # rows that are compared stand in two columns
    return values_BL + 0.1 * is_first_BL  # seven times what rounding moves them in bfloat16


def shift_first_tokens(values_BL):
    return torch.cat([values_BL[:, :FIRST], values_BL[:, FIRST + 1 : FIRST + 2], values_BL[:, FIRST + 1 :]], dim=1)


def drop_a_token(values_BL):
    keep_BL = torch.ones_like(values_BL)
    keep_BL[1 if len(values_BL) > 1 else 0, FIRST] = 0
    return values_BL * keep_BL


FAULTS = {
    "first tokens shifted": shift_first_tokens,
    "a token dropped": drop_a_token,
    "first tokens moved": move_first_tokens,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faults_in_values_are_caught(fault, dtype, monkeypatch):
    scatter = PackedRow.scatter
    monkeypatch.setattr(PackedRow, "scatter", lambda self, values_N: FAULTS[fault](scatter(self, values_N)))
    for grad in (True, False):
        model, sharing = llama(dtype)
        with torch.set_grad_enabled(grad):
            one_pass(model, sharing)
        assert "difference in log-probability" in sharing.describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_rounding_alone_passes(family, dtype):
    model = build(family).to(dtype)
    sharing = prepared(model)
    one_pass(model, sharing)
    assert sharing.is_active, sharing.describe()


def test_the_effect_of_rounding_is_measured_beyond_the_fixed_limits_alone(monkeypatch):
    """It takes most of the passes. A difference that rounding explains passes either way."""
    measured = []
    perturbed = verdict_module.perturbed

    def counted(*which):
        measured.append(1)
        return perturbed(*which)

    monkeypatch.setattr(verdict_module, "perturbed", counted)
    for limit, passes in ((10.0, 0), (0.0, verdict_module.NOISE_PASSES)):
        for name in ("MEAN_DIFFERENCE_HALF", "FIRST_DIFFERENCE_HALF", "GRADIENT_DIFFERENCE_HALF", "PROJECTION_OFF"):
            monkeypatch.setattr(verdict_module, name, limit)
        model, sharing = llama(torch.bfloat16)
        kinds = 2 if sharing.packed_model.can_be_dense else 1
        one_pass(model, sharing)
        assert sharing.is_active, sharing.describe()
        assert len(measured) == kinds * passes
        measured.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layout_taken_from_a_global_under_checkpointing_is_caught(reentrant, dtype, monkeypatch):
    """Right values, wrong gradients: when a layer is computed again during backward, the global is long gone."""
    model = build("llama").to(dtype).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    sharing = prepared(model)
    attend = cascade.attend

    def from_a_global(call):
        if call.packed_row.view.is_computed:  # the forward is over
            whole = call.packed_row.forest
            alone = replace(whole, parents=np.full_like(whole.parents, -1), levels=np.zeros_like(whole.levels))
            call.packed_row = replace(call.packed_row, forest=alone, derived={})
        return attend(call)

    monkeypatch.setattr(cascade, "attend", from_a_global)
    one_pass(model, sharing)
    # Without re-entrance torch itself may notice that other tensors were saved; either way nobody trains on it.
    assert not sharing.is_active
    if reentrant:
        assert "gradients differ" in sharing.describe()


def test_a_wrong_gradient_of_one_layer_is_caught(monkeypatch):
    model, sharing = llama()
    attend = cascade.attend

    def without_gradient_of_values(call):
        call.value = call.value.detach() if call.module.layer_idx == 1 else call.value
        return attend(call)

    monkeypatch.setattr(cascade, "attend", without_gradient_of_values)
    one_pass(model, sharing)
    assert "gradients differ" in sharing.describe()


def test_no_gradient_is_left_behind():
    model = get_peft_model(build("llama"), lora())
    sharing = prepared(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = [parameter.grad for parameter in model.parameters()]
    one_pass(model, sharing)
    assert sharing.is_active
    assert all(p.grad is g and (g is None or (g == 1).all()) for p, g in zip(model.parameters(), before, strict=True))


def test_gradients_are_compared_where_a_plain_backward_may_be_undone():
    """Not under DeepSpeed, whose engine has a backward of its own and whose ZeRO-3 marks each parameter."""
    model = get_peft_model(build("llama"), lora())
    assert compares_gradients(model) and not compares_gradients(torch.nn.ModuleList([model]))
    with torch.no_grad():
        assert not compares_gradients(model)
    next(model.parameters()).ds_id = 0
    assert not compares_gradients(model)


def test_another_release_of_torch_compares_log_probabilities_alone_under_fsdp2(monkeypatch):
    """Where FSDP2's private parts differ, none of them is touched: this model has no state of FSDP2 at all."""
    model, sharing = llama()
    model.__class__ = type("Sharded", (FSDPModule, type(model)), {})
    monkeypatch.setattr("trl_fsdp_qlora.prefix_sharing.verdict.misfit", lambda: "torch 9.9")
    # Two forwards of two rows, next to each of the two ways in which rows of this model may be packed.
    assert one_pass(model, sharing).padded_forwards == 4
    assert sharing.is_active and sharing.checked == {(False, False)}


def test_each_kind_of_pass_is_compared_once():
    """One padded pass for each of four rows, of levels and of a dense mask; again with gradients; not where nothing
    can be compared.
    """
    model, sharing = llama()
    ids, mask = awkward_batch()
    mask[:, -COMPLETION:] = 0
    assert one_pass(model, sharing, (ids, mask)).padded_forwards == 0 and not sharing.checked
    with torch.no_grad():
        assert [one_pass(model, sharing).padded_forwards for _ in range(2)] == [4, 0]
    nothing = torch.zeros(10, COMPLETION, dtype=torch.bool)  # rows that nothing can be learnt from are compared, too
    assert [one_pass(model, sharing, scored_BC=nothing).padded_forwards for _ in range(2)] == [4, 0]
    with torch.no_grad():
        assert one_pass(model, sharing).padded_forwards == 0
    assert sharing.checked == {(False, False), (True, False)}
    # A state is not kept at every token, so of recurrent layers there is one way.
    model = build("qwen3_5")
    assert [one_pass(model, prepared(model)).padded_forwards for _ in range(2)] == [2, 0]


def test_equal_completions_of_one_token():
    """Yes/no answers: under signs of one and minus one the gradients of two equal rows cancelled to nothing."""
    for seed in range(8):
        model, sharing = llama()
        ids, mask = make_batch([5, 5], [1, 1], seed=seed)
        ids[1] = ids[0]
        one_pass(model, sharing, (ids, mask))
        assert sharing.is_active, sharing.describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_no_forward_of_the_comparison_holds_more_tokens_than_the_steps_own(rows, dtype):
    """Eight rows at once whatever the batch: 447 tokens with a graph in the first step, 111 in the second."""
    model, sharing = llama(dtype)
    ids, mask = make_batch([PROMPT] * rows, [COMPLETION] * rows)
    tokens = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    for limit in (PROMPT + COMPLETION, 10**6, None):  # a limit that the batch does not reach, too
        sharing.checked.clear()
        with torch.set_grad_enabled(limit is None):
            one_pass(model, sharing, (ids, mask), **({} if limit is None else {"tokens_per_pass": limit}))
        cut = limit == PROMPT + COMPLETION and rows > 1
        # The last tokens are targets alone.
        step_tokens = PROMPT + COMPLETION if cut else PROMPT + rows * (COMPLETION - 1)
        compared = tokens[: -rows if cut else -1]
        # A padded row has its last token.
        assert len(compared) >= 2 and max(compared) <= step_tokens + 1, (compared, step_tokens)
        tokens.clear()
    assert sharing.is_active, sharing.describe()


def scaled_output(attend, call):
    return 1.03 * attend(call)


def scaled_scores(attend, call):
    call.scaling *= 1.03
    return attend(call)


FAULTY_ATTENTION = {"output": scaled_output, "scores": scaled_scores}


@pytest.mark.parametrize("fault", [None, *FAULTY_ATTENTION])
def test_an_attention_scaled_by_three_percent_is_caught_in_half_precision(fault, monkeypatch):
    """Single tokens hide it in rounding; in the gradient's projection rounding averages out."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, initializer_range=0.2, pad_token_id=0, **sizes)
    model = LlamaForCausalLM(config)
    # As in trained models, layers add little to what is there: their scale is not divided out again.
    with torch.no_grad():
        model.model.embed_tokens.weight *= 10
    attention = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(model, attention).to(torch.bfloat16)
    sharing = prepared(model)
    attend = cascade.attend
    if fault:
        monkeypatch.setattr(cascade, "attend", lambda call: FAULTY_ATTENTION[fault](attend, call))
    one_pass(model, sharing, make_batch([14] * 4 + [9] * 4, [96] * 8, completion=96), completion=96)
    assert sharing.is_active == (fault is None), sharing.describe()
    if fault is not None:
        assert "times as long as the padded pass's" in sharing.describe()


def test_ten_thousand_healthy_starts_in_half_precision(monkeypatch):
    """Real rounding in bfloat16, resampled: each start is the sum over one to eight ranks, each with rounding of its
    own.
    """
    starts = []

    def recorded(figures, exact, of):
        if "gradient_noise" not in figures:
            return "a difference beyond the fixed limits, after which the effect of rounding is measured"
        starts.append(figures)
        return None

    monkeypatch.setattr(verdict_module, "verdict", recorded)
    for family, seed in product(("llama", "qwen3"), range(6)):
        model = build(family, seed).to(torch.bfloat16)
        one_pass(model, prepared(model), make_batch([9] * 4 + [5] * 4, [9, 1, 5, 9] * 2, seed=seed))
    monkeypatch.undo()
    moved = [name for name in starts[0] if name.startswith("gradient_moved")]
    assert len(starts) == 24 and len(moved) == verdict_module.NOISE_PASSES - 1
    draw = np.random.default_rng(0)
    for _ in range(10_000):
        figures = dict.fromkeys(starts[0], 0.0)
        for start in draw.choice(starts, draw.choice([1, 2, 8])):
            shuffled = dict(zip(moved, draw.choice([start[name] for name in moved], len(moved)), strict=True))
            for name, value in (start | shuffled).items():
                figures[name] += value
        assert verdict(figures, exact=False) is None, figures


def test_what_fails_later_raises(monkeypatch):
    model, sharing = llama()
    one_pass(model, sharing)

    def attend(call):
        raise RuntimeError("no kernel for this size")

    monkeypatch.setattr(cascade, "attend", attend)
    with pytest.raises(RuntimeError, match="no kernel for this size"):
        one_pass(model, sharing)


def test_the_gradient_along_the_padded_one_by_hand():
    """Lengths of the gradient, in thousandths off: 3% is a fault, and none where rounding alone makes it as much."""
    values = dict.fromkeys(("missing", "off", "noise", "first_off", "first_noise"), 0.0)

    def judged(off, moved_off, noise=0.0, tokens=1000.0):
        lengths = {"gradient": 1 + 2 * off, "gradient_padded": 1.0, "gradient_noise": noise, "gradient_off": noise}
        lengths |= {f"gradient_moved_{i}": 1 + 2 * x for i, x in enumerate(moved_off, start=1)}
        return verdict(values | {"tokens": tokens, "first_tokens": 8.0} | lengths, exact=False)

    assert "1.030 times" in judged(0.03, [0.002, -0.001]) and "0.970 times" in judged(-0.03, [0.002, -0.001])
    assert judged(0.009, [0.0, 0.0]) is None and judged(0.03, [0.01, -0.006]) is None
    assert judged(0.03, [], noise=0.001, tokens=8.0) is None  # eight tokens, each 3% off
    assert judged(0.03, [], noise=0.001) is not None and judged(float("nan"), [0.0]) is not None


def test_missing_values_and_first_tokens_by_hand():
    draw = torch.Generator().manual_seed(0)
    padded = -torch.rand(4, 50, generator=draw) - 0.6
    noise = 0.005 * torch.randn(5, 4, 50, generator=draw)
    packed = padded + noise[0]
    moves = noise[1:]
    every = torch.ones(4, 50).bool()

    def judged(packed, moves=moves, exact=False, scored=every):
        return verdict(statistics(packed, padded, moves, scored), exact)

    assert judged(packed) is None and judged(padded * 1, [], exact=True) is None
    missing = padded.clone()
    first = packed.clone()
    tail = packed.clone()
    missing[2, 7] = 0.0  # one of two hundred, which no mean shows
    assert "1 values" in judged(missing) and "1 values" in judged(missing, exact=True)
    assert judged(missing, scored=missing != 0) is None
    assert "not finite" in judged(padded * float("nan"))
    assert "mean" in judged(packed, [], exact=True)
    first[:, 0] += 0.04
    assert "first tokens" in judged(first)
    second = packed.clone()
    turns = every.clone()
    turns[:, :10] = turns[:, 30:35] = False  # behind a prompt, and behind a user's turn
    second[:, [10, 35]] += 0.04
    assert "first tokens" in judged(second, scored=turns) and judged(second) is None
    tail[:, ::4] += 0.3
    assert "mean" in judged(tail) and judged(tail, 40 * moves) is None  # where rounding moves tokens that far


@pytest.mark.processes
def test_two_ranks_answer_together_what_one_of_them_meets_alone():
    launch(Path(__file__).with_name("ranks_worker.py"), "text", timeout=360)


@pytest.mark.processes
def test_recurrent_layers_under_zero_3_run_as_stock():
    """ZeRO-3 gathers in each call of a layer, which a packed row calls as often as its batch wants: ranks waited for
    each other.
    """
    pytest.importorskip("deepspeed")
    launch(Path(__file__).with_name("zero3_worker.py"), timeout=120)


@pytest.mark.parametrize("trains", [True, False])
def test_a_4_bit_layer_rounds_as_its_product_is_computed(trains):
    """In bfloat16 on some CPUs if nothing is recorded, as in the teacher of a distillation."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 256, bias=False, compute_dtype=torch.float32, quant_type="nf4").to("cpu")
    dense = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).double()
    model = torch.nn.Sequential(layer).train(trains)
    hidden = torch.randn(64, 256, requires_grad=trains)
    exact = hidden.detach().double() @ dense.T
    with torch.set_grad_enabled(trains):
        unit = rounding_unit(model, torch.device("cpu"))
        error = (model(hidden).detach() - exact).norm() / exact.norm()
    assert bool(unit) == bool(error > 1e-5) and (not trains or unit == 0)
    assert unit == 0 or unit / 2 < error < 4 * unit
