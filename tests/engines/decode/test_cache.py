"""A cache whose rows are repeated and dropped, compared with the cache of the repeated rows."""

import pytest
import torch

from tests.engines.decode.test_decoding import MODELS, build
from tests.prefix_sharing.helpers import RECURRENT
from tests.prefix_sharing.helpers import build as build_family
from trl_fsdp_qlora.engines.decode.cache import PreallocatedLayer, take_rows, unrepeatable

PROMPTS = torch.tensor([[20, 21, 22, 23], [30, 31, 32, 33]])
CHOSEN = torch.tensor([1, 0, 1])


def model_of(name):
    return build(name) if name in MODELS else build_family(RECURRENT[name][0]).eval()


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gpt-oss", "qwen3_5", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("room", [None, 64], ids=["as it is", "with room"])
@torch.no_grad()
def test_taken_rows_continue_like_rows_that_were_computed(name, room):
    model = model_of(name)
    assert unrepeatable(model.config) is None
    taken = model(PROMPTS, use_cache=True).past_key_values
    take_rows(taken, CHOSEN, room)
    computed = model(PROMPTS[CHOSEN], use_cache=True).past_key_values
    # More tokens than the room that is made at once.
    for token in range(40, 60):
        ids = torch.full((len(CHOSEN), 1), token)
        of_taken = model(ids, past_key_values=taken, use_cache=True).logits
        of_computed = model(ids, past_key_values=computed, use_cache=True).logits
        torch.testing.assert_close(of_taken, of_computed, atol=1e-5, rtol=1e-5)
    take_rows(taken, torch.tensor([2]))
    take_rows(computed, torch.tensor([2]))
    ids = torch.tensor([[7]])
    of_taken = model(ids, past_key_values=taken).logits
    torch.testing.assert_close(of_taken, model(ids, past_key_values=computed).logits, atol=1e-5, rtol=1e-5)


def test_memory_never_holds_more_positions_than_the_longest_row():
    keys = torch.randn(1, 2, 5, 4)
    layer = PreallocatedLayer(keys, keys.clone(), torch.tensor([0, 0]), max_length=9)
    assert [memory.shape for memory in layer._allocated] == [(2, 2, 9, 4)] * 2
    for _ in range(4):
        new = torch.randn(2, 2, 1, 4)
        layer.update(new, new)
    assert layer.get_seq_length() == 9 and layer._allocated[0].shape[-2] == 9
    assert torch.equal(layer.keys[1, :, :5], keys[0])
