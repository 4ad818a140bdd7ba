"""Every pass of a training run against stock TRL: policy, old policy, reference, evaluation, adapters, precision."""

import copy
import inspect
from pathlib import Path

import pytest
import torch
import transformers as tf
from peft import LoraConfig
from trl import GRPOTrainer

from tests.distributed.launch import launch
from trl_fsdp_qlora import EfficientGRPOTrainer

from .helpers import (
    COMPLETION,
    SUPPORTED,
    assert_equal_gradients,
    awkward_batch,
    build,
    loss_inputs,
    losses_of,
    make_trainer,
)

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def history(trainer) -> list[dict]:
    """What a run logged, less averages over micro-batches, which depend on who shares one."""
    wanted = ("loss", "grad_norm", "kl", "eval_loss", "reward")
    return [{k: row[k] for k in wanted if k in row} for row in trainer.state.log_history if "train_runtime" not in row]


def assert_same_run(ours, stock):
    assert len(ours) == len(stock) > 0
    for mine, theirs in zip(ours, stock, strict=True):
        # 1e-4: optimizer steps carry rounding on, Adam's first steps most of all.
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.fixture
def checkpoint(tmp_path):
    build(SUPPORTED["qwen3"]).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


RUNS = {
    "reference model, two iterations": {"beta": 0.1, "num_iterations": 2},
    "accumulation, dapo": {"gradient_accumulation_steps": 2, "loss_type": "dapo"},
    "adapter off as reference": {"beta": 0.1, "num_iterations": 2, "lora": True},
    "checkpointing": {"gradient_checkpointing": True},
    "re-entrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "lora": True,
        "beta": 0.1,
    },
    "truncated completions masked": {"mask_truncated_completions": True},
}


@pytest.mark.parametrize("name", RUNS)
def test_training_equals_stock(name, checkpoint, tmp_path):
    options = dict(RUNS[name])
    peft_config = LORA if options.pop("lora", False) else None
    results = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainer = make_trainer(
            cls,
            checkpoint,
            tmp_path,
            copy.deepcopy(peft_config),
            max_steps=3,
            eval_steps=2,
            eval_strategy="steps",
            **options,
        )
        trainer.train()
        results.append(history(trainer))
    assert trainer.prefix_sharing.active()
    assert any("prefix_sharing/policy/tokens_fraction" in row for row in trainer.state.log_history)
    assert_same_run(results[1], results[0])


def test_several_steps_a_generation_equal_the_padded_path(checkpoint, tmp_path):
    """Each generation batch is cut into two optimizer steps; old log-probabilities come from one packed pass."""
    results = []
    for choice in ("off", "auto"):
        torch.manual_seed(0)
        trainer = make_trainer(
            EfficientGRPOTrainer,
            checkpoint,
            tmp_path,
            prefix_sharing=choice,
            max_steps=4,
            steps_per_generation=2,
            beta=0.1,
        )
        trainer.train()
        results.append(history(trainer))
    assert_same_run(results[1], results[0])
    first = trainer.state.log_history[0]
    assert first["prefix_sharing/no_grad/tokens_fraction"] < 1
    assert first["prefix_sharing/no_grad/layers_cascade"] == 1


def test_tool_mask(tmp_path):
    inputs = loss_inputs(*awkward_batch())
    inputs["tool_mask"] = inputs["completion_mask"].clone()
    inputs["tool_mask"][:, 2:4] = 0
    trainers = [make_trainer(cls, build(SUPPORTED["qwen3"]), tmp_path) for cls in (GRPOTrainer, EfficientGRPOTrainer)]
    stock, ours = losses_of(trainers, inputs)
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1])


def test_nf4_qlora(tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional")
    tf.LlamaForCausalLM(
        tf.LlamaConfig(
            vocab_size=67, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
        )
    ).save_pretrained(tmp_path / "base")
    quantization = tf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    trainers = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_pretrained(
            tmp_path / "base", quantization_config=quantization, dtype=torch.float32
        )
        trainers.append(make_trainer(cls, model, tmp_path, copy.deepcopy(LORA)))
    linear = trainers[1].model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    assert type(linear).__name__ == "Linear4bit"
    for trainer in trainers:  # TRL casts the adapters of quantized models to bf16; compare without that rounding
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    stock, ours = losses_of(trainers, loss_inputs(*awkward_batch()))
    assert trainers[1].prefix_sharing.active()
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1])


