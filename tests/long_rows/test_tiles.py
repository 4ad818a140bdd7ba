"""Long rows in tiles: values, gradients and memory next to a forward without tiles.

Covers `compat/memory.py`, `long_rows/known_modules.py`.
"""

import copy
import functools
import importlib
import io
import itertools
import logging
import re
import weakref
from pathlib import Path

import pytest
import torch
import transformers as tf
from peft import LoKrConfig, LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.prefix_sharing.helpers import assert_equal_gradients, awkward_batch, build, gradients, small
from tests.tiny import these_first
from trl_fsdp_qlora.compat.memory import PeakTracker
from trl_fsdp_qlora.long_rows import tiles as token_tiles
from trl_fsdp_qlora.long_rows.known_modules import LAYER_PARTS, layer_part
from trl_fsdp_qlora.long_rows.tiles import AUTO_TOKENS, install, remove

from .proven_forwards import kind_of_code

FAMILIES = (
    "llama", "qwen3", "gemma2", "gemma3", "mistral_sliding", "phi3", "nemotron", "qwen3_moe", "gpt_oss", "qwen3_5",
    "qwen3_5_moe", "lfm2", "granitemoehybrid", "falcon_h1", "olmo_hybrid", "nemotron_h", "kimi_linear",
)  # fmt: skip
FIRST = ("qwen3", "gemma3", "qwen3_moe", "qwen3_5")
TILE = 7  # tokens; rows have more, and no multiple of it
TOLERANCE = 2e-6


@pytest.fixture
def calls(monkeypatch):
    """The kinds of the modules whose calls ran in tiles."""
    kinds = []
    run = token_tiles._Call.run

    def recorded(call, inputs):
        kinds.append(len(call.tiles))
        return run(call, inputs)

    monkeypatch.setattr(token_tiles._Call, "run", recorded)
    return kinds


