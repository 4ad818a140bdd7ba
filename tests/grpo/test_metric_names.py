"""Every metric of stock TRL has its name here too, for features that test_equals_stock.py does not train."""

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests import tiny
from tests.rollout.test_one_pass import Engine
from tests.rollout.test_training import SMALL_CACHE
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat.vllm import trl_starts
from trl_fsdp_qlora.rollout import engine as engines

WITH_VLLM = {"use_vllm": True, "num_generations": 2, "per_device_train_batch_size": 4, "max_completion_length": 4}
FEATURES = {
    "delta": {"num_iterations": 2, "max_steps": 3, "delta": 2.0},
    "adaptive entropy": {"use_adaptive_entropy": True, "top_entropy_quantile": 0.5},
    "off-policy mask": {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "continuous batching": {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": SMALL_CACHE,
    },
    "vLLM": WITH_VLLM,
    "vLLM, a sequence's weight": {**WITH_VLLM, "vllm_importance_sampling_mode": "sequence_mask"},
    "vLLM, off-policy": {**WITH_VLLM, "num_iterations": 2},
    "vLLM, uncorrected": {**WITH_VLLM, "vllm_importance_sampling_correction": False},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_no_metric_of_trls_is_missing(feature, tmp_path, monkeypatch):
    changes, names = {"max_steps": 2, **FEATURES[feature]}, []
    engine = Engine(tiny.character_tokenizer().eos_token_id, tiny.tiny_model().config.vocab_size)
    monkeypatch.setattr(engines, "start_engine", lambda *_, **__: engine)
    for cls, config_cls in ((GRPOTrainer, GRPOConfig), (EfficientGRPOTrainer, EfficientGRPOConfig)):
        torch.manual_seed(0)
        given = {"processing_class": tiny.character_tokenizer(), "peft_config": tiny.lora()}
        given |= {"eval_dataset": tiny.prompts(8)} if "eval_strategy" in changes else {}
        args = tiny.config(config_cls, tmp_path / cls.__name__, **changes)
        with trl_starts(lambda **_: engine, None):
            made = cls(tiny.tiny_model(), tiny.digit_share, args, tiny.prompts(), **given)
        made.train()
        names.append({name for entry in made.state.log_history for name in entry})
    stock, ours = names
    assert stock - ours == set()
    assert "loss" in stock and ("vLLM" not in feature or "sampling/sampling_logp_difference/mean" in ours)
