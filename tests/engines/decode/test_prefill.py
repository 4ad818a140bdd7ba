"""`Prefill` in parts, compared with the model's own forward of each prompt by itself: last logits, and the cache."""

import pytest
import torch

from tests.engines.decode.test_decoding import PAD, build, greedy
from trl_fsdp_qlora.compat.transformers import CACHE
from trl_fsdp_qlora.engines.decode.prefill import Prefill, padding_of, rows_of
from trl_fsdp_qlora.engines.decode.turns import Continuation

PROMPTS = [[20, 21, 22, 23, 24, 25], [30, 31], [40, 41, 42, 43]]
WIDTH = max(map(len, PROMPTS))


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `(3, WIDTH)` with padding on the left, and their mask."""
    ids = torch.tensor([[PAD] * (WIDTH - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (WIDTH - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    return ids, mask


def whole(rows: list[int]) -> Continuation:
    return Continuation(rows, [None] * len(rows), max(len(PROMPTS[row]) for row in rows))


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[1], [0, 2]], [[2], [1], [0]]], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.no_grad()
def test_prompts_in_any_parts_equal_each_prompt_alone(name, parts):
    model = build(name)
    ids, mask = padded()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True, "logits_to_keep": 1}
    config = greedy()
    model._prepare_special_tokens(config)
    prefill = Prefill(model, ids, arguments, CACHE, config, synced_gpus=False, pixels={})
    outputs = prefill.run([whole(rows) for rows in parts])
    assert prefill.tokens == sum(len(rows) * whole(rows).new for rows in parts)
    for row, prompt in enumerate(PROMPTS):
        alone = model(torch.tensor([prompt]), use_cache=True)
        torch.testing.assert_close(outputs.logits[row, -1], alone.logits[0, -1], atol=1e-5, rtol=1e-5)
        for layer, layer_alone in zip(outputs[CACHE].layers, alone[CACHE].layers, strict=True):
            keys = layer.keys[row, :, -len(prompt) :]
            torch.testing.assert_close(keys, layer_alone.keys[0], atol=1e-5, rtol=1e-5)


def test_padding_is_counted_by_the_mask():
    ids, mask = padded()
    assert padding_of(ids, {"attention_mask": mask}).tolist() == [0, 4, 2]
    assert padding_of(ids, {}).tolist() == [0, 0, 0]


def test_rows_are_chosen_of_arguments_with_an_entry_for_each():
    rows = torch.tensor([2, 0])
    x = torch.arange(6).view(3, 2)
    assert rows_of("attention_mask", x, rows).tolist() == [[4, 5], [0, 1]]
    assert rows_of("position_ids", x.expand(3, 3, 2), rows).shape == (3, 2, 2)  # several axes, `(axes, rows, tokens)`
    assert rows_of("use_cache", True, rows) is True
