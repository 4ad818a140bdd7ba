"""docs/models.md is true: each class of transformers, small, packed and equal to stock, decoded, planned, in 4 bit; or not."""

import warnings

import pytest

from .every_model import PAGE, cells_on_the_page, classes, page, row

FAST = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "JambaForCausalLM",
    "FalconForCausalLM",
    "DeepseekV32ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)


def assert_as_on_the_page(name):
    said = cells_on_the_page()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = row(name)
    if isinstance(found, str):
        assert said == "", f"{name} is not computed any more, not by stock either: {found}"
    else:
        assert found == said


@pytest.mark.parametrize("name", FAST)
def test_common_models(name):
    assert_as_on_the_page(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(classes()) - set(FAST)))
def test_all_models(name):
    assert_as_on_the_page(name)


def test_nine_tenths_of_what_stock_trains_is_packed():
    rows = cells_on_the_page()
    assert set(classes()) == set(rows)
    trained = [cells for cells in rows.values() if cells]
    assert sum(cells[0] in ("yes", "dense") for cells in trained) >= 0.9 * len(trained)
    assert page(rows) == PAGE.read_text()
