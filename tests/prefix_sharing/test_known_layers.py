"""The tables of known layers: what is registered exists and is of its kind, what is not registered runs as stock.

Covers `prefix_sharing/attention/backends.py`, `prefix_sharing/attention/call.py`,
`prefix_sharing/recurrent/known_layers.py`.
"""

import importlib
import inspect
import logging
import re
from pathlib import Path

import pytest
import torch
import transformers

from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing import sharing
from trl_fsdp_qlora.prefix_sharing.attention import backends, two_part
from trl_fsdp_qlora.prefix_sharing.recurrent import known_layers
from trl_fsdp_qlora.prefix_sharing.recurrent.known_layers import registered_name

from .helpers import awkward_batch, build, stock_log_probs, with_stock_head

CALLS_THE_CACHE = re.compile("update_(conv|recurrent)_state")
# Layers of transformers 5.23 and 5.24 that keep a state and that no test has compared.
NOT_COMPARED = {
    "glm5_next.Glm5NextTextLinearAttention",
    "inkling.InklingShortConvolution",
    "inkling2.Inkling2DynamicShortConvolution",
    "inkling2.Inkling2ShortConvolution",
    "inkling2_loop.Inkling2LoopDynamicShortConvolution",
    "inkling2_loop.Inkling2LoopShortConvolution",
    "qwen4_exp.Qwen4ExpTextGatedDeltaNet",
    "qwen4_exp.Qwen4ExpTextNGramEmbedding",
    "qwen4_exp.Qwen4ExpTextPLELayer",
    "zaya.ZayaCCAProjection",
}


def layers_with_states() -> dict[str, type]:
    """The classes of transformers whose own source calls the cache's methods for states, as `folder.Class`."""
    layers = {}
    for path in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        if not CALLS_THE_CACHE.search(path.read_text(encoding="utf-8")):
            continue
        file = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, cls in inspect.getmembers(file, inspect.isclass):
            if cls.__module__ == file.__name__ and CALLS_THE_CACHE.search(inspect.getsource(cls)):
                layers[f"{path.parent.name}.{name}"] = cls
    return layers


@pytest.mark.exhaustive
def test_each_stateful_layer_is_registered_or_known_as_missing():
    layers = layers_with_states()
    registered = {*known_layers.CONTINUE_FROM_STATES, *known_layers.BEGIN_AT_ZERO}
    assert registered <= set(layers)
    assert set(layers) - registered <= NOT_COMPARED
    for name, cls in layers.items():
        assert (registered_name(cls) is not None) == (name in registered)


def test_a_model_with_an_unknown_layer_runs_as_stock(monkeypatch, caplog):
    expected, _ = stock_log_probs(with_stock_head(build("qwen3_5")), *awkward_batch())
    others = [name for name in known_layers.CONTINUE_FROM_STATES if not name.startswith("qwen3_5")]
    monkeypatch.setattr(known_layers, "CONTINUE_FROM_STATES", others)
    registered_name.cache_clear()
    try:
        ids, mask = awkward_batch()
        with caplog.at_level(logging.WARNING):
            model = share_prompts(with_stock_head(build("qwen3_5")))
        values, _ = stock_log_probs(model, ids, mask)
    finally:
        registered_name.cache_clear()
    assert torch.equal(values, expected)
    assert len([record for record in caplog.records if record.name == sharing.__name__]) == 1
    assert not model.prompt_sharing.status.packs


class BackendWithKeyword:
    """The registration of a backend alone: it knows the keyword `chunk`, and computes full attention by `two_part`."""

    LAYER_TYPES = two_part.LAYER_TYPES
    KEYWORDS = frozenset({"chunk"})

    def __init__(self):
        self.seen = []

    def refuses(self, call) -> str | None:
        return None if call.keywords else "no chunks"

    def attend(self, call) -> torch.Tensor:
        self.seen.append(call.keywords["chunk"])
        return two_part.attend(call)


@pytest.mark.parametrize("known", [True, False])
def test_a_backend_of_ones_own_is_one_line_of_the_table(monkeypatch, known):
    """Layers with its keyword take it. Without it they are refused, and the model runs as stock."""
    chunked = BackendWithKeyword()
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, **({"chunked": chunked} if known else {})})
    model = build("llama")
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, forward=forward, **kwargs: forward(*args, chunk=4, **kwargs)
    ids, mask = awkward_batch()
    expected, _ = stock_log_probs(with_stock_head(build("llama")), ids, mask)
    model = share_prompts(with_stock_head(model))
    values, _ = stock_log_probs(model, ids, mask)
    torch.testing.assert_close(values, expected, atol=2e-5, rtol=1e-5)
    assert model.prompt_sharing.status.packs == known
    assert set(model.prompt_sharing.figures.layer_calls) == ({"chunked"} if known else set())
    assert set(chunked.seen) == ({4} if known else set())
    if not known:
        assert "'chunk'" in model.prompt_sharing.describe()
