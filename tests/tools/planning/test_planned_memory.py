"""docs/planned_memory.py: its shapes are those of the models that it names, its line gives what plans themselves
give.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("planned_memory", ROOT / "docs" / "planned_memory.py")
planned_memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(planned_memory)


@pytest.mark.parametrize("name", planned_memory.MODELS)
def test_a_shape_has_the_weights_that_the_models_card_states(name, tmp_path):
    planned_memory.write_config(name, tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert weights == pytest.approx(planned_memory.MODELS[name][1] * 1e9, rel=0.01)


def test_the_page_is_what_was_planned():
    rows = json.loads(planned_memory.ROWS.read_text(encoding="utf-8"))
    page = planned_memory.PAGE.read_text(encoding="utf-8")
    assert page == planned_memory.page(rows)
    assert "Planned, not measured" in page


@pytest.mark.slow
@pytest.mark.exhaustive
def test_one_more_completion_than_the_line_gives_does_not_fit(tmp_path):
    cards = "24GB"
    planned_memory.write_config("Qwen3-0.6B", tmp_path)
    plan = planned_memory.plan_of
    few, many = (plan(str(tmp_path), "LoRA", cards, group) for group in (planned_memory.FEW, planned_memory.MANY))
    group = planned_memory.largest_group(str(tmp_path), "LoRA", cards, few, many)
    assert plan(str(tmp_path), "LoRA", cards, group).fits
    assert not plan(str(tmp_path), "LoRA", cards, group + 1).fits
