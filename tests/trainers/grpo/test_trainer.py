"""The drop-in against stock TRL: the same seed gives the same completions (without `compact_generation`), losses and
weights.

Where a generation batch is cut into several optimizer steps, stock puts other completions into the first of them (it
scatters the groups), so such runs differ by design; test_token_budget.py compares the loss of a fixed batch.
"""

import functools
import json
import tempfile

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from tests.tiny import LOSS_TYPES, config, lora, save_tiny_model, serve_by_onednn, these_first, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.scoring import cpu_linear as cpu_linear
from trl_fsdp_qlora.scoring.cpu_linear import product

# fp32, SGD: what differs is the order of additions. Three steps of lr 1e-2.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


def run(cls, config_cls, folder, peft, **changes):
    """The log of a run, and its trained weights before and after."""
    grpo = trainer(cls, config_cls, folder, peft_config=lora() if peft else None, **changes)
    trained = {n: p for n, p in grpo.model.named_parameters() if p.requires_grad}
    start = {n: p.detach().clone() for n, p in trained.items()}
    grpo.train()
    return grpo.state.log_history, start, {n: p.detach().clone() for n, p in trained.items()}


@functools.cache
def stock_run(peft, changes):
    with tempfile.TemporaryDirectory() as folder:
        return run(GRPOTrainer, GRPOConfig, folder, peft, **json.loads(changes))


def assert_equal_runs(tmp_path, peft=True, sharing="off", ours_alone=None, **changes):
    """`ours_alone`: options of the class under test alone."""
    stock, start, expected = stock_run(peft, json.dumps(changes))
    # Compact generation draws other completions of the same distribution.
    ours = {"prefix_sharing": sharing, "compact_generation": False, **changes, **(ours_alone or {})}
    ours, _, weights = run(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, peft, **ours)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], **TOLERANCE)
    # Otherwise nothing was compared.
    assert max((weight - start[name]).abs().max().item() for name, weight in weights.items()) > 1e-4
    keys = ["loss", "reward", "grad_norm"]
    if changes.get("gradient_accumulation_steps", 1) == 1:
        keys += ["kl", "entropy", "clip_ratio/region_mean"]  # means of means over micro-batches, which differ
    for mine, theirs in zip(ours[:-1], stock[:-1], strict=True):
        assert theirs.keys() - mine.keys() == set()
        for key in theirs.keys() & set(keys):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5), key


# `test_token_budget.py: test_skipping_equals_stock` has the loss of each kind, of one batch.
LOSSES = [*(("auto", x) for x in LOSS_TYPES), ("off", "dapo"), ("off", "vespo")]


@pytest.mark.parametrize(
    "sharing, loss_type", these_first(LOSSES, ("auto", "dapo"), ("auto", "vespo"), ("off", "dapo"))
)
def test_loss_types(tmp_path, loss_type, sharing):
    level = "sequence" if loss_type == "luspo" else "token"
    assert_equal_runs(tmp_path, sharing=sharing, loss_type=loss_type, importance_sampling_level=level)


OPTIONS = [
    {"beta": 0.1, "num_iterations": 2, "max_steps": 4},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "loss_type": "dapo", "beta": 0.1},
    {"mask_truncated_completions": True},
    {"scale_rewards": "batch", "entropy_coef": 0.01},
    {"num_iterations": 2, "max_steps": 4, "delta": 2.0},
    {"use_adaptive_entropy": True, "top_entropy_quantile": 0.5},
    {"off_policy_mask_threshold": 0.5, "num_iterations": 2},
]


RUNS = [*(("auto", i) for i in range(len(OPTIONS))), ("off", 0), ("off", 2)]


@pytest.mark.parametrize("sharing, i", these_first(RUNS, *(("auto", i) for i in (0, 4))))
def test_options(tmp_path, i, sharing):
    # With loss_type "grpo" a step is a mean over completions, so which micro-batch one falls into does not matter.
    assert_equal_runs(tmp_path, sharing=sharing, **{"loss_type": "grpo", **OPTIONS[i]})


@pytest.mark.parametrize(
    "peft, checkpointing", these_first([(True, "reentrant"), (True, "other"), (False, None)], (True, "reentrant"))
)
def test_products_by_another_library(tmp_path, checkpointing, peft, monkeypatch):
    changes = {"peft": peft, "sharing": "auto", "gradient_checkpointing": checkpointing is not None}
    if checkpointing is not None:
        changes["gradient_checkpointing_kwargs"] = {"use_reentrant": checkpointing == "reentrant"}
    assert_equal_runs(tmp_path / "torch", **changes)
    calls = []
    serve_by_onednn(monkeypatch)

    def counted(*args):
        calls.append(1)
        return product(*args)

    monkeypatch.setattr(cpu_linear, "product", counted)
    assert_equal_runs(tmp_path / "onednn", **changes)
    assert calls


def test_full_fine_tuning(tmp_path):
    model = save_tiny_model(tmp_path / "model")  # beta > 0 loads the reference from the checkpoint
    for sharing in ("off", "auto"):
        assert_equal_runs(tmp_path / sharing, peft=False, sharing=sharing, model=model, beta=0.1)


def test_a_plain_trl_config_serves(tmp_path):
    arguments = config(GRPOConfig, tmp_path)
    grpo = trainer(EfficientGRPOTrainer, lambda **_: arguments, tmp_path)
    assert grpo.args.prefix_sharing == "auto" and grpo.args.learning_rate == arguments.learning_rate
    assert type(arguments) is GRPOConfig and not hasattr(arguments, "prefix_sharing")  # the user's own stays as it was
