"""`EfficientRLOOTrainer` has stock's batches, losses, gradients and runs, and continues from a checkpoint to the
bit.

Covers `trainers/rloo/config.py`, `trainers/rollouts/on_policy.py`.
"""

import itertools
import shutil

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import RLOOConfig, RLOOTrainer

from tests.prefix_sharing.helpers import COMPLETION, assert_equal_gradients, build, gradients, tokenizer
from tests.tiny import these_first
from tests.trainers.helpers import losses_of, mean_token
from trl_fsdp_qlora import EfficientRLOOConfig, EfficientRLOOTrainer

FAMILIES = ("qwen3", "gemma3", "qwen3_5")
# PEFT refuses adapters on projections out of the state.
TARGETS = {"qwen3_5": r".*(in_proj_qkv|q_proj|v_proj|up_proj)"}
DEFAULTS = {
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": COMPLETION, "use_cpu": True,
    "bf16": False, "gradient_checkpointing": False, "report_to": [], "logging_steps": 1, "save_strategy": "no",
    "disable_tqdm": True, "optim": "sgd", "learning_rate": 1e-2, "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0, "beta": 0.05,
}  # fmt: skip


def saved(name, folder) -> str:
    """A checkpoint of a small model, which the reference is loaded from, too."""
    build(name).save_pretrained(folder / "model")
    return str(folder / "model")


def trainer(cls, config, model, folder, adapter=None, **changes):
    prompts = ["A+B=", "CDEF*G=", "H=", "IJ-K="] * 8
    peft_config = None
    if adapter is not None:
        targets = TARGETS.get(adapter, "all-linear")
        peft_config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return cls(
        model=model,
        reward_funcs=mean_token,
        args=config(output_dir=str(folder), **(DEFAULTS | changes)),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        peft_config=peft_config,
    )


def both(name, folder, adapter=None, **changes):
    """Stock's trainer and ours, each made when it is asked for: its constructor seeds what it draws."""
    model = saved(name, folder)
    yield trainer(RLOOTrainer, RLOOConfig, model, folder / "stock", adapter, **changes)
    changes["compact_generation"] = False  # draws as stock does
    yield trainer(EfficientRLOOTrainer, EfficientRLOOConfig, model, folder / "ours", adapter, **changes)


@pytest.mark.parametrize(
    ("name", "lora"),
    these_first([*itertools.product(FAMILIES, (True, False))], ("qwen3", True), ("gemma3", False), ("qwen3_5", True)),
)
def test_batch_loss_and_gradients_are_stocks(name, lora, tmp_path):
    masks = lora and name == "qwen3"  # the other models seldom end a completion
    trainers = list(both(name, tmp_path, adapter=name if lora else None, mask_truncated_completions=masks))
    batches = []
    for each in trainers:
        if each.ref_model is not None:  # which is otherwise the policy
            for parameter in each.ref_model.parameters():
                parameter.data.mul_(1.02)
        each.model.train()
        each.current_gradient_accumulation_steps = 1
        rows = next(iter(each.get_train_dataloader()))
        torch.manual_seed(1)
        batches.append(each._generate_and_score_completions(rows))
    stock, ours = batches
    assert stock.keys() == ours.keys()
    for key, value in stock.items():
        torch.testing.assert_close(ours[key], value, atol=1e-4, rtol=1e-5)  # sums of up to nine log-probabilities
    assert stock["advantages"].any() and (trainers[1].ref_model is None) == lora
    (loss, expected), (our_loss, our_gradients) = losses_of(trainers, stock)
    sharing = trainers[1].sharing
    assert sharing.status.packs and trainers[1]._metrics["train"]["prefix_sharing/policy/tokens_fraction"][-1] < 0.9
    assert trainers[1]._metrics["train"]["prefix_sharing/no_grad/tokens_fraction"]
    # A mean of advantages times ratios near 1, which cancel: stock's is off from float64's by up to 1.0e-6 (Qwen3.5).
    assert our_loss == pytest.approx(loss, rel=1e-5, abs=5e-6)
    assert_equal_gradients(our_gradients, expected, tolerance=2e-5)
    for metric, values in trainers[0]._metrics["train"].items():
        if metric != "step_time":
            assert trainers[1]._metrics["train"][metric] == pytest.approx(values, rel=1e-3, abs=1e-5), metric


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["LoRA", "full"])
def test_a_short_run_is_stocks(lora, tmp_path):
    trainers = []
    for each in both("qwen3", tmp_path, adapter="qwen3" if lora else None, max_steps=3):
        each.train()
        trainers.append(each)
    histories = [[entry for entry in each.state.log_history if "loss" in entry] for each in trainers]
    for stock, ours in zip(*histories, strict=True):
        for key in ("loss", "reward", "kl", "grad_norm", "entropy", "completions/mean_length"):
            assert ours[key] == pytest.approx(stock[key], rel=1e-3, abs=1e-5), key
    last_step = histories[1][-1]
    assert {"time/generate_s", "time/old_policy_pass_s", "prefix_sharing/policy/tokens_fraction"} <= last_step.keys()
    weights = [{name: p.detach() for name, p in each.model.named_parameters()} for each in trainers]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-5, rtol=1e-4)


def test_a_plain_config_and_compact_rollouts(tmp_path):
    """TRL's own config serves, and each prompt is prefilled once."""
    ours = trainer(EfficientRLOOTrainer, RLOOConfig, build("qwen3"), tmp_path, adapter="qwen3", max_steps=2)
    ours.train()
    assert type(ours.args) is EfficientRLOOConfig
    entry = next(entry for entry in ours.state.log_history if "loss" in entry)
    assert entry["generation/prefill_tokens"] < entry["generation/prefill_tokens_stock"]
    headings = {line.split(":")[0]: heading for heading, line in ours.features()}
    assert {headings[feature] for feature in ("prefix sharing", "rollouts")} == {"on"}


def test_resumed_equals_uninterrupted_to_the_bit(tmp_path):
    """Generation cycles of 2 x 2 micro-steps: the checkpoint falls inside one."""
    settings = {
        "steps_per_generation": 2, "num_iterations": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 1,
        "optim": "adamw_torch", "lr_scheduler_type": "linear", "learning_rate": 1e-3,
    }  # fmt: skip

    def train(folder, resume=None):
        each = trainer(EfficientRLOOTrainer, EfficientRLOOConfig, build("qwen3"), folder, adapter="qwen3", **settings)
        each.train(resume_from_checkpoint=resume)
        losses = [entry["loss"] for entry in each.state.log_history if "loss" in entry]
        return losses, {name: p.detach().clone() for name, p in each.model.named_parameters()}

    losses, weights = train(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole" / "checkpoint-3", tmp_path / "resumed" / "checkpoint-3")
    resumed_losses, resumed = train(tmp_path / "resumed", "auto")
    assert resumed_losses == losses
    for name, value in weights.items():
        assert value.equal(resumed[name]), name


def test_an_unknown_kernel_is_an_error_and_sharing_can_be_off(tmp_path):
    with pytest.raises(ValueError, match="lm_head_kernel='fast'"):
        EfficientRLOOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, lm_head_kernel="fast")
    off = trainer(EfficientRLOOTrainer, EfficientRLOOConfig, build("qwen3"), tmp_path, "qwen3", prefix_sharing=False)
    assert off.args.prefix_sharing == "off" and not off.sharing.status.packs
    assert gradients(off.model)
