"""Every metric of stock TRL has its name here too, for each feature that runs without a GPU."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from tests.rollout.test_continuous_batching import SMALL_CACHE
from tests.rollout.test_correction import Engine
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat.vllm import trl_starts
from trl_fsdp_qlora.rollout import engine as engines

WITH_VLLM = {"use_vllm": True, "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 4}
FEATURES = {
    "as it comes": {},
    "beta": {"beta": 0.1},
    "several iterations": {"num_iterations": 2, "max_steps": 4},
    "delta": {"num_iterations": 2, "max_steps": 4, "delta": 2.0},
    "cispo": {"loss_type": "cispo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "entropy": {"top_entropy_quantile": 0.5},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, "num_iterations": 2, "max_steps": 4},
    "truncated": {"mask_truncated_completions": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "continuous batching": {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": SMALL_CACHE,
    },
    "vLLM": WITH_VLLM,
    "vLLM, a sequence's weight": {**WITH_VLLM, "vllm_importance_sampling_mode": "sequence_mask"},
    "vLLM, off-policy": {**WITH_VLLM, "num_iterations": 2, "max_steps": 4},
    "vLLM, uncorrected": {**WITH_VLLM, "vllm_importance_sampling_correction": False},
}


def names(trainer_class, config_class, folder, **changes) -> set[str]:
    torch.manual_seed(0)
    data = {"eval_dataset": tiny.prompts(8)} if "eval_strategy" in changes else {}
    made = trainer_class(
        tiny.tiny_model(),
        tiny.digit_share,
        tiny.config(config_class, folder, **{"max_steps": 2, **changes}),
        tiny.prompts(),
        processing_class=tiny.character_tokenizer(),
        peft_config=tiny.lora(),
        **data,
    )
    made.train()
    return {name for entry in made.state.log_history for name in entry}


@pytest.fixture
def engine(monkeypatch):
    """Stands for vLLM's in both trainers."""
    made = Engine(tiny.character_tokenizer().eos_token_id, tiny.tiny_model().config.vocab_size)
    monkeypatch.setattr(engines, "start_engine", lambda *_, **__: made)
    with trl_starts(lambda **_: made, None):
        yield


@pytest.mark.parametrize("feature", FEATURES)
def test_no_metric_of_trls_is_missing(feature, engine, tmp_path):
    stock = names(GRPOTrainer, GRPOConfig, tmp_path / "stock", **FEATURES[feature])
    ours = names(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "ours", **FEATURES[feature])
    assert stock - ours == set()
    assert "loss" in stock and ("vLLM" not in feature or "sampling/sampling_logp_difference/mean" in ours)