def test_bf16_autocast_rounds_no_more_than_stock(tmp_path):
    inputs = loss_inputs(*awkward_batch())
    exact = make_trainer(GRPOTrainer, build(SUPPORTED["qwen3"]), tmp_path)
    trainers = [
        make_trainer(cls, build(SUPPORTED["qwen3"]), tmp_path, bf16=True)
        for cls in (GRPOTrainer, EfficientGRPOTrainer)
    ]
    reference, stock, ours = losses_of([exact, *trainers], inputs)
    assert trainers[1].prefix_sharing.active()

    def error(result):
        return sum((a - b).float().norm() ** 2 for a, b in zip(result[1], reference[1], strict=True)) ** 0.5

    assert error(stock) > 0
    assert error(ours) <= 1.2 * error(stock)


def test_router_loss_counts_tokens_as_stock_does(tmp_path):
    inputs = loss_inputs(*awkward_batch())
    trainers = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        model = build(SUPPORTED["qwen3_moe"])
        model.config.output_router_logits = True
        model.config.router_aux_loss_coef = 0.5
        trainers.append(make_trainer(cls, model, tmp_path))
        assert trainers[-1].aux_loss_enabled
    stock, ours = losses_of(trainers, inputs)
    assert trainers[1]._metrics["train"]["prefix_sharing/policy/layers_cascade"] == [1.0]
    assert trainers[1]._metrics["train"]["aux_loss"][-1] == pytest.approx(
        trainers[0]._metrics["train"]["aux_loss"][-1]
    )
    assert ours[0] == pytest.approx(stock[0], rel=1e-5)
    assert_equal_gradients(ours[1], stock[1])


def test_old_policy_pass_stays_within_the_tokens_stock_holds_at_once(tmp_path):
    trainer = make_trainer(EfficientGRPOTrainer, build(SUPPORTED["qwen3"]), tmp_path)
    ids, mask = awkward_batch()
    seen = []
    forward = trainer.model.forward

    def counting(*args, **kwargs):
        seen.append(kwargs["input_ids"].numel())
        return forward(*args, **kwargs)

    with torch.no_grad():
        whole = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, COMPLETION)[0]
        trainer.model.forward = counting
        parts = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, COMPLETION, batch_size=2)[0]
    assert len(seen) > 1 and max(seen) <= 2 * ids.shape[1]
    torch.testing.assert_close(parts, whole, atol=2e-5, rtol=1e-5)


def test_overridden_signature_is_trls():
    ours = inspect.signature(EfficientGRPOTrainer._get_per_token_logps_and_entropies)
    assert ours == inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)


def test_generation_sees_the_models_own_implementation(tmp_path, monkeypatch):
    """transformers' continuous batching refuses implementations whose name it does not know."""
    trainer = make_trainer(EfficientGRPOTrainer, build(SUPPORTED["qwen3"]), tmp_path)
    config, seen = trainer.model.config, []
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: seen.append(config._attn_implementation))
    trainer._generate([])
    assert seen == ["sdpa"]
    assert config._attn_implementation == "prefix_sharing_sdpa"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_two_processes_with_uneven_work_equal_the_padded_path(name, tmp_path):
    """DDP on gloo; on one rank every completion is masked out, so it has nothing to compute but must not hang."""
    launch(Path(__file__).with_name("ddp_run.py"), tmp_path, name)
    results = torch.load(tmp_path / "results.pt")
    packed, padded = results["auto"], results["off"]
    assert packed["packed"] and not padded["packed"]
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-4, abs=1e-6)
    assert_equal_gradients(packed["empty_gradient"], padded["empty_gradient"])
    for ours, stock in zip(packed["weights"], padded["weights"], strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "falcon_h1"])
def test_fsdp2_with_different_rows_on_each_rank(name):
    """Ranks cut an old-policy pass into different numbers of rows and must still gather the same shards."""
    launch(Path(__file__).with_name("fsdp_run.py"), name)
