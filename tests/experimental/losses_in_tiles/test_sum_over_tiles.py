"""A sum over tokens in tiles: value and gradients of the same sum over all tokens at once."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

from trl_fsdp_qlora.experimental.losses_in_tiles.sum_over_tiles import SumOverTiles, tiles_of


def draw(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    """Hidden states, head and bias; targets and weights of the tokens."""
    torch.manual_seed(0)
    shapes = ((tokens, 6), (7, 6), (7,))
    parts = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]
    return *parts, torch.randint(7, (tokens,)), torch.rand(tokens, dtype=torch.float64)


def in_tiles(hidden, head, bias, targets, weights, size):
    def loss_of_tile(tile, hidden_TH, weight_VH, bias_V):
        return cross_entropy(linear(hidden_TH, weight_VH, bias_V).double(), targets[tile], reduction="none")

    tiles = [slice(start, start + size) for start in range(0, len(hidden), size)]
    return SumOverTiles.apply(loss_of_tile, tiles, weights, hidden, head, bias)


@pytest.mark.parametrize("tokens", [11, 0])
@pytest.mark.parametrize(
    "trained", [(True, True, True), (True, False, False), (False, True, False), (False, False, False)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_equals_the_sum_over_all_tokens(trained, has_bias, tokens):
    *parts, targets, weights = draw(tokens)
    if not has_bias:
        parts[2] = None
    results = []
    for tiled in (False, True):
        inputs = [None if x is None else x.clone().requires_grad_(t) for x, t in zip(parts, trained, strict=True)]
        if tiled:
            loss, losses = in_tiles(*inputs, targets, weights, size=4)
        else:
            losses = cross_entropy(linear(*inputs), targets, reduction="none")
            loss = (losses * weights).sum()
        if any(trained):
            (3 * loss).backward()
        gradients = [x.grad for x in inputs if x is not None and x.requires_grad]
        results.append([loss.detach(), losses.detach(), *gradients])
    torch.testing.assert_close(results[1], results[0])


def test_the_heads_gradient_is_summed_in_float32():
    """Added in bfloat16, the gradients of 512 tiles would be too small for the sum of the earlier ones."""
    *parts, _, _ = draw(1, torch.bfloat16)
    hidden = parts[0].expand(512, -1)
    head = parts[1].requires_grad_()
    targets = torch.zeros(512, dtype=torch.long)
    in_tiles(hidden, head, None, targets, torch.ones(512), size=1)[0].backward()
    exact = head.detach().double().requires_grad_()
    cross_entropy(linear(hidden.double(), exact), targets, reduction="sum").backward()
    torch.testing.assert_close(head.grad.double(), exact.grad, rtol=0.02, atol=0.02 * exact.grad.abs().max().item())


def test_tiles_hold_every_token_once():
    for tokens, vocabulary in ((0, 50_000), (1, 2**23), (1000, 50_000)):
        tiles = tiles_of(tokens, vocabulary, on_gpu=False)
        assert [i for tile in tiles for i in range(tokens)[tile]] == list(range(tokens))
        sizes = [len(range(tokens)[tile]) for tile in tiles]
        assert all(size == 1 or size * vocabulary <= 2**22 for size in sizes)
