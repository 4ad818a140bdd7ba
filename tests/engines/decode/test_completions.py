"""Arguments of an engine, and problems dealt to ranks. What `complete` draws is compared in `test_decoding.py`."""

import pytest
import torch
from transformers import GenerationConfig

from trl_fsdp_qlora.engines.decode.completions import over_ranks, sampling, vision_tensors

COMMON = {"max_new_tokens": 7, "eos_token_id": [2, 5], "pad_token_id": 0}


def test_vllm_gets_what_a_generation_config_sets():
    greedy = sampling(GenerationConfig(do_sample=False, **COMMON), None)
    assert greedy == {"max_tokens": 7, "stop_token_ids": [2, 5], "temperature": 0.0}
    drawn = sampling(GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, top_k=0, **COMMON), 11)
    assert (drawn["temperature"], drawn["top_p"], drawn["top_k"], drawn["seed"]) == (0.7, 0.9, 0, 11)
    assert sampling(GenerationConfig(do_sample=True, **COMMON), 11)["temperature"] == 1.0


@pytest.mark.parametrize(("count", "size"), [(7, 3), (6, 3), (2, 5), (0, 4)])
def test_each_problem_is_scored_once_and_in_order(count, size):
    drawn = []

    def generate(batch: range) -> range:
        drawn.append(batch)
        return batch

    assert over_ranks(count, size, generate, lambda batch, completions: list(completions)) == list(range(count))
    assert all(len(batch) <= size for batch in drawn)
    assert [problem for batch in drawn for problem in batch] == list(range(count))


def test_token_types_are_padded_on_the_left_like_their_prompts():
    fields = {"token_type_ids": [[1, 1], [0, 1, 1, 0]], "pixel_values": [[0.5], [0.25]], "num_images": [1, 1]}
    tensors = vision_tensors(fields, width=4)
    assert tensors["token_type_ids"].tolist() == [[0, 0, 1, 1], [0, 1, 1, 0]]
    assert torch.equal(tensors["pixel_values"], torch.tensor([[0.5], [0.25]], dtype=torch.float64))
    assert tensors["num_images"] == [1, 1]
