"""The sampler against exact probabilities."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from tests.rollout.test_decoding import SIZES
from trl_fsdp_qlora.rollout.completions import generate
from trl_fsdp_qlora.rollout.decoding import RowUniforms, draw


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """The statistic and the value it exceeds in one case of ten thousand (Wilson and Hilferty's approximation)."""
    expected = probabilities.double() * counts.sum()
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    return ((counts - expected) ** 2 / expected).sum().item(), limit


def test_inversion_is_the_cumulated_distribution():
    torch.manual_seed(0)
    for size in (7, 256, 1000):
        weights = torch.rand(64, size) * (torch.rand(64, size) > 0.5)
        weights[:, 3] = 0.5
        upto = weights.double().cumsum(1)
        for uniform in (torch.rand(64, dtype=torch.float64), torch.arange(64, dtype=torch.float64) / 64):
            assert torch.equal(draw(weights, uniform), (upto <= uniform[:, None] * upto[:, -1:]).sum(1))


def test_never_a_token_of_probability_zero_and_broken_rows_are_marked():
    for weights in ([0, 0, 1, 0, 0], [0.0] * 300 + [1e-30] + [0.0] * 300, [1.0] + [0.0] * 511 + [1e-12] + [0.0] * 90):
        weights = torch.tensor([weights], dtype=torch.float32)
        for u in (0.0, 0.3, 0.5, 1 - 2**-53):
            assert weights[0, draw(weights, torch.tensor([u], dtype=torch.float64)).item()] > 0
    weights = torch.tensor([[0.5, float("nan"), 0.5], [0.5, float("inf"), 0.5], [0.2, 0.3, 0.5]])
    assert draw(weights, torch.full((3,), 0.9, dtype=torch.float64)).tolist() == [-1, -1, 2]


def test_a_rows_numbers_are_its_own():
    everyone, some = (RowUniforms(6, torch.device("cpu"), seed=3) for _ in range(2))
    kept = torch.tensor([1, 4])
    for _ in range(300):
        assert torch.equal(everyone.next(torch.arange(6))[kept], some.next(kept))
    assert len({RowUniforms(2, torch.device("cpu"), seed=s).next(kept[:1]).item() for s in range(20)}) == 20


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_completions_follow_the_models_distribution(settings):
    # Both tokens of completions of two tokens, over a vocabulary of twelve; ending tokens make rows leave in between.
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 12,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "initializer_range": 0.5,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | sizes)).eval()
    settings = {"top_k": 0, **settings}
    sampling = GenerationConfig(max_new_tokens=2, do_sample=True, pad_token_id=0, eos_token_id=[3], **settings)
    prompt, n = [5, 6, 7], 20_000
    first, pairs = torch.zeros(12), torch.zeros(12, 12)
    for tokens in generate(model, [prompt] * n, sampling, seed=0):
        first[tokens[0]] += 1
        if len(tokens) == 2:
            pairs[tokens[0], tokens[1]] += 1
    config = model._prepare_generation_config(sampling)[0]
    model._prepare_special_tokens(config, True, device=torch.device("cpu"), batch_size=1)
    processors = model._get_logits_processor(config, input_ids_seq_length=3, device="cpu")

    @torch.no_grad()
    def exact(ids):
        return processors(torch.tensor([ids]), model(torch.tensor([ids])).logits[:, -1].double()).softmax(-1)[0]

    rows = [(first, exact(prompt))] + [(pairs[t], exact([*prompt, t])) for t in range(12) if pairs[t].sum() > 1000]
    assert len(rows) > 1
    for counts, probabilities in rows:
        possible = probabilities > 0
        assert counts[~possible].sum() == 0
        statistic, limit = chi_square(counts[possible], probabilities[possible])
        assert statistic < limit
    statistic, limit = chi_square(first[exact(prompt) > 0], exact(prompt)[exact(prompt) > 0].pow(0.9).softmax(0))
    assert statistic > limit
