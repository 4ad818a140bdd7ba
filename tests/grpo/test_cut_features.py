"""What a step may have next to its loss, in micro-batches and passes of any size: as each micro-batch by itself."""

import pytest

from tests.tiny import even_start, lora, these_first
from trl_fsdp_qlora import (
    AStarPOConfig,
    AStarPOTrainer,
    EfficientRLOOConfig,
    EfficientRLOOTrainer,
    TSPMOConfig,
    TSPMOTrainer,
)

from .test_broken_off_steps import assert_as_alone, every_split, short_beginnings  # noqa: F401 (a fixture)


def dora():
    adapter = lora()
    adapter.use_dora = True
    return adapter


def checkpointed(**options):
    """Transformers' own checkpointing, switched on as its trainer does without PEFT."""

    def run(trainer):
        trainer.accelerator.unwrap_model(trainer.model).get_base_model().activation_checkpointing_enable(**options)
        trainer.model.enable_input_require_grads()
        trainer.train()

    return run


A_STAR_PO = {"cls": AStarPOTrainer, "config": AStarPOConfig, "reward": even_start, "num_generations": 4, "beta": 0.1}

FEATURES = {
    "selected tokens": {"token_selection": "s_grpo"},
    "prefix cut": {"token_selection": "prefix_cut", "token_selection_rate": 0.6},
    "groups without a signal": {"reward": even_start, "max_steps": 4},
    "further prompts": {"reward": even_start, "dynamic_sampling": True},
    "entropy quantile": {"top_entropy_quantile": 0.5},
    "KL term": {"beta": 0.1, "num_iterations": 2},
    "DoRA": {"peft_config": dora()},
    "checkpointing, offloaded": {"run": checkpointed(offload=True)},
    "checkpointing every other layer": {"run": checkpointed(every_n_layers=2)},
    "RLOO": {"cls": EfficientRLOOTrainer, "config": EfficientRLOOConfig, "beta": 0.1},
    "T-SPMO": {"cls": TSPMOTrainer, "config": TSPMOConfig, "learning_rate": 3.0},
    "A*-PO": {**A_STAR_PO, "learning_rate": 1.0},
    "A*-PO, weighted by advantages": {**A_STAR_PO, "objective": "advantage_weighted", "entropy_coef": 0.01},
    # Products of bfloat16 are rounded to 0.4%, and each split adds them up in another order.
    "bfloat16": {"bf16": True, "tolerance": 0.2},
}
FIRST = ("selected tokens", "groups without a signal", "T-SPMO", "A*-PO", "bfloat16")


@pytest.fixture(autouse=True)
def no_values_of_other_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_FSDP_QLORA_CACHE", str(tmp_path / "cache"))


@every_split
@pytest.mark.parametrize("feature", these_first(FEATURES, *FIRST))
def test_a_feature_in_any_passes(tmp_path, split, feature):
    trainer = assert_as_alone(tmp_path, split, **FEATURES[feature])
    assert trainer.sharing.is_active
