"""The compact decoding loop against transformers' own, and its sampler against exact probabilities."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    OpenAIGPTConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from tests.prefix_sharing.helpers import MULTIMODAL, RECURRENT, make_trainer, processor
from tests.prefix_sharing.helpers import build as build_family
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.rollout.completions import complete, generate
from trl_fsdp_qlora.rollout.decoding import Decoding

VOCABULARY, PAD, EOS = 64, 0, [3, 5, 7, 11, 13]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": PAD,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-sliding": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "mistral-sliding": MistralConfig(**SIZES, sliding_window=5),
    "gemma2": Gemma2Config(**SIZES, sliding_window=6),
    "moe": Qwen2MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
}
# Two groups of prompts of different lengths, and one prompt that stands alone.
PROMPTS = [[20, 21, 22, 23, 24, 25, 26, 27, 28]] * 4 + [[30, 31, 32]] * 4 + [[40, 41, 42, 43, 44]]


def build(name="llama"):
    torch.manual_seed(0)
    config = copy.deepcopy(MODELS[name])
    return AutoModelForCausalLM.from_config(config).float().eval()


def greedy(**changes):
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS, **changes}
    return GenerationConfig(**settings, disable_compile=True)


def sampled(**changes):
    return greedy(**{"do_sample": True, "top_k": 0, **changes})


@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_token_identical(name):
    model = build(name)
    expected, nothing = complete(model, PROMPTS, greedy(), compact=False)
    found, work = complete(model, PROMPTS, greedy())
    assert nothing is None
    assert found == expected
    lengths = {len(row) for row in found}
    assert len(lengths) > 1  # otherwise no row was dropped before the others
    assert work.prefill_tokens == 3 * 9
    assert work.prefill_tokens_stock == 9 * 9
    longest = max(lengths)
    assert work.row_steps_stock == 9 * (longest - 1)
    # A row takes part in every forward but the one that would follow its last token.
    assert work.row_steps == sum(len(row) - 1 for row in found)


@pytest.mark.parametrize("name", [*RECURRENT, *(f"{name} (text)" for name in MULTIMODAL)])
def test_greedy_is_token_identical_for_recurrent_and_multimodal_classes(name):
    """States are repeated and dropped with keys and values; positions may have several axes."""
    model = build_family(MULTIMODAL[name.removesuffix(" (text)")] if "text" in name else RECURRENT[name][0])
    expected, _ = complete(model, PROMPTS, greedy(), compact=False)
    found, work = complete(model, PROMPTS, greedy())
    assert found == expected
    assert work.prefill_tokens == 3 * 9
    assert work.row_steps == sum(len(row) - 1 for row in found)


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 15},
        {"no_repeat_ngram_size": 2},
        {"suppress_tokens": [20, 33]},
        {"prefill_chunk_size": 4},
        {"bad_words_ids": [[49], [32, 32]], "renormalize_logits": True},
        {"max_new_tokens": 150, "eos_token_id": [3]},  # room for the cache grows
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_greedy_with_processors(changes):
    model = build("qwen3-sliding" if "prefill_chunk_size" in changes else "llama")
    expected, _ = complete(model, PROMPTS, greedy(**changes), compact=False)
    found, work = complete(model, PROMPTS, greedy(**changes))
    assert found == expected
    assert work.row_steps < work.row_steps_stock
    assert expected != complete(model, PROMPTS, greedy(), compact=False)[0] or "prefill_chunk_size" in changes


def test_processors_that_look_at_the_batch_keep_it_whole():
    from transformers.generation import WatermarkingConfig

    model, config = build(), greedy(watermarking_config=WatermarkingConfig(bias=3.0))
    expected, _ = complete(model, PROMPTS, config, compact=False)
    found, work = complete(model, PROMPTS, config)
    assert found == expected
    assert work.row_steps == work.row_steps_stock
    assert work.prefill_tokens < work.prefill_tokens_stock


ROTARY = {"rope_theta": 1e4, "factor": 2.0}
LENGTH_DEPENDENT = {
    # Throws its cache away where it changes tables.
    "longrope": Phi3Config(
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        original_max_position_embeddings=14,
        rope_parameters={
            **ROTARY,
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [3.0] * 4,
            "original_max_position_embeddings": 14,
        },
    ),
    "dynamic": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 14}, rope_parameters={**ROTARY, "rope_type": "dynamic"}
    ),
}


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_rotary_tables_of_the_longest_row(name):
    """They depend on rows that have ended; so these stay, where a row may grow beyond the limit."""

    def run(compact, tokens):
        torch.manual_seed(0)  # built anew: dynamic tables remember the longest row that they have seen
        model = AutoModelForCausalLM.from_config(copy.deepcopy(LENGTH_DEPENDENT[name])).float().eval()
        return complete(model, PROMPTS, greedy(max_new_tokens=tokens), compact=compact)

    found, work = run(True, 24)
    assert found == run(False, 24)[0]
    assert max(map(len, found)) > 14 and work.row_steps == work.row_steps_stock
    short, work = run(True, 5)
    assert short == run(False, 5)[0] and work.row_steps == sum(len(row) - 1 for row in short)


def test_the_padded_matrix_is_the_librarys():
    model = build()
    ids = torch.tensor([[20, 21, 22]] * 2 + [[30, 31, 32]] * 2)
    expected = model.generate(ids, generation_config=greedy())
    assert torch.equal(model.generate(ids, generation_config=greedy(), custom_generate=Decoding()), expected)
    assert (expected == PAD).any()
    without_end = greedy(eos_token_id=None, max_new_tokens=6)
    expected = model.generate(ids, generation_config=without_end)
    found = model.generate(ids, generation_config=without_end, custom_generate=Decoding())
    assert torch.equal(found, expected)


def test_a_model_without_a_cache_runs_as_stock():
    torch.manual_seed(0)
    config = OpenAIGPTConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected, _ = complete(model, PROMPTS, greedy(), compact=False)
    assert complete(model, PROMPTS, greedy()) == (expected, None)


def test_adapters():
    model = get_peft_model(build(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    found, expected = (complete(model, PROMPTS, greedy(), compact=c)[0] for c in (True, False))
    assert found == expected
    with model.disable_adapter():
        base, expected = (complete(model, PROMPTS, greedy(), compact=c)[0] for c in (True, False))
    assert base == expected
    assert base != found


# --- sampling -------------------------------------------------------------------------------------------------------


def test_a_rows_draw_does_not_depend_on_which_rows_have_finished():
    model = build()
    free = generate(model, PROMPTS, sampled(eos_token_id=[63], suppress_tokens=[63]), seed=1)
    ending = generate(model, PROMPTS, sampled(suppress_tokens=[63]), seed=1)
    assert len({len(row) for row in ending}) > 2
    assert all(whole[: len(cut)] == cut for whole, cut in zip(free, ending, strict=True))


def test_reproducible_from_the_seed_and_one_number_of_the_global_state():
    model = build()
    assert generate(model, PROMPTS, sampled(), seed=4) == generate(model, PROMPTS, sampled(), seed=4)
    assert generate(model, PROMPTS, sampled(), seed=4) != generate(model, PROMPTS, sampled(), seed=5)
    after = []
    for tokens in (2, 20):  # however long the completions are
        torch.manual_seed(9)
        complete(model, PROMPTS, sampled(max_new_tokens=tokens))
        after.append(torch.rand(3))
    assert torch.equal(*after)


def test_nan_is_told_as_by_the_library():
    model = build()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    for compact in (True, False):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            complete(model, PROMPTS, sampled(), compact=compact)


def test_text_of_a_processor_is_no_run_with_images(tmp_path, monkeypatch):
    """A chat template of a processor gives fields of its own for text, too."""
    model = build_family(MULTIMODAL["gemma3"])
    trainer = make_trainer(
        EfficientGRPOTrainer, model, tmp_path, processing_class=processor(), compact_generation=True
    )
    ids = [[20, 21, 22]] * 4
    stock = []
    monkeypatch.setattr("trl.GRPOTrainer._generate_single_turn", lambda self, *turn: stock.append(turn))
    trainer._generate_single_turn(ids, None, {"token_type_ids": [[0] * 3] * 4}, 4)
    assert not stock
    trainer._generate_single_turn(ids, None, {"pixel_values": torch.zeros(1)}, 4)
    assert stock
