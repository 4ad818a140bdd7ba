"""Each class of transformers, small, compared with its row in docs/models.md: packed, decoded, planned, in 4 bit."""

import warnings

import pytest

from .every_model import CLASSES, PAGE, cells_on_the_page, page, row

FAST = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "BloomForCausalLM",
    "JambaForCausalLM",
    "FalconForCausalLM",
    "GitForCausalLM",
    "DeepseekV32ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
]
REST = sorted(set(CLASSES) - set(FAST))


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in REST)])
def test_a_class_is_as_on_the_page(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = row(name)
    # A text is the reason why stock does not compute it either.
    assert ("" if isinstance(measured, str) else measured) == cells_on_the_page()[name], measured


def test_the_page_is_made_of_its_rows():
    rows = cells_on_the_page()
    assert set(CLASSES) == set(rows)
    assert page(rows) == PAGE.read_text()
