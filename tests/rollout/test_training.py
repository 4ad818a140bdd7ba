"""Rollouts of training through the compact decoding loop, in every trainer."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import lora, prompts, tiny_model, trainer
from trl_fsdp_qlora import (
    AStarPOConfig,
    AStarPOTrainer,
    EfficientGRPOConfig,
    EfficientGRPOTrainer,
    TSPMOConfig,
    TSPMOTrainer,
)

# Almost greedy: the same completions whatever the draws are.
GREEDY = {"generation_kwargs": {"do_sample": False}}
# A third of the vocabulary ends a completion.
ENDS = list(range(3, 14))


def make(cls=EfficientGRPOTrainer, config=EfficientGRPOConfig, folder="unused", ends=ENDS, **changes):
    model = tiny_model()
    model.generation_config.eos_token_id = ends
    return trainer(cls, config, folder, model=model, peft_config=lora(), max_completion_length=16, **changes)


def history(made):
    made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]


def test_greedy_training_equals_stock(tmp_path):
    stock = history(make(GRPOTrainer, GRPOConfig, tmp_path / "stock", **GREEDY))
    ours = history(make(folder=tmp_path / "ours", **GREEDY))
    assert len(ours) == 3
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        for key in ("completions/mean_length", "completions/clipped_ratio", "num_tokens", "reward"):
            assert mine[key] == pytest.approx(theirs[key]), key


def test_metrics_tell_what_ran_and_what_stock_would_have_run(tmp_path):
    made = make(folder=tmp_path)
    seen = []
    turn = made._generate_single_turn

    def watched(prompt_ids, *rest):
        drawn = turn(prompt_ids, *rest)
        seen.append((prompt_ids, drawn[0]))
        return drawn

    made._generate_single_turn = watched
    entries = history(made)
    for entry, (prompt_ids, completions) in zip(entries, seen, strict=True):
        width, longest = max(map(len, prompt_ids)), max(map(len, completions))
        assert entry["generation/prefill_tokens"] == 2 * width
        assert entry["generation/prefill_tokens_stock"] == 8 * width
        assert entry["generation/row_steps_stock"] == 8 * (longest - 1)
        assert entry["generation/row_steps"] == sum(len(row) - 1 for row in completions)
    assert any(e["generation/row_steps"] < e["generation/row_steps_stock"] for e in entries)


def test_a_run_is_reproducible_from_its_seed(tmp_path):
    def losses(seed, name):
        return [entry["loss"] for entry in history(make(folder=tmp_path / name, seed=seed))]

    first = losses(1, "a")
    assert losses(1, "b") == first
    assert losses(2, "c") != first


@pytest.mark.parametrize(
    ("cls", "config", "changes"),
    [
        (TSPMOTrainer, TSPMOConfig, {}),
        (AStarPOTrainer, AStarPOConfig, {"num_generations": 1, "value_samples": 3}),
    ],
    ids=["t_spmo", "a_star_po"],
)
def test_other_trainers(tmp_path, cls, config, changes):
    if cls is AStarPOTrainer:
        changes = {**changes, "value_cache": str(tmp_path / "values")}
    entries = history(make(cls, config, tmp_path, **changes))
    assert all(entry["generation/row_steps"] <= entry["generation/row_steps_stock"] for entry in entries)
    assert any(entry["generation/row_steps"] < entry["generation/row_steps_stock"] for entry in entries)


def test_evaluation_repeats_by_its_own_number(tmp_path):
    made = make(folder=tmp_path, num_generations_eval=2, per_device_eval_batch_size=4)
    made.evaluate(prompts(4))
    logged = made.state.log_history[-1]
    assert logged["eval_generation/prefill_tokens"] == logged["eval_generation/prefill_tokens_stock"] / 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compact_generation": False}, "compact_generation=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"generation_kwargs": {"num_beams": 2}}, "beam sample"),
        ({"generation_kwargs": {"prompt_lookup_num_tokens": 2, "num_beams": 1}}, "assisted generation"),
        ({"generation_kwargs": {"use_cache": False}}, "use_cache=False"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(next(iter(value.values()))),
)
def test_what_is_not_exact_runs_as_stock_and_says_so(tmp_path, changes, said):
    made = make(folder=tmp_path, **changes)
    heading, line = next(feature for feature in made.features() if feature[1].startswith("rollouts:"))
    assert said in line and heading == ("off" if "compact_generation" in changes else "as stock TRL")
    asked = []
    made.rollout.generating = lambda *_: asked.append(1)

    def stock(*turn):
        return "stock", turn

    turn = ([[5, 6]] * 4, None, {}, 4, False)
    assert made.rollout.training_turn(stock, turn, made.model_wrapped, made._generate_settings()) == ("stock", turn)
    assert not asked


@pytest.mark.parametrize("adapter", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_what_decoding_saves_is_said_as_it_is(tmp_path, adapter, bf16):
    """Autocast reaches `generate` where no adapter stands between it and accelerate's wrapper."""
    made = trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft_config=lora() if adapter else None, bf16=bf16
    )
    made.model_wrapped = made.accelerator.prepare_model(made.model)
    line = next(line for _, line in made.features() if line.startswith("decoding:"))
    seen = []
    head = made.accelerator.unwrap_model(made.model_wrapped).get_output_embeddings()
    head.register_forward_hook(lambda _, __, out: seen.append(torch.is_autocast_enabled("cpu")))
    settings = made._generate_settings()
    made.rollout.training_turn(lambda *_: 1 / 0, ([[5, 6]] * 4, None, {}, 4, False), made.model_wrapped, settings)
    assert set(seen) == {"autocast" in line}
    assert ("per row (autocast)" in line) == (bf16 and not adapter)


@pytest.mark.parametrize("name", ["minimax", "rwkv", "t5"])
def test_models_with_a_cache_of_their_own_are_refused(name):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

    from trl_fsdp_qlora.rollout.decoding import why_stock

    with torch.device("meta"):
        auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
        model = auto.from_config(AutoConfig.for_model(name))
    assert why_stock(model, GenerationConfig(do_sample=True)) is not None
