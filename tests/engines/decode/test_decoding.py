"""The compact decoding loop against transformers' own: greedy completions token by token, and what is drawn whatever
else runs.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    GenerationConfig,
    GenerationMixin,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)
from transformers.generation import WatermarkingConfig

from tests.prefix_sharing.helpers import FROM_NO_STATE, MULTIMODAL, RECURRENT
from tests.prefix_sharing.helpers import build as build_family
from tests.prefix_sharing.test_images import COMPLETION, FAMILIES, IMAGE, ROWS, with_images
from tests.tiny import these_first
from tests.trainers.sharing.test_images import llava_trainer
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.engines.decode.completions import CompletionOptions, complete
from trl_fsdp_qlora.engines.decode.decoding import Decoding, why_stock

VOCABULARY = 64
PAD = 0
EOS = [3, 5, 7, 11, 13]
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.2, "pad_token_id": PAD,
}  # fmt: skip
ROTARY = {"rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
MODELS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-sliding": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=2),
    "mistral-sliding": MistralConfig(**SIZES, sliding_window=5),
    "gemma2": Gemma2Config(**SIZES, sliding_window=6),
    "moe": Qwen2MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "gpt-oss": GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    # Throws its cache away when it changes tables.
    "longrope": Phi3Config(
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        original_max_position_embeddings=14,
        rope_parameters={**ROTARY, **LONG, "original_max_position_embeddings": 14},
    ),
    "dynamic": LlamaConfig(
        **SIZES | {"max_position_embeddings": 14}, rope_parameters={**ROTARY, "rope_type": "dynamic"}
    ),
}
LENGTH_DEPENDENT = ("longrope", "dynamic")
# Two groups of prompts of different lengths, and one prompt by itself.
PROMPTS = [[20, 21, 22, 23, 24, 25, 26, 27, 28]] * 4 + [[30, 31, 32]] * 4 + [[40, 41, 42, 43, 44]]


def build(name="llama"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).float().eval()


def greedy(**changes):
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": PAD, "eos_token_id": EOS, **changes}
    return GenerationConfig(**settings, disable_compile=True)


def sampled(**changes):
    return greedy(**{"do_sample": True, "top_k": 0, **changes})


TEXT = [
    *(name for name in MODELS if name not in LENGTH_DEPENDENT),
    *RECURRENT,
    *FROM_NO_STATE,
    *(f"{name} (text)" for name in MULTIMODAL),
]


@pytest.mark.parametrize("name", these_first(TEXT, *TEXT[::6]))
def test_greedy_is_token_identical(name):
    """States of recurrent layers are repeated and dropped with keys and values; positions may have several axes."""
    family = MULTIMODAL.get(name.removesuffix(" (text)")) or FROM_NO_STATE.get(name) or RECURRENT.get(name, [None])[0]
    try:
        model = build(name) if name in MODELS else build_family(family)
    except AttributeError as missing:  # a class that transformers 5.17 does not have
        pytest.skip(str(missing))
    expected, nothing = complete(model, PROMPTS, greedy(), CompletionOptions(compact=False))
    actual, work = complete(model, PROMPTS, greedy())
    assert nothing is None and actual == expected
    assert (work.prefill_tokens, work.prefill_tokens_stock) == (3 * 9, 9 * 9)
    assert work.row_steps_stock == 9 * (max(map(len, actual)) - 1)
    # A row takes part in every forward but the one that would follow its last token.
    assert work.row_steps == sum(len(row) - 1 for row in actual)
    # Otherwise no row was dropped before the others.
    assert len({len(row) for row in actual}) > 1 or name not in MODELS


@pytest.mark.parametrize("name", these_first(FAMILIES, *[*FAMILIES][::6]))
def test_greedy_is_token_identical_for_prompts_with_images(name, tmp_path):
    """Against transformers' loop on a batch that holds each image per row."""
    model, batch = with_images(name)
    vision = {**batch.vision, "num_images": batch.num_images}
    ids = batch.input_ids[:, :-COMPLETION]
    mask = batch.attention_mask[:, :-COMPLETION]
    prompts = [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
    vision = {n: x[:, :-COMPLETION] if n.endswith("token_type_ids") else x for n, x in vision.items()}
    config = greedy(suppress_tokens=[IMAGE])
    expected, _ = complete(model.eval(), prompts, config, CompletionOptions(compact=False, vision=vision))
    # If a forward may be collective (`None`), the prefill runs the vision tower; otherwise `generate` has run it.
    for synced_gpus in (False, None):
        actual, work = complete(model, prompts, config, CompletionOptions(synced_gpus=synced_gpus, vision=vision))
        assert actual == expected and len({*map(tuple, actual)}) > 3
    assert work.prefill_tokens == 5 * ids.shape[1] and work.prefill_tokens_stock == len(ROWS) * ids.shape[1]
    assert work.row_steps == sum(len(row) - 1 for row in actual)
    _, again = complete(model, prompts, config, CompletionOptions(vision=vision))
    assert again == work  # the loop is found exact by itself
    if name == "llava":
        trainer = llava_trainer(EfficientGRPOTrainer, tmp_path, max_steps=1, compact_generation=True)
        trainer.train()
        step = trainer.state.log_history[0]
        assert step["generation/prefill_tokens"] == step["generation/prefill_tokens_stock"] / 4
        for counts in (None, [1]):  # which image belongs to which prompt is not known
            other_arguments = {n: x for n, x in (vision | {"num_images": counts}).items() if x is not None}
            _, work = complete(model, prompts, greedy(max_new_tokens=2), CompletionOptions(vision=other_arguments))
            assert work is None


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 15},
        {"no_repeat_ngram_size": 2},
        {"prefill_chunk_size": 4},
        {"bad_words_ids": [[49], [32, 32]], "renormalize_logits": True, "suppress_tokens": [20, 33]},
        {"max_new_tokens": 150, "eos_token_id": [3]},  # room for the cache grows
        {"watermarking_config": WatermarkingConfig(bias=3.0)},  # looks at the whole batch, which is kept
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_greedy_with_processors(changes):
    model = build("qwen3-sliding" if "prefill_chunk_size" in changes else "llama")
    expected, _ = complete(model, PROMPTS, greedy(**changes), CompletionOptions(compact=False))
    actual, work = complete(model, PROMPTS, greedy(**changes))
    assert actual == expected and work.prefill_tokens < work.prefill_tokens_stock
    assert (work.row_steps < work.row_steps_stock) == ("watermarking_config" not in changes)
    unprocessed, _ = complete(model, PROMPTS, greedy(), CompletionOptions(compact=False))
    assert expected != unprocessed or "prefill_chunk_size" in changes


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_rotary_tables_of_the_longest_row(name):
    """They depend on rows that have ended; so these stay, where a row may grow beyond the limit."""
    for tokens in (24, 5):  # built again: dynamic tables remember the longest row that they have seen
        settings = greedy(max_new_tokens=tokens)
        completions, work = complete(build(name), PROMPTS, settings)
        assert completions == complete(build(name), PROMPTS, settings, CompletionOptions(compact=False))[0]
        assert work.row_steps == (work.row_steps_stock if tokens == 24 else sum(len(row) - 1 for row in completions))


