"""One completion a prompt, without giving up any other check of TRL's."""

import dataclasses

import pytest
from trl import GRPOConfig

from trl_fsdp_qlora import AStarPOConfig, EfficientGRPOConfig

BASE = {"output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": "none"}


def test_one_completion_is_the_default_and_any_batch_size_fits():
    config = AStarPOConfig(**BASE, per_device_train_batch_size=7, gradient_accumulation_steps=3)
    assert config.num_generations == 1
    assert (config.generation_batch_size, config.steps_per_generation) == (21, 3)
    assert isinstance(config, EfficientGRPOConfig)
    with pytest.raises(ValueError, match="at least 2 generations"):
        GRPOConfig(**BASE, num_generations=1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # what TRL renamed is passed on as well
@pytest.mark.parametrize(
    "settings",
    [
        {"steps_per_generation": 8, "gradient_accumulation_steps": 4},
        {"generation_batch_size": 32},
        {"use_transformers_paged": True},
        {"vllm_importance_sampling_cap": 2.5},
    ],
)
def test_with_two_completions_it_derives_what_trl_derives(settings):
    settings = {**BASE, "num_generations": 2, **settings}
    ours, stock = AStarPOConfig(**settings), GRPOConfig(**settings)
    # A*-PO's own defaults, and one of this package's
    different = {"beta", "entropy_coef", "vllm_importance_sampling_correction", "vllm_server_timeout"}
    for field in dataclasses.fields(GRPOConfig):
        if field.name not in different and field.name != "logging_dir":
            assert getattr(ours, field.name) == getattr(stock, field.name), field.name


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trls_own_checks_run_for_one_completion_too():
    assert AStarPOConfig(**BASE, use_transformers_paged=True).use_transformers_continuous_batching
    assert type(AStarPOConfig(**BASE).num_generations) is int
    with pytest.raises(ValueError, match="vllm_importance_sampling_clip_min"):
        AStarPOConfig(**BASE, vllm_importance_sampling_clip_min=3.0, vllm_importance_sampling_clip_max=2.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "dpo"}, "objective='dpo'"),
        ({"beta": 0.0}, "reference policy"),
        ({"beta1": -1.0}, "temperature"),
        ({"value_samples": 0}, "value_samples=0"),
        ({"value_samples_min": 9}, "above value_samples"),
        ({"value_reward_range": [1.0, 0.0]}, "low < high"),
        ({"value_reward_range": None, "value_samples_min": 2}, "needs it for the interval"),
        ({"num_generations": 0}, "num_generations=0"),
    ],
)
def test_bad_settings_say_what_to_change(settings, message):
    with pytest.raises(ValueError, match=message):
        AStarPOConfig(**BASE, **settings)
