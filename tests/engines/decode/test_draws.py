"""The sampler against the definition: the token at which the cumulated distribution passes a row's own number."""

import pytest
import torch

from tests.engines.decode.test_decoding import PROMPTS, build, sampled
from trl_fsdp_qlora.engines.decode.completions import complete, generate
from trl_fsdp_qlora.engines.decode.decoding import RowUniforms, draw


def inverse(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    upto = weights.double().cumsum(1)
    return (upto <= uniform[:, None] * upto[:, -1:]).sum(1)


@pytest.mark.parametrize("size", [7, 256, 1000])
def test_inversion_is_the_cumulated_distribution(size):
    torch.manual_seed(0)
    weights = torch.rand(64, size) * (torch.rand(64, size) > 0.5)
    weights[:, 3] = 0.5
    for uniform in (torch.rand(64, dtype=torch.float64), torch.arange(64, dtype=torch.float64) / 64):
        assert torch.equal(draw(weights, uniform), inverse(weights, uniform))


def test_no_token_of_probability_zero_is_drawn():
    for weights in ([0, 0, 1, 0, 0], [0.0] * 300 + [1e-30] + [0.0] * 300, [1.0] + [0.0] * 511 + [1e-12] + [0.0] * 90):
        weights = torch.tensor([weights], dtype=torch.float32)
        for u in (0.0, 0.3, 0.5, 1 - 2**-53):
            assert weights[0, draw(weights, torch.tensor([u], dtype=torch.float64)).item()] > 0
    weights = torch.tensor([[0.5, float("nan"), 0.5], [0.5, float("inf"), 0.5], [0.2, 0.3, 0.5]])
    assert draw(weights, torch.full((3,), 0.9, dtype=torch.float64)).tolist() == [-1, -1, 2]


def test_a_rows_numbers_are_its_own_and_uniform():
    everyone, some = (RowUniforms(6, torch.device("cpu"), seed=3) for _ in range(2))
    kept = torch.tensor([1, 4])
    numbers = []
    for _ in range(300):
        numbers.append(everyone.next(torch.arange(6)))
        assert torch.equal(numbers[-1][kept], some.next(kept))
    numbers = torch.stack(numbers).flatten()
    assert len(numbers.unique()) == 1800 and abs(numbers.mean() - 0.5) < 4 / (12 * 1800) ** 0.5
    assert len({RowUniforms(2, torch.device("cpu"), seed=s).next(kept[:1]).item() for s in range(20)}) == 20


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.2}])
@torch.no_grad()
def test_completions_are_drawn_from_the_models_distribution(settings):
    """Each token is the inverse of whole rows' scores, which transformers' own processors shaped, at the row's next
    number.
    """
    model = build()
    config = sampled(max_new_tokens=12, **settings)
    prompts = [PROMPTS[0]] * 16
    torch.manual_seed(9)
    # Takes the number of the global state that the loop takes.
    uniforms = RowUniforms(len(prompts), torch.device("cpu"))
    torch.manual_seed(9)
    drawn, _ = complete(model, prompts, config)
    full = model._prepare_generation_config(config)[0]
    model._prepare_special_tokens(full, True, device=torch.device("cpu"), batch_size=1)
    processors = model._get_logits_processor(full, input_ids_seq_length=9, device="cpu")
    compared = 0
    for step in range(12):
        going = torch.tensor([row for row, tokens in enumerate(drawn) if len(tokens) > step])
        numbers = uniforms.next(torch.arange(len(prompts)))
        if len(going):
            ids = torch.tensor([prompts[row] + drawn[row][:step] for row in going.tolist()])
            scores = processors(ids, model(ids).logits[:, -1])
            drawn_tokens = torch.tensor([drawn[row][step] for row in going.tolist()])
            assert torch.equal(inverse(scores.softmax(-1), numbers[going]), drawn_tokens)
            compared += len(going)
    assert compared == sum(map(len, drawn)) > 50 and len(set(map(tuple, drawn))) > 8


def test_a_rows_draw_is_the_same_with_and_without_other_rows():
    model = build()
    free = generate(model, PROMPTS, sampled(eos_token_id=[63], suppress_tokens=[63]), seed=1)
    ending = generate(model, PROMPTS, sampled(suppress_tokens=[63]), seed=1)
    assert len({len(row) for row in ending}) > 2
    assert all(whole[: len(cut)] == cut for whole, cut in zip(free, ending, strict=True))
    assert generate(model, PROMPTS, sampled(), seed=4) == generate(model, PROMPTS, sampled(), seed=4)
    assert generate(model, PROMPTS, sampled(), seed=4) != generate(model, PROMPTS, sampled(), seed=5)
    after = []
    for tokens in (2, 20):  # one number of the global state, however long the completions are
        torch.manual_seed(9)
        complete(model, PROMPTS, sampled(max_new_tokens=tokens))
        after.append(torch.rand(3))
    assert torch.equal(*after)
