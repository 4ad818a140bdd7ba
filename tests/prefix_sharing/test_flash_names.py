"""Models loaded with a flash-attention kernel share prompts, with transformers' own functions underneath.

The kernel itself is a dense one here: what is tested is that transformers finds it, by its own name, each time.

Covers `prefix_sharing/attention/implementation.py`.
"""

import pytest
import transformers.modeling_flash_attention_utils as flash
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import flash_attention_mask

from tests.dense_flash import dense, dense_varlen

from .helpers import assert_equals_stock, build, prepared

HUB = "kernels-community/flash-attn2"


@pytest.fixture(params=["flash_attention_2", HUB])
def kernel(request, monkeypatch):
    """A kernel that transformers knows by this name and no other."""
    asked = []

    def load(implementation, *args, **kwargs):
        assert implementation == request.param, f"transformers looked for a kernel called {implementation}"
        asked.append(implementation)
        process = flash._lazy_define_process_function(dense_varlen)
        return (dense, dense_varlen, None, flash._pad_input, flash._unpad_input), (process, dict)

    monkeypatch.setattr(flash, "lazy_import_flash_attention", load)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", load)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    AttentionInterface.register(request.param, flash_attention_forward)
    AttentionMaskInterface.register(request.param, flash_attention_mask)
    return request.param, asked


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma2"])
def test_a_model_with_a_flash_kernel_shares_prompts(name, kernel):
    implementation, asked = kernel
    model = build(name)
    model.set_attn_implementation(implementation)
    sharing = prepared(model)
    figures = assert_equals_stock(model, sharing)
    assert asked and set(figures.layer_calls) == {"cascade" if name == "llama" else "two_part"}
    registered = model.config._attn_implementation
    assert "flash" not in registered and "/" not in registered
    with sharing.original_attention():  # generation gets the kernel by its own name
        assert model.config._attn_implementation == implementation
    assert model.config._attn_implementation == registered
