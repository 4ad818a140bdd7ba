"""What a step may have next to its loss, in micro-batches and passes of any size: as each micro-batch by itself."""

import itertools

import pytest
import torch

from tests.tiny import even_start, lora, these_first
from trl_fsdp_qlora import (
    AStarPOConfig,
    AStarPOTrainer,
    EfficientRLOOConfig,
    EfficientRLOOTrainer,
    TSPMOConfig,
    TSPMOTrainer,
)

from .test_broken_off_steps import (
    SPLITS,
    assert_as_alone,
    make,
    often_kept,
    short_beginnings,  # noqa: F401 (a fixture)
    trained,
)


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
    "every other layer, by the config": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"offload": True, "every_n_layers": 2},  # no device: nothing is offloaded
    },
    "RLOO": {"cls": EfficientRLOOTrainer, "config": EfficientRLOOConfig, "beta": 0.1},
    "T-SPMO": {"cls": TSPMOTrainer, "config": TSPMOConfig, "learning_rate": 3.0},
    "A*-PO": {**A_STAR_PO, "learning_rate": 1.0},
    "A*-PO, weighted by advantages": {**A_STAR_PO, "objective": "advantage_weighted", "entropy_coef": 0.01},
    # Products of bfloat16 are rounded to 0.4%, and each split adds them up in another order.
    "bfloat16": {"bf16": True, "tolerance": 0.2},
}
# In `make test`: features of each kind, and each way of splitting.
FIRST = (
    ("selected tokens", "cut"),
    ("groups without a signal", "merged"),
    ("T-SPMO", "kept"),
    ("bfloat16", "cut"),
)


@pytest.fixture(autouse=True)
def no_values_of_other_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_FSDP_QLORA_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def copies(monkeypatch):
    """The calls in which transformers copies activations to the host, without a device's pinned memory."""
    copies = []
    copied = torch.autograd.graph.save_on_cpu

    def unpinned(pin_memory, device_type):
        copies.append(pin_memory)
        return copied(pin_memory=False)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", unpinned)
    monkeypatch.setattr("trl_fsdp_qlora.compat.transformers.has_accelerator", lambda: True)
    return copies


@pytest.mark.parametrize("adapter", ["LoRA", pytest.param("none", marks=pytest.mark.exhaustive)])
@often_kept
def test_activations_are_offloaded_after_rollouts_too(tmp_path, split, adapter, copies):
    """TRL switches checkpointing off for a rollout and on again with keys that torch does not know: a ValueError at
    the first loss."""
    trainer = assert_as_alone(
        tmp_path,
        split,
        peft_config=lora() if adapter == "LoRA" else None,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"offload": True},
    )
    assert copies and all(copies)
    assert trainer.sharing.status.packs


def test_reentrant_checkpoints_are_offloaded_too(tmp_path, copies):
    """Their arguments are saved, the mask that carries the packed row among them."""
    weights = []
    for offload in (False, True):
        options = {"use_reentrant": True, "offload": offload}
        grpo = make(tmp_path, "merged", gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
        assert not copies
        grpo.train()
        assert grpo.sharing.status.packs
        weights.append(trained(grpo))
    assert copies
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=0, atol=0)


@pytest.mark.parametrize(("feature", "split"), these_first([*itertools.product(FEATURES, SPLITS)], *FIRST))
def test_a_feature_in_any_passes(tmp_path, split, feature):
    trainer = assert_as_alone(tmp_path, split, **FEATURES[feature])
    assert trainer.sharing.status.packs
