"""`RandomState`: draws are repeated inside its block, and the draws after the block are those without it."""

import pytest
import torch

from trl_fsdp_qlora.utils.random_state import RandomState

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_repeats_the_draws_after_the_state(device):
    device = torch.device(device)
    torch.manual_seed(0)
    expected = [(torch.rand(3), torch.rand(3, device=device)) for _ in range(2)]
    torch.manual_seed(0)
    state = RandomState(device)
    first = torch.rand(3), torch.rand(3, device=device)
    for _ in range(2):  # a state may be used again
        with state.again():
            again = torch.rand(3), torch.rand(3, device=device)
        assert all(map(torch.equal, again, first))
    second = torch.rand(3), torch.rand(3, device=device)
    for drawn, wanted in zip((first, second), expected, strict=True):
        assert all(map(torch.equal, drawn, wanted))


def test_an_exception_in_the_block_leaves_the_later_draws():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with pytest.raises(KeyError), RandomState(torch.device("cpu")).again():
        torch.rand(100)
        raise KeyError
    assert torch.equal(torch.rand(3), expected)
