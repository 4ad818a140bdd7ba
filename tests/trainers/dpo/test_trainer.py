"""`EfficientDPOTrainer` gives stock's losses, metrics, gradients and runs, with the prompt of a pair computed once.

Covers `trainers/dpo/config.py`.
"""

import itertools
import re
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from tests.prefix_sharing.helpers import assert_equal_gradients, build, gradients, tokenizer
from tests.tiny import these_first
from trl_fsdp_qlora import EfficientDPOConfig, EfficientDPOTrainer
from trl_fsdp_qlora.trainers.saving.checkpoints import why_not_whole

FAMILIES = ("qwen3", "gemma3", "qwen3_5")
# PEFT refuses adapters on projections out of the state.
TARGETS = {"qwen3_5": r".*(in_proj_qkv|q_proj|v_proj|up_proj)"}
LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
DEFAULTS = {
    "per_device_train_batch_size": 4, "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": [],
    "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "optim": "sgd", "learning_rate": 1e-2,
    "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "label_smoothing": 0.1,
}  # fmt: skip
BOTH = (DPOTrainer, DPOConfig), (EfficientDPOTrainer, EfficientDPOConfig)


def pairs():
    """Prompts and answers of different lengths, one prompt twice, and answers that begin alike."""
    rows = [
        ("ABCDEFGHIJ+=", "KLM", "NOPQRST"),
        ("BCDA=", "XYZ+", "XYW"),
        ("ABCDEFGHIJ+=", "Q", "RSTUVWX"),
        ("HIJKLMN*=", "AAAAAB", "AAAAAC"),
    ] * 3
    return Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])


def trainer(cls, config, name, folder, lora=True, **changes):
    adapter = LoraConfig(r=4, target_modules=TARGETS.get(name, "all-linear"), init_lora_weights=False)
    return cls(
        model=build(name),
        ref_model=None if lora else build(name, seed=1),
        args=config(output_dir=str(folder), **(DEFAULTS | changes)),
        train_dataset=pairs(),
        processing_class=tokenizer(),
        peft_config=adapter if lora else None,
    )


def both(name, folder, lora=True, **changes):
    return [trainer(*kind, name, folder / kind[0].__name__, lora, **changes) for kind in BOTH]


def assert_same_loss(trainers, least_shared=0.8):
    """On one batch of stock's."""
    inputs = next(iter(trainers[0].get_train_dataloader()))
    results = []
    for each in trainers:
        each.model.train()
        loss = each.compute_loss(each.model, inputs)
        loss.backward()
        results.append((loss.item(), gradients(each.model)))
    assert trainers[1].sharing.status.packs, trainers[1].sharing.describe()
    metrics = [each._metrics["train"] for each in trainers]
    assert 0 < metrics[1]["prefix_sharing/policy/tokens_fraction"][-1] < least_shared
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-5)
    assert_equal_gradients(results[1][1], results[0][1], tolerance=2e-5)
    for metric, values in metrics[0].items():
        assert metrics[1][metric] == pytest.approx(values, rel=1e-4, abs=1e-5), metric


@pytest.mark.parametrize(
    ("name", "lora"),
    these_first([*itertools.product(FAMILIES, (True, False))], ("qwen3", False), ("gemma3", True), ("qwen3_5", True)),
)
def test_loss_metrics_and_gradients_are_stocks(name, lora, tmp_path):
    trainers = both(name, tmp_path, lora)
    assert_same_loss(trainers)
    assert (trainers[1].reference_sharing is None) == lora
    if not lora:
        assert trainers[1].reference_sharing.figures.tokens and trainers[1].reference_sharing.status.packs


@pytest.mark.parametrize("loss", these_first(LOSSES, "ipo", "bco_pair", "discopop", "sft"))
def test_every_loss_type(loss, tmp_path):
    assert_same_loss(both("qwen3", tmp_path, loss_type=loss))


OPTIONS = {
    "lengths": {"ld_alpha": 0.5},
    "weighting": {"use_weighting": True},
    "several": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "divergence": {"f_divergence_type": "js_divergence"},
    "cut": {"max_length": 12, "truncation_mode": "keep_end"},
    "multiples": {"pad_to_multiple_of": 16},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "ahead": {"precompute_ref_log_probs": True},
}


@pytest.mark.parametrize("option", these_first(OPTIONS, "several", "cut", "checkpointing", "ahead"))
def test_options_that_reach_the_forward(option, tmp_path):
    trainers = both("qwen3", tmp_path, **OPTIONS[option])
    assert_same_loss(trainers, least_shared=0.9)
    if option == "ahead":
        columns = "ref_chosen_logps", "ref_rejected_logps"
        for column in columns:
            values = [each.train_dataset[column][:] for each in trainers]
            assert values[1] == pytest.approx(values[0], rel=1e-5)


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "full with a reference model"])
def test_a_short_run_with_evaluation_is_stocks(lora, tmp_path):
    trainers = both("qwen3", tmp_path, lora, max_steps=3)
    for each in trainers:
        each.train()
        each.evaluate(pairs())
    assert re.search(r"\b4\b", trainers[1].startup.block)  # pairs in the loss
    histories = [each.state.log_history for each in trainers]
    for stock, ours in zip(*histories, strict=True):
        for key in stock.keys() - {"total_flos"}:
            if "runtime" not in key and "per_second" not in key:
                assert ours[key] == pytest.approx(stock[key], rel=1e-3, abs=1e-5), key
    assert {"time/forward_backward_s", "prefix_sharing/policy/tokens_fraction"} <= histories[1][1].keys()
    for stock, ours in zip(*(each.model.parameters() for each in trainers), strict=True):
        torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-4)


def test_resumed_equals_uninterrupted_to_the_bit(tmp_path):
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}

    def train(folder, resume=None):
        each = trainer(EfficientDPOTrainer, EfficientDPOConfig, "qwen3", folder, **settings)
        each.train(resume_from_checkpoint=resume)
        losses = [entry["loss"] for entry in each.state.log_history if "loss" in entry]
        return losses, {name: p.detach().clone() for name, p in each.model.named_parameters()}

    losses, weights = train(tmp_path / "whole")
    assert why_not_whole(tmp_path / "whole" / "checkpoint-2") is None
    assert "DPO" in (tmp_path / "whole" / "checkpoint-2" / "README.md").read_text()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "resumed" / "checkpoint-2")
    resumed_losses, resumed = train(tmp_path / "resumed", "auto")
    assert resumed_losses == losses
    for name, value in weights.items():
        assert value.equal(resumed[name]), name


def test_a_plain_config_serves_and_sharing_can_be_off(tmp_path):
    plain = trainer(EfficientDPOTrainer, DPOConfig, "qwen3", tmp_path)
    assert type(plain.args) is EfficientDPOConfig and plain.sharing.status.packs
    off = trainer(EfficientDPOTrainer, EfficientDPOConfig, "qwen3", tmp_path, prefix_sharing="off")
    assert not off.sharing.status.packs
    inputs = next(iter(plain.get_train_dataloader()))
    losses = [each.compute_loss(each.model, inputs).item() for each in (plain, off)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
