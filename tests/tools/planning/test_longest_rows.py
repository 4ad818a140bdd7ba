"""What makes rows longer, in a plan: offloaded activations and tiles, on the device and on the host."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tests.tools.planning.models import folder, settings
from trl_fsdp_qlora.tools.planning import passes
from trl_fsdp_qlora.tools.planning import plan as module
from trl_fsdp_qlora.tools.planning.hardware import GIB, PCIE, Hardware
from trl_fsdp_qlora.tools.planning.plan import (
    ACTIVATIONS,
    BOTH,
    NONE,
    OFFLOAD,
    TILES,
    changed,
    longest_rows,
    make_plan,
)

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("longest_rows", ROOT / "docs" / "longest_rows.py")
page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(page)
CARD = Hardware("a card", 24 * GIB)
OFFLOADED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": json.dumps({"offload": True})}


def planned(path, **changes):
    one_row = {"per_device_train_batch_size": 1, "num_generations": 4, "gradient_accumulation_steps": 4}
    return make_plan(settings(path, **one_row, max_completion_length=256, **changes), hardware=CARD)


def activations(plan) -> int:
    return plan.phases["forward_backward"][ACTIVATIONS]


def test_offloaded_activations_are_on_the_host(tmp_path):
    models = {layers: folder(tmp_path / str(layers), num_hidden_layers=layers) for layers in (4, 12)}
    on_card = {layers: planned(path, gradient_checkpointing=True) for layers, path in models.items()}
    on_host = {layers: planned(path, **OFFLOADED) for layers, path in models.items()}
    hidden = on_card[4].config.hidden_size
    tokens = on_card[4].step.longest.tokens
    grows = activations(on_card[12]) - activations(on_card[4])
    still = activations(on_host[12]) - activations(on_host[4])
    assert grows - still >= 8 * tokens * hidden * 2
    assert activations(on_host[12]) < activations(on_card[12])
    assert on_card[4].host_bytes == on_card[4].pcie_seconds == 0
    assert on_host[12].host_bytes == 3 * on_host[4].host_bytes > 12 * tokens * hidden * 2
    crossed = 2 * on_host[4].step.computed * 4 * hidden
    assert on_host[4].pcie_seconds == pytest.approx(crossed * 2 / PCIE) or on_host[4].pcie_seconds == pytest.approx(
        crossed * 4 / PCIE
    )
    assert "of pinned host memory per rank" in module.format_plan(on_host[4])
    assert "host memory" not in module.format_plan(on_card[4])


def test_a_machine_without_the_host_memory_is_named(tmp_path, monkeypatch):
    plan = planned(folder(tmp_path), **OFFLOADED)
    free = module.psutil.virtual_memory()
    assert "Warning" not in module.format_plan(plan)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: free._replace(available=plan.host_bytes - 1))
    assert "Warning: this machine has" in module.format_plan(plan)
    assert "gradient_checkpointing_kwargs without offload" in plan.host_warning


def test_host_bytes_are_those_that_are_saved(tmp_path, monkeypatch):
    """Of a pass with gradients of transformers' own offload: a layer's input for each layer, in a power of two."""
    from transformers import AutoModelForCausalLM

    plan = changed(planned(folder(tmp_path), **OFFLOADED), tokens_per_pass=0)
    assert not plan.step.trunks
    saved = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory, device_type):
            def pack(x):
                saved.append(1 << (x.nbytes - 1).bit_length())
                return x

            super().__init__(pack, lambda x: x)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", Recorded)
    dtype = module.model.compute_dtype(plan.settings, plan.config)
    model = AutoModelForCausalLM.from_config(plan.config, dtype=dtype, attn_implementation="sdpa").train()
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
    ids = torch.zeros(1, plan.step.longest.tokens, dtype=torch.long)
    model.base_model(input_ids=ids, use_cache=False)
    assert sum(saved) == plan.host_bytes


@pytest.mark.exhaustive
def test_tiles_make_a_wider_mlp_cost_nothing_per_token(tmp_path):
    models = {width: folder(tmp_path / str(width), intermediate_size=width) for width in (512, 1024)}
    shape = passes.Shape(1, 2048, 0, True)
    grows = {}
    for tile in ("off", 16):
        plans = [planned(path, gradient_checkpointing=True, mlp_tokens_per_tile=tile) for path in models.values()]
        narrow, wide = (passes.measure(plan.settings, plan.config, shape, True, grad=True) for plan in plans)
        grows[tile] = wide - narrow
    assert grows["off"] > 2048 * 512 * 4 * 3  # three intermediates
    assert grows[16] < grows["off"] / 4


@pytest.mark.exhaustive
def test_longer_rows_by_what_makes_them_longer(tmp_path, monkeypatch):
    plan = planned(folder(tmp_path, num_hidden_layers=8, max_position_embeddings=100_000))
    free = 2 * activations(plan)
    plan = make_plan(plan.settings, Hardware("a card", plan.peak + free))
    rows = longest_rows(plan)
    lengths = {label: row["max_completion_length"] for label, row in rows.items()}
    assert 256 < lengths[NONE] <= lengths[TILES] <= lengths[BOTH] and lengths[NONE] < lengths[OFFLOAD] <= lengths[BOTH]
    assert rows[NONE]["host_bytes"] == 0 < rows[OFFLOAD]["host_bytes"]
    text = module.format_longest(plan, rows)
    assert f"{lengths[BOTH]:,}" in text and "PCIe" in text


def test_the_page_has_the_planned_rows():
    rows = json.loads(page.ROWS.read_text(encoding="utf-8"))
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.partition(page.BEGIN)[2].partition(page.END)[0] == "\n" + page.table(rows) + "\n"
    for cells in rows.values():
        alone, *others = ([length for length, _ in cells[option]] for option in page.OPTIONS)
        assert all(longer >= length for other in others for length, longer in zip(alone, other, strict=True))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_planned_rows_fit_and_longer_ones_do_not():
    name = "Qwen3-4B LoRA"
    number = 1  # on larger cards the number of positions may be the limit
    for option in page.OPTIONS:
        length = json.loads(page.ROWS.read_text(encoding="utf-8"))[name][option][number][0]
        assert page.plan_of(name, option, page.CARDS[number], int(0.98 * length)).fits
        assert not page.plan_of(name, option, page.CARDS[number], int(1.02 * length)).fits


def test_every_second_layer_is_checkpointed(tmp_path):
    """The others keep what layers keep without checkpointing, and nothing of theirs is on the host."""
    path = folder(tmp_path, num_hidden_layers=12)
    kwargs = {"gradient_checkpointing_kwargs": json.dumps({"every_n_layers": 2})}
    off, every = (activations(planned(path, gradient_checkpointing=on)) for on in (False, True))
    second = activations(planned(path, gradient_checkpointing=True, **kwargs))
    assert every < second < off
    assert second == pytest.approx((every + off) / 2, rel=0.1)
    both = json.dumps({"offload": True, "every_n_layers": 2})
    on_host = planned(path, gradient_checkpointing=True, gradient_checkpointing_kwargs=both)
    assert 2 * on_host.host_bytes == planned(path, **OFFLOADED).host_bytes
    assert activations(on_host) < second