def loss_of(model) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of a padded batch, and the gradients of a weighted sum of them."""
    ids, mask = awkward_batch()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * mask[..., None]
    (logits * weight).mean().backward()
    return logits.detach(), gradients(model)


def checkpointed(model, **options):
    model.gradient_checkpointing_enable({"use_reentrant": False} | options)
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("checkpoints", ["none", "not reentrant", "reentrant"])
@pytest.mark.parametrize("name", these_first(FAMILIES, *FIRST))
def test_gradients_are_those_without_tiles(name, checkpoints, calls):
    model = build(name).train()
    if checkpoints != "none":
        checkpointed(model, use_reentrant=checkpoints == "reentrant")
    expected = loss_of(model)
    install(model, TILE)
    logits, actual = loss_of(model)
    assert calls and min(calls) > 1
    torch.testing.assert_close(logits, expected[0], atol=5e-6, rtol=1e-5)
    assert_equal_gradients(actual, expected[1], TOLERANCE)


@pytest.mark.exhaustive
def test_known_classes_have_proven_forwards():
    """A class of transformers whose code changes is looked at again. Another version may lack a few of the classes."""
    found = {}
    for path in sorted(Path(tf.models.__file__).parent.glob("*/modeling_*.py")):
        names = set(re.findall(r"^class (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)) & LAYER_PARTS.keys()
        if names:
            module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            found |= {(path.parent.name, name): kind_of_code(getattr(module, name).forward) for name in names}
    assert {(folder, name): LAYER_PARTS[name] for folder, name in found} == found
    assert len({name for _, name in found}) > 0.9 * len(LAYER_PARTS)


def test_the_kinds_of_some_families():
    kinds = {name: kinds_in(build(name)) for name in ("qwen3_moe", "gpt_oss", "gemma2", "lfm2")}
    assert kinds == {
        "qwen3_moe": {"experts", "norm"},
        "gpt_oss": {"experts", "norm"},
        "gemma2": {"MLP", "norm"},
        "lfm2": {"MLP", "norm"},
    }


def test_a_users_class_with_transformers_forward_is_known():
    config = tf.LlamaConfig(hidden_size=32, intermediate_size=16)

    class Named(LlamaMLP):
        pass

    class Doubled(LlamaMLP):
        def forward(self, x):
            return super().forward(2 * x)

    assert [layer_part(cls(config)) for cls in (LlamaMLP, Named, Doubled)] == ["MLP", "MLP", None]


def kinds_in(model) -> set[str]:
    return {kind for kind in map(layer_part, model.modules()) if kind is not None}


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_are_computed_as_often_as_with_checkpointing(name, monkeypatch):
    """Twice: in the forward and for the backward. A recomputed layer does not run the MLP; its backward does.

    Gemma's layer has a norm behind the MLP, which keeps nothing.
    """
    model = checkpointed(build(name).train())
    ids, _ = awkward_batch()
    tokens = []
    linear = nn.Linear.forward

    def counted(layer, x):
        if layer in gates:
            tokens.append(x[..., 0].numel())
        return linear(layer, x)

    gates = {module for module_name, module in model.named_modules() if module_name.endswith("gate_proj")}
    monkeypatch.setattr(nn.Linear, "forward", counted)
    loss_of(model)
    alone = sum(tokens)
    assert alone == 2 * len(gates) * ids.numel()
    install(model, TILE)
    tokens.clear()
    loss_of(model)
    assert sum(tokens) == alone and max(tokens) <= max(TILE, len(ids))


def test_memory_does_not_grow_with_the_width_of_the_mlp():
    peaks = {}
    kept = {}  # after the forward
    for width, tile in itertools.product((256, 1024), ("off", 8)):
        # Frozen, so that gradients of weights do not count.
        model = checkpointed(small("Llama", intermediate_size=width)().train().requires_grad_(False))
        install(model, tile)
        ids = torch.randint(3, 60, (1, 512))
        with PeakTracker(*model.parameters(), *model.buffers(), ids) as tracker:
            before = tracker.now
            out = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            kept[width, tile] = tracker.now - before
            out.mean().backward()
        peaks[width, tile] = tracker.peak - before
    one = 512 * 768 * 4  # what one intermediate of the wider MLP is larger by
    assert peaks[1024, "off"] - peaks[256, "off"] > 3 * one
    assert peaks[1024, 8] - peaks[256, 8] < one / 8
    assert peaks[1024, 8] < peaks[1024, "off"] / 3
    assert kept[1024, 8] <= kept[1024, "off"]


@pytest.mark.parametrize(
    "kind, dropout",
    [(LoraConfig, {"lora_dropout": 0.5}), (LoKrConfig, {"rank_dropout": 0.5}), (LoKrConfig, {"module_dropout": 0.5})],
)
def test_dropout_draws_in_the_backward_what_it_drew_in_the_forward(kind, dropout):
    """The gradient of a forward with these masks, by differences in float64."""
    config = kind(r=4, target_modules=["gate_proj", "down_proj"], **dropout)
    model = get_peft_model(build("llama").double().train(), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    install(model, TILE)
    mlp = model.get_base_model().model.layers[0].mlp
    x = torch.randn(1, 40, 32, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(1, 40, 32, dtype=torch.float64)
    weight = torch.randn(1, 40, 32, dtype=torch.float64)

    def value(shift):
        torch.manual_seed(3)
        return (mlp(x + shift * direction) * weight).sum()

    out = value(0)
    torch.rand(5)  # the backward finds another state, and leaves it
    state = torch.get_rng_state()
    out.backward()
    assert torch.equal(torch.get_rng_state(), state)
    step = 1e-6
    difference = (value(step) - value(-step)).item() / (2 * step)
    assert (x.grad * direction).sum().item() == pytest.approx(difference, rel=1e-6)
    for _ in range(10):  # LoKr leaves out whole adapters, so a tile may have nothing with gradients
        mlp(x.detach()).sum().backward()


def changed_in_place(layer):
    layer.mlp.register_forward_hook(lambda module, args, out: out.mul_(out.detach().abs() + 0.5))


def called_twice(layer):
    norm = layer.post_feedforward_layernorm
    norm.register_forward_hook(lambda norm, args, out: out + 0.5 * norm.forward(*args))


@pytest.mark.parametrize("change", [changed_in_place, called_twice])
def test_the_norm_behind_an_mlp(change, calls):
    model = build("gemma2").train()
    for layer in model.model.layers:
        change(layer)
    logits, expected = loss_of(model)
    install(model, TILE)
    actual = loss_of(model)
    assert calls
    torch.testing.assert_close(actual[0], logits, atol=5e-6, rtol=1e-5)
    assert_equal_gradients(actual[1], expected, TOLERANCE)


def test_a_model_that_was_pickled():
    """What was read back runs without tiles, until they are installed again."""
    model = build("llama")
    install(model, TILE)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    copied = copy.deepcopy(model)
    for other in (read, copied):
        mlp = other.model.layers[0].mlp
        assert mlp.forward.__self__ is mlp
        torch.testing.assert_close(loss_of(other)[0], loss_of(model)[0], atol=5e-6, rtol=1e-5)


def test_mixed_precision_gives_every_weight_its_gradient():
    """A weight that autocast casts in a tile without gradients is not the one that a tile with gradients finds."""
    model = build("qwen3").train()

    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            ids, mask = awkward_batch()
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logits.float().square().mean().backward()
        return gradients(model)

    expected = under_autocast()
    install(model, TILE)
    actual = under_autocast()
    assert all(x.abs().max() > 0 for x in actual)
    assert_equal_gradients(actual, expected, 2e-2)


def test_half_precision_sums_are_not_rounded_for_each_tile():
    model = build("llama").to(torch.bfloat16).train()
    x = torch.randn(1, 512, 32).to(torch.bfloat16)
    mlp = model.model.layers[0].mlp
    wide = build("llama").train().model.layers[0].mlp
    (wide(x.float())).float().square().sum().backward()
    install(model, 4)
    mlp(x).float().square().sum().backward()
    for ours, exact in zip(mlp.parameters(), wide.parameters(), strict=True):
        assert (ours.grad.float() - exact.grad).abs().max() <= 2e-2 * exact.grad.abs().max()


@pytest.mark.parametrize("checkpoints", [True, False])
def test_auto_leaves_short_rows_and_unchecked_layers_alone(checkpoints, monkeypatch, calls):
    model = build("qwen3").train()
    if checkpoints:
        checkpointed(model)
    expected = loss_of(model)
    install(model, "auto")
    logits, actual = loss_of(model)
    assert not calls and torch.equal(logits, expected[0])
    assert all(map(torch.equal, actual, expected[1]))
    for kind in AUTO_TOKENS:
        monkeypatch.setitem(AUTO_TOKENS, kind, TILE)
    assert_equal_gradients(loss_of(model)[1], expected[1], TOLERANCE)
    assert bool(calls) == checkpoints


def test_off_gives_every_module_its_forward_back(calls):
    model = build("qwen3")
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    install(model, TILE)
    install(model, 2 * TILE)  # a second call changes the size alone
    assert {module.token_tiles.tokens_per_tile for module in model.modules() if hasattr(module, "token_tiles")} == {14}
    remove(model)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before
    install(model, "off")
    loss_of(model)
    assert not calls


def test_a_graph_frees_its_tiles():
    model = checkpointed(build("gemma2").train())
    install(model, TILE)
    alive = weakref.WeakSet()
    init = token_tiles._Call.__init__

    def recorded(call, *args):
        init(call, *args)
        alive.add(call)

    token_tiles._Call.__init__ = recorded
    try:
        loss_of(model)
    finally:
        token_tiles._Call.__init__ = init
    assert not alive


# --- what is not known ----------------------------------------------------------------------------------------------


class Mixing(nn.Module):
    """An MLP that looks at the token before."""

    def __init__(self, config):
        super().__init__()
        self.down_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x):
        return self.down_proj(x + x.roll(1, 1))


def with_batch_norm(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(48), nn.Unflatten(0, (10, 23)))


def with_hook(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *_: None)


def with_wrapper_of_the_users(model):
    """It names the function that it wraps, and looks at the last token."""

    def wrapped(forward):
        @functools.wraps(forward)
        def with_larger_end(x):
            out = forward(x)
            return torch.cat([out[:, :-1], 2 * out[:, -1:]], 1)

        return with_larger_end

    for layer in model.model.layers:
        layer.mlp.forward = wrapped(layer.mlp.forward)


def with_mixing_mlp(model):
    for layer in model.model.layers:
        layer.mlp = Mixing(model.config)


def with_softmax(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Softmax(dim=1)


@pytest.mark.parametrize(
    "change, named",
    [
        (with_softmax, "Softmax"),
        (with_batch_norm, "Flatten"),
        (with_hook, "Linear"),
        (with_mixing_mlp, None),
        (with_wrapper_of_the_users, None),
    ],
)
def test_a_module_with_something_unknown_runs_as_before(change, named, calls, caplog):
    logging.Logger.warning_once.cache_clear()
    model = build("llama").train()
    change(model)
    expected = loss_of(model)
    norms = sum(layer_part(module) == "norm" for module in model.modules())
    install(model, TILE)
    with caplog.at_level(logging.WARNING):
        logits, actual = loss_of(model)
    assert len(calls) == norms
    torch.testing.assert_close(logits, expected[0])
    assert_equal_gradients(actual, expected[1], TOLERANCE)
    lines = [record.getMessage() for record in caplog.records if record.name == token_tiles.__name__]
    assert len(lines) == (named is not None) and all(named in line for line in lines)


def test_weights_that_are_no_parameters_get_their_gradients(calls):
    """FSDP1 puts parts of one large parameter in their places, for a call."""
    model = build("qwen3_moe").train()
    experts = [module for module in model.modules() if layer_part(module) == "experts"]
    large = [module._parameters.pop("gate_up_proj") for module in experts]

    def gradients_of_large():
        for module, parameter in zip(experts, large, strict=True):
            module.gate_up_proj = parameter * 1.0
            parameter.grad = None
        loss_of(model)
        return [parameter.grad for parameter in large]

    expected = gradients_of_large()
    install(model, TILE)
    assert_equal_gradients(gradients_of_large(), expected, TOLERANCE)
    assert calls  # of the norms


def test_the_start_up_line():
    model = build("qwen3_moe")
    install(model, "auto")
    assert token_tiles.describe(model, "auto") == ("on", "long rows in tiles of tokens (mlp_tokens_per_tile: auto)")
    assert token_tiles.describe(model, "off")[0] == "off"
    other = build("opt")
    install(other, 64)
    heading, line = token_tiles.describe(other, 64)
    assert heading == "as stock TRL" and "MLP" in line