@pytest.mark.parametrize("name", ["minimax", "rwkv", "t5", "openai-gpt"])
def test_models_with_a_cache_of_their_own_or_none_are_refused(name):
    with torch.device("meta"):
        auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
        model = auto.from_config(AutoConfig.for_model(name))
    assert why_stock(model, GenerationConfig(do_sample=True)) is not None


def test_recurrent_gemma_keeps_transformers_loop():
    """Its recurrent states are attributes of its layers: repeating a cache does not repeat them, and it returns
    none.
    """
    sizes = {
        name: value for name, value in SIZES.items() if name not in ("max_position_embeddings", "initializer_range")
    }
    config = RecurrentGemmaConfig(**sizes | {"num_hidden_layers": 3, "intermediate_size": 96}, lru_width=32)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    assert "recurrent layers of a kind that is not known" in why_stock(model, greedy())
    expected, _ = complete(model, PROMPTS, greedy(), CompletionOptions(compact=False))
    assert complete(model, PROMPTS, greedy()) == (expected, None)


class GeneratesItself(LlamaForCausalLM):
    def generate(self, *args, **kwargs):
        return super().generate(*args, custom_generate=Decoding(), **kwargs)


class SamplesItself(LlamaForCausalLM):
    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return torch.cat([input_ids, torch.full((len(input_ids), 2), 20)], 1)


def generates_one_token(input_ids, **kwargs):
    """Of every row it is given, in their order."""
    return torch.cat([input_ids, input_ids[:, -1:]], 1)


@pytest.mark.parametrize("replaced", ["class", "_sample", "object", "adapted object", "adapter", "GenerationMixin"])
def test_generation_of_the_models_own_gets_what_stock_gives_it(replaced, monkeypatch):
    classes = {"class": GeneratesItself, "_sample": SamplesItself}
    torch.manual_seed(0)
    model = classes.get(replaced, LlamaForCausalLM)(copy.deepcopy(MODELS["llama"])).eval()
    if "adapte" in replaced:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")).eval()
    if replaced not in classes:
        assert why_stock(model, greedy()) is None
        owner = model.get_base_model() if replaced == "adapted object" else model
        if replaced == "GenerationMixin":
            monkeypatch.setattr(GenerationMixin, "generate", staticmethod(generates_one_token))
        else:
            monkeypatch.setattr(owner, "generate", generates_one_token)
    assert "not transformers' own" in why_stock(model, greedy())
    completions, work = complete(model, PROMPTS, greedy())
    assert work is None and len(completions) == len(PROMPTS)
    if replaced == "_sample":
        assert completions == [[20, 20]] * len(PROMPTS)
    elif replaced != "class":
        assert completions == [[prompt[-1]] for prompt in PROMPTS]
    else:
        plain = LlamaForCausalLM(copy.deepcopy(MODELS["llama"])).eval()
        plain.load_state_dict(model.state_dict())
        assert completions == complete(plain, PROMPTS, greedy(), CompletionOptions(compact=False))[0]


def test_fsdp_registers_generate_and_it_stays_transformers_own():
    """As transformers' Trainer does at each `train()`."""
    is_first = not torch.distributed.is_initialized()  # an engine of vLLM in this process has left its group
    if is_first:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = build()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for _ in range(2):
            register_fsdp_forward_method(model, "generate")
        assert why_stock(model, greedy()) is None
    finally:
        if is_first:
            torch.distributed.destroy_process_group()


def test_nan_raises_the_librarys_error():
    model = build()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    for compact in (True, False):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            complete(model, PROMPTS, sampled(), CompletionOptions(compact=compact))
