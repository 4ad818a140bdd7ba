"""Stage 2 in one process: training, evaluation, the reference model."""

import math

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from tests.tiny import config
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer
from trl_fsdp_qlora.a_star_po import trainer as trainer_module
from trl_fsdp_qlora.recipe.stats import wilson_interval

from .tiny import has_digit, problems, tiny_model


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("objective", ["regression", "advantage_weighted"])
def test_training_moves_the_policy_and_not_the_reference(make_trainer, full, objective):
    trainer = make_trainer(full=full, objective=objective, max_steps=3)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    reference = None if trainer.ref_model is None else [p.clone() for p in trainer.ref_model.parameters()]
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and (full or all("lora_" in name for name in changed))
    if full:
        assert all(map(torch.equal, trainer.ref_model.parameters(), reference))
        assert not any(p.requires_grad and p.grad is not None for p in trainer.ref_model.parameters())
    logs = trainer.state.log_history[:3]
    for log in logs:
        assert math.isfinite(log["loss"]) and 0 <= log["v_star"] <= 1
        assert log["advantage"] == pytest.approx(log["reward"] - log["v_star"], abs=1e-6)
        assert "frac_reward_zero_std" not in log
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6) and logs[2]["kl"] > 1e-6


def test_one_completion_a_prompt_and_an_odd_batch(make_trainer):
    trainer = make_trainer(per_device_train_batch_size=5, rows=15, max_steps=3)
    trainer.train()
    assert len(trainer._logs["prompt"]) == 5 and len(set(trainer._logs["prompt"])) == 5
    assert trainer.state.epoch == 1.0  # 15 prompts in 3 steps of 5: each prompt exactly once


def test_gradient_accumulation_equals_one_large_batch(make_trainer):
    """Same completions, same V*: four micro-batches of 4 and one of 16 give the same gradient."""
    trainer = make_trainer(per_device_train_batch_size=16, entropy_coef=0.0, beta2=0.05)
    trainer.estimate_values()
    trainer.model.train()
    batch = trainer._generate_and_score_completions(problems(16).to_list())
    gradients = []
    for pieces in (1, 4):
        trainer.model.zero_grad()
        trainer.current_gradient_accumulation_steps = pieces
        for i in range(pieces):
            rows = slice(16 // pieces * i, 16 // pieces * (i + 1))
            piece = {k: v[rows] if v.ndim else v for k, v in batch.items()}
            trainer._compute_loss(trainer.model, piece).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
    # float32 sums in another order
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-7, rtol=1e-4)


def test_two_optimizer_steps_a_generation_batch_need_no_pass_for_old_log_probabilities(make_trainer):
    """The paper's batch of 256 in mini-batches of 128, for which TRL would score the batch once more."""
    trainer = make_trainer(steps_per_generation=2, max_steps=4)
    trainer.train()
    phases = [
        {name for name, value in log.items() if value and "time/" in name} for log in trainer.state.log_history[:4]
    ]
    assert all("time/old_policy_pass_s" not in names for names in phases)
    assert ["time/reference_pass_s" in names for names in phases] == [True, False, True, False]
    assert trainer.state.log_history[1]["kl"] > 1e-6  # the reference was scored, and the policy has moved since


@pytest.mark.parametrize("n", [13, 8])
def test_evaluation_counts_every_problem_once(make_trainer, monkeypatch, n):
    seen = []

    def counting(completions, answer, prompts, **kwargs):
        seen.extend(prompts)
        return has_digit(completions, answer)

    trainer = make_trainer(
        rewards=counting, evaluate_on=problems(n), eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=5
    )
    trainer.estimate_values()
    seen.clear()
    metrics = trainer.evaluate()
    assert sorted(seen) == sorted(problems(n)["prompt"])
    solved = round(metrics["eval_accuracy"] * n)
    assert (metrics["eval_accuracy_low"], metrics["eval_accuracy_high"]) == wilson_interval(solved, n)
    assert metrics["eval_n"] == n and metrics["eval_reward"] == pytest.approx(solved / n)
    trainer.train()
    assert [log["eval_n"] for log in trainer.state.log_history if "eval_n" in log] == [n] * 2
    # Logging an evaluation must not swallow the training metrics.
    assert all("reward" in log for log in trainer.state.log_history if "loss" in log)


def test_a_run_resumes_from_its_checkpoint(make_trainer):
    whole = make_trainer(max_steps=4, save_strategy="steps", save_steps=2)
    whole.train()
    again = make_trainer(max_steps=4, save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-2")
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_grpo_options_are_named_and_unsupported_ones_refused(make_trainer, model_dir, caplog, tmp_path):
    trainer = make_trainer(loss_type="grpo", epsilon=0.3, dynamic_sampling=True, token_selection="s_grpo")
    assert "epsilon, loss_type, dynamic_sampling, token_selection will be ignored" in caplog.text
    assert (trainer.args.dynamic_sampling, trainer.args.token_selection) == (False, "all")
    caplog.clear()
    make_trainer()
    assert "will be ignored" not in caplog.text
    args = config(AStarPOConfig, tmp_path, num_generations=1)
    with pytest.raises(ValueError, match="rollout_func"):
        AStarPOTrainer(model_dir, has_digit, args, problems(8), rollout_func=lambda prompts, trainer: {})


def test_reference_is_the_adapters_initial_copy_where_training_continues_one(make_trainer, monkeypatch):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    trainer = make_trainer(model=model, full=True)  # no further peft_config
    used = []
    original = trainer_module.generate

    def spy(model, *args, **kwargs):
        used.append(model.active_adapter)
        return original(model, *args, **kwargs)

    monkeypatch.setattr(trainer_module, "generate", spy)
    trainer.estimate_values()
    assert set(used) == {"ref"} and trainer.model.active_adapter == "default"
    assert "adapter" in trainer._describe_context()["reference"]


ADAPTERS = {
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "lora": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_reference_of_every_kind_of_adapter_is_the_base_model(make_trainer, kind):
    """Generation batches of two optimizer steps, for which TRL asks for the old log-probabilities too."""
    trainer = make_trainer(
        adapter=ADAPTERS[kind], rows=8, steps_per_generation=2, per_device_train_batch_size=4, value_samples=2
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions(problems(8).to_list())
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = tiny_model()(ids, attention_mask=mask).logits[:, -width - 1 : -1] / trainer.temperature
    want = logits.log_softmax(-1).gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)
    kept = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["ref_per_token_logps"][kept], want[kept], atol=2e-4, rtol=1e-4)
