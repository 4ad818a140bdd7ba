"""The names of the cache fit the installed transformers, which renamed it in 5.24; options of checkpointing."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Mamba2Config

from trl_fsdp_qlora.compat.transformers import CACHE, cache_name, take_checkpointing_options_apart
from trl_fsdp_qlora.compat.transformers_generation import takes_dynamic_cache

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2),
    "mamba2": Mamba2Config(**SIZES, num_heads=4, head_dim=8, state_size=8, n_groups=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_takes_and_returns_its_cache_under_this_name(name):
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    cache = cache_name(type(model))
    assert cache == CACHE or name == "mamba2"  # Mamba's classes have a name of their own before 5.24
    assert takes_dynamic_cache(model)
    tokens = torch.tensor([[1, 2, 3]])
    kept = model(tokens, use_cache=True)[cache]
    assert kept is not None and model(tokens[:, :1], use_cache=True, **{cache: kept})[cache] is kept


def test_checkpointing_keeps_its_method_without_options_of_transformers_alone():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    take_checkpointing_options_apart(model, {"use_reentrant": False})
    take_checkpointing_options_apart(model, None)
    assert "gradient_checkpointing_enable" not in vars(model)
    take_checkpointing_options_apart(model, {"every_n_layers": 2})
    model.gradient_checkpointing_enable({"every_n_layers": 2, "use_reentrant": False})
    assert model.is_gradient_checkpointing
