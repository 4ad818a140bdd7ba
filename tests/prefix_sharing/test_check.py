"""The comparison of packed with padded passes: it finds a planted fault of each kind, and none in a right pass."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from peft import get_peft_model
from torch.distributed.fsdp import FSDPModule

from tests.tiny import lora
from trl_fsdp_qlora.compat import fsdp
from trl_fsdp_qlora.prefix_sharing import check
from trl_fsdp_qlora.prefix_sharing.attention import cascade
from trl_fsdp_qlora.prefix_sharing.check import differences, rounding_unit, statistics
from trl_fsdp_qlora.prefix_sharing.row import PackedRow
from trl_fsdp_qlora.prefix_sharing.status import PassType

from .helpers import COMPLETION, PROMPT, assert_equals_stock, awkward_batch, build, make_batch, one_pass, prepared

# The column of each completion's first token among values `(B, L - 1)`.
FIRST = -COMPLETION


def llama(dtype=torch.float32):
    model = build("llama").to(dtype)
    return model, prepared(model)


def move_first_tokens(values_BL):
    is_scored_BL = values_BL != 0
    is_first_BL = is_scored_BL & (is_scored_BL.cumsum(1) == 1)  # rows that are compared begin in two columns
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
        assert not sharing.status.packs


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_rounding_alone_passes(family):
    """In float32 each model's first pass in test_equals_stock.py and test_compared_rows.py shows it."""
    model = build(family).to(torch.bfloat16)
    sharing = prepared(model)
    one_pass(model, sharing)
    assert sharing.status.packs, sharing.describe()


def test_rounding_is_measured_beyond_the_fixed_limits_alone(monkeypatch):
    """It takes most of the passes. A difference that rounding explains passes either way."""
    measured = []
    move = check._moved_by_rounding

    def counted(*which):
        measured.append(1)
        return move(*which)

    monkeypatch.setattr(check, "_moved_by_rounding", counted)
    for limit, passes in ((10.0, 0), (0.0, 1)):
        monkeypatch.setattr(check, "LIMITS_HALF", dict.fromkeys(check.LIMITS_HALF, limit))
        model, sharing = llama(torch.bfloat16)
        one_pass(model, sharing)
        assert sharing.status.packs, sharing.describe()
        assert len(measured) == passes
        measured.clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_global_layout_under_checkpointing_is_caught(reentrant, dtype, monkeypatch):
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
    # Without re-entrance torch itself may notice that other tensors were saved; either way no step is taken with it.
    assert not sharing.status.packs


def test_a_wrong_gradient_of_one_layer_is_caught(monkeypatch):
    model, sharing = llama()
    attend = cascade.attend

    def without_gradient_of_values(call):
        call.value = call.value.detach() if call.module.layer_idx == 1 else call.value
        return attend(call)

    monkeypatch.setattr(cascade, "attend", without_gradient_of_values)
    with torch.no_grad():
        one_pass(model, sharing)
    assert sharing.status.packs  # values are equal
    one_pass(model, sharing)
    assert not sharing.status.packs


