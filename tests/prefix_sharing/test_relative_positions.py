"""Rows that begin alike in different columns share tokens only if positions matter by their differences alone."""

import pytest
import torch

from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing.relative_positions import family_of, sees_distances

from .every_model import CLASSES, VARIANTS, small_model
from .helpers import VOCABULARY, assert_equal_gradients, build, gradients, small, with_stock_head

FAST = ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForConditionalGeneration", "Qwen3_5ForCausalLM"]
REST = sorted(set(CLASSES) - set(FAST))
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "max_position_embeddings": 64, "llama_4_scaling_beta": 0.5,
}  # fmt: skip
ABSOLUTE = {
    "a norm behind the rotation": small("HunYuanDenseV1", head_dim=8),
    "a norm behind it, mixture": small("HunYuanMoEV1", head_dim=8),
    "a scale by position": small("Ministral3", rope_parameters=_YARN),
    "a setting that is not known": small("Llama", rope_parameters={"rope_theta": 1e4, "rope_type": "default", "x": 1}),
    "a limit of distances": small("Beam"),
    "learned positions": small("OPT"),
}


def with_uneven_norms(model):
    """Norms with equal weights would commute with a rotation."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.4 * torch.randn(parameter.shape, generator=draw))
    return model


def rows_in_columns(*counts: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts with a common beginning, of as many own tokens, with three completions each."""
    draw = torch.Generator().manual_seed(1)
    system = torch.randint(3, VOCABULARY, (9,), generator=draw)
    rows = []
    for count in counts:
        prompt = torch.cat([system, torch.randint(3, VOCABULARY, (count,), generator=draw)])
        rows += [torch.cat([prompt, torch.randint(3, VOCABULARY, (6,), generator=draw)]) for _ in range(3)]
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    labels = ids.clone()
    labels[:, :-6] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def scored(model, batch):
    values = model(**batch, fused_lm_head=True).log_probs
    (values * torch.linspace(0.3, 1.7, values.numel()).view_as(values)).sum().backward()
    return values.detach(), gradients(model)


def moved(model, ids, columns: int) -> torch.Tensor:
    """Hidden states of rows whose positions begin so many columns further right."""
    positions = torch.arange(ids.shape[1]).expand_as(ids) + columns
    return model.base_model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in REST)])
def test_a_known_family_sees_differences_only(name):
    ids = torch.randint(3, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    for variant in VARIANTS:
        try:
            model = with_uneven_norms(small_model(name, variant).eval())
            moved(model, ids, 0)
            break
        except Exception as error:
            reason = error
    else:
        pytest.skip(f"it could not be made small: {reason}")
    if not sees_distances(model):
        pytest.skip("its rows share tokens in equal columns only")
    with torch.no_grad():
        try:
            model.double()
            expected = moved(model, ids, 0)
        except RuntimeError:  # no kernel of grouped products in float64
            model.float()
            expected = moved(model, ids, 0)
        for columns, tolerance in ((1, 1e-4), (7, 1e-4), (40_000, 1e-2)):  # rotary tables are float32
            assert (moved(model, ids, columns) - expected).abs().max() < tolerance * expected.std()


@pytest.mark.parametrize("name", ABSOLUTE)
def test_other_models_share_tokens_in_equal_columns_only(name):
    stock = with_stock_head(with_uneven_norms(build(ABSOLUTE[name])))
    ours = share_prompts(with_stock_head(with_uneven_norms(build(ABSOLUTE[name]))))
    assert not sees_distances(ours)
    for batch in (rows_in_columns(4, 4), rows_in_columns(1, 8, 15)):
        expected = scored(stock, batch)
        values, our_gradients = scored(ours, batch)
        assert ours.prompt_sharing.figures.tokens, ours.prompt_sharing.describe()
        torch.testing.assert_close(values, expected[0], atol=2e-5, rtol=1e-5)
        assert_equal_gradients(our_gradients, expected[1], tolerance=2e-5)


def test_layers_of_the_users_own_are_not_known():
    class Attention(type(build("llama").model.layers[0].self_attn)):
        pass

    model = build("llama")
    assert sees_distances(model)
    model.model.layers[1].self_attn.__class__ = Attention
    assert family_of(Attention) is None and not sees_distances(model)
