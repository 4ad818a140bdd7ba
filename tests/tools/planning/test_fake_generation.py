"""Bytes of generation by a config, against transformers' own caches and against the same model on fake tensors."""

import pytest
import torch
from transformers import DynamicCache

from tests.prefix_sharing.helpers import build
from tests.tools.planning.models import config, folder, settings
from trl_fsdp_qlora.prefix_sharing.recurrent.known_layers import recurrent_layers
from trl_fsdp_qlora.tools.planning import fake_run
from trl_fsdp_qlora.tools.planning.fake_generation import state_bytes
from trl_fsdp_qlora.tools.planning.fake_run import FakeRun


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "mamba2", "kimi_linear"])
def test_the_bytes_of_states_that_a_row_keeps(name):
    """They are those of transformers' own cache after a forward of eight tokens."""
    model = build(name)
    cache = DynamicCache(config=model.config)
    # Mamba-2 alone takes its cache under another name.
    argument = "cache_params" if name == "mamba2" else "past_key_values"
    with torch.no_grad():
        model(torch.arange(3, 11).unsqueeze(0), use_cache=True, **{argument: cache})
    kept = [layer for layer in cache.layers if hasattr(layer, "conv_states")]
    states = [x for layer in kept for part in (layer.conv_states, layer.recurrent_states) for x in part.values()]
    width = model.config.get_text_config().hidden_size
    counted = sum(state_bytes(layer, width) for layer in recurrent_layers(model.to("meta")))
    assert counted == sum(state.nbytes for state in states if state is not None) > 0


def test_a_model_that_cannot_generate_is_counted_by_its_config(tmp_path, monkeypatch, caplog):
    """Its keys and values are those of generation on fake tensors, and the other runs of a search do not try it."""
    run = settings(folder(tmp_path), use_peft=False, prompt_tokens=40, max_completion_length=8)
    generated = FakeRun(run, config(), False).generation_bytes()
    monkeypatch.setattr(fake_run, "_generates_otherwise", set())
    monkeypatch.setattr(fake_run, "_measured", {})
    tried = []

    def fail(*_):
        tried.append(1)
        raise IndexError("a cache of another kind")

    monkeypatch.setattr(FakeRun, "_run_generation", fail)
    counted = FakeRun(run, config(), False).generation_bytes()
    # Next to keys and values, the model on fake tensors keeps the tokens of its rows and their mask.
    assert counted.cache == pytest.approx(generated.cache, rel=0.01)
    assert counted.prefill > counted.cache * 40 / 48
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    longer = settings(folder(tmp_path), use_peft=False, prompt_tokens=40, max_completion_length=16)
    assert FakeRun(longer, config(), False).generation_bytes().cache > counted.cache
    assert tried == [1]
