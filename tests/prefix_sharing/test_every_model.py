"""Each class of transformers, small, compared with its row in docs/models.md: packed, decoded, planned, in 4 bit."""

import warnings

import pytest

from tests.tiny import these_first

from .every_model import CLASSES, cells_on_the_page, row

# First, one that has all four, one that is not packed, and one that does not generate on a plan's fake tensors.
OFTEN = ("Qwen3ForCausalLM", "BloomForCausalLM", "MptForCausalLM")


@pytest.mark.parametrize("name", these_first(sorted(CLASSES), *OFTEN))
def test_a_class_is_as_on_the_page(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = row(name)
    # A text is the reason why stock does not compute it either.
    assert ("" if isinstance(measured, str) else measured) == cells_on_the_page()[name], measured