def test_no_gradient_is_left_behind():
    model = get_peft_model(build("llama"), lora())
    sharing = prepared(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    before = [parameter.grad for parameter in model.parameters()]
    one_pass(model, sharing)
    assert sharing.status.packs
    assert all(p.grad is g and (g is None or (g == 1).all()) for p, g in zip(model.parameters(), before, strict=True))


def test_another_release_of_torch_packs_under_fsdp2(monkeypatch):
    """If FSDP2's private parts differ, the core uses none of them: this model has no state of FSDP2 at all."""
    model, sharing = llama()
    model.__class__ = type("Sharded", (FSDPModule, type(model)), {})
    monkeypatch.setattr(fsdp, "misfit", lambda: pytest.fail("the core asked for private parts of FSDP2"))
    assert_equals_stock(model, sharing)
    assert sharing.status.compared and sharing.status.packs, sharing.describe()


def test_each_kind_of_pass_is_compared_once():
    """Four padded rows; again with gradients; not if nothing can be compared."""
    model, sharing = llama()
    ids, mask = awkward_batch()
    mask[:, -COMPLETION:] = 0
    assert one_pass(model, sharing, (ids, mask)).padded_forwards == 0 and not sharing.status.compared
    nothing = torch.zeros(10, COMPLETION, dtype=torch.bool)  # rows that nothing can be learnt from
    assert one_pass(model, sharing, scored_BC=nothing).padded_forwards == 0 and not sharing.status.compared
    with torch.no_grad():
        assert [one_pass(model, sharing).padded_forwards for _ in range(2)] == [4, 0]
    assert [one_pass(model, sharing).padded_forwards for _ in range(2)] == [4, 0]
    with torch.no_grad():
        assert one_pass(model, sharing).padded_forwards == 0
    assert sharing.status.compared == {PassType(False, False), PassType(True, False)}


def test_equal_completions_of_one_token():
    """Yes/no answers: under signs of one and minus one the gradients of two equal rows cancelled to nothing."""
    for seed in range(8):
        model, sharing = llama()
        ids, mask = make_batch([5, 5], [1, 1], seed=seed)
        ids[1] = ids[0]
        one_pass(model, sharing, (ids, mask))
        assert sharing.status.packs, sharing.describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_comparison_holds_no_more_tokens_than_the_step(rows, dtype):
    """Eight rows at once for any batch: 447 tokens with a graph in the first step, 111 in the second."""
    model, sharing = llama(dtype)
    ids, mask = make_batch([PROMPT] * rows, [COMPLETION] * rows)
    tokens = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    for limit in (PROMPT + COMPLETION, 10**6, None):  # a limit that the batch does not reach, too
        sharing.status.compared.clear()
        with torch.set_grad_enabled(limit is None):
            one_pass(model, sharing, (ids, mask), **({} if limit is None else {"tokens_per_pass": limit}))
        cut = limit == PROMPT + COMPLETION and rows > 1
        # The last tokens are targets alone.
        step_tokens = PROMPT + COMPLETION if cut else PROMPT + rows * (COMPLETION - 1)
        compared = tokens[: -rows if cut else -1]
        # A padded row has its last token.
        assert len(compared) >= 2 and max(compared) <= step_tokens + 1, (compared, step_tokens)
        tokens.clear()
    assert sharing.status.packs, sharing.describe()


def test_rounding_in_half_precision_is_never_called_a_fault(monkeypatch):
    """Real rounding in bfloat16, resampled: each start is the sum over one to eight ranks, each with rounding of its
    own.
    """
    starts = []

    def recorded(sums, moved, limits, of):
        if moved is None:
            return ["a difference beyond the fixed limits, after which rounding is measured"]
        starts.append((sums, moved))
        return []

    monkeypatch.setattr(check, "differences", recorded)
    for family, seed in product(("llama", "qwen3"), range(6)):
        model = build(family, seed).to(torch.bfloat16)
        one_pass(model, prepared(model), make_batch([9] * 4 + [5] * 4, [9, 1, 5, 9] * 2, seed=seed))
    assert len(starts) == 12
    draw = np.random.default_rng(0)
    for _ in range(2_000):
        ranks = [starts[number] for number in draw.choice(len(starts), draw.choice([1, 2, 8]))]
        sums, moved = ({name: sum(rank[i][name] for rank in ranks) for name in ranks[0][i]} for i in range(2))
        assert not differences(sums, moved, check.LIMITS_HALF, "log-probability"), (sums, moved)


def test_a_packed_pass_that_fails_after_its_comparison_raises(monkeypatch):
    model, sharing = llama()
    one_pass(model, sharing)

    def attend(call):
        raise RuntimeError("no kernel for this size")

    monkeypatch.setattr(cascade, "attend", attend)
    with pytest.raises(RuntimeError, match="no kernel for this size"):
        one_pass(model, sharing)


def judged(values, padded, move=None, scored=None, exact=False, off=0.0, change=0.0):
    """Differences of values from those of a padded pass, and of a gradient from one of length 1."""
    scored = torch.ones_like(padded).bool() if scored is None else scored
    sums = statistics(values, padded, scored) | {"gradient": off**2, "size": 1.0}
    moved = statistics(padded if move is None else padded + move, padded, scored)
    moved |= {"gradient": change**2, "size": 1.0}
    limits = check.LIMITS_FP32 if exact else check.LIMITS_HALF
    return " ".join(differences(sums, moved, limits, "log-probability"))


def test_the_gradients_difference_by_hand():
    """30% is a fault, and none if rounding alone makes it a quarter of that."""
    padded = torch.full((10, 100), -1.0)
    for off, change, is_fault in ((0.3, 0.0, True), (0.2, 0.0, False), (0.3, 0.08, False), (float("nan"), 0.0, True)):
        assert bool(judged(padded, padded, off=off, change=change)) == is_fault
    assert "gradients differ" in judged(padded, padded, off=0.01, exact=True)


def test_missing_values_and_first_tokens_by_hand():
    draw = torch.Generator().manual_seed(0)
    padded = -torch.rand(4, 50, generator=draw) - 0.6
    noise = 0.005 * torch.randn(2, 4, 50, generator=draw)
    packed = padded + noise[0]
    move = noise[1]
    assert not judged(packed, padded, move) and not judged(padded * 1, padded, exact=True)
    missing, first, second, tail = (x.clone() for x in (padded, packed, packed, packed))
    missing[2, 7] = 0.0  # one of two hundred, which no mean shows
    for exact in (False, True):
        assert "mean difference" in judged(missing, padded, move, exact=exact)
    assert not judged(missing, padded, move, scored=missing != 0)
    assert "is inf" in judged(padded * float("nan"), padded, move)
    assert "mean" in judged(packed, padded, exact=True)
    first[:, 0] += 0.04
    assert "first tokens" in judged(first, padded, move)
    turns = torch.ones(4, 50).bool()
    turns[:, :10] = turns[:, 30:35] = False  # behind a prompt, and behind a user's turn
    second[:, [10, 35]] += 0.04
    assert "first tokens" in judged(second, padded, move, turns) and not judged(second, padded, move)
    tail[:, ::4] += 0.3
    assert "mean" in judged(tail, padded, move)
    assert not judged(tail, padded, 40 * move)  # if rounding move tokens that far


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
