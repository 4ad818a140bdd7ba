"""Both stages in one process: what is sampled, kept, reused and refused; training, evaluation, the reference model.

Covers `trainers/a_star_po/config.py`.
"""

import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.tiny import config, tiny_model
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer
from trl_fsdp_qlora.trainers.a_star_po import trainer as trainer_module

from .tiny import has_digit, problems


def test_a_second_and_a_resumed_run_sample_nothing(make_trainer):
    """The first run's sampling must not move the random state of stage 2, whose batches serve two optimizer steps
    each.
    """
    settings = {"max_steps": 4, "steps_per_generation": 2, "save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(**settings)
    whole.train()
    assert sum(count for _, count in whole.drawn) == 24 * 8
    # TRL would score each batch once more for the old log-probabilities, which nothing here reads.
    logs = whole.state.log_history[:4]
    assert not any(log.get("time/old_policy_pass_s") for log in logs)
    assert [bool(log.get("time/reference_pass_s")) for log in logs] == [True, False, True, False]
    assert logs[1]["kl"] > 1e-6  # the policy has moved since the reference was scored
    for checkpoint in (None, f"{whole.args.output_dir}/checkpoint-2"):
        again = make_trainer(**settings)
        again.train(resume_from_checkpoint=checkpoint)
        assert again.drawn == []
        for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_values_depend_on_the_seed_and_not_on_the_rows_order(make_trainer, tmp_path):
    tables = []
    for i, seed in enumerate((1, 1, 2)):
        trainer = make_trainer(seed=seed, value_cache=str(tmp_path / f"v{i}"))
        order = list(range(24))
        random.Random(i).shuffle(order)
        trainer.estimate_values(problems(24).select(order))
        tables.append(trainer.values.read())
    assert tables[0] == tables[1] != tables[2]
    assert tables[0].keys() == tables[2].keys()


def test_another_estimator_and_fewer_samples_need_no_new_ones(make_trainer):
    four = make_trainer(value_samples=4)
    assert four.estimate_values().samples == 24 * 4
    eight = make_trainer(value_estimator="mean")
    assert eight.estimate_values().samples == 24 * 8
    new = eight.values.read()
    highest = make_trainer(value_samples=4, value_estimator="max")
    assert highest.estimate_values().samples == 0
    for key, rewards in new.items():
        assert eight.values.known[key] == pytest.approx(sum(rewards) / 8)
        assert highest.values.known[key] == max(rewards[:4])


def test_what_a_value_depends_on_is_never_reused_after_a_change(make_trainer, model_dir):
    def another_reward(completions, answer, **kwargs):
        return has_digit([completion[:2] for completion in completions], answer)

    make_trainer().estimate_values()
    same_name = AutoModelForCausalLM.from_pretrained(model_dir)
    same_name.lm_head.weight.data += 0.01
    other_answers = problems(24).map(lambda row: {"answer": str((int(row["answer"]) + 1) % 10)})
    for changes, dataset in (
        ({"rewards": another_reward}, None),
        ({"model": same_name}, None),
        ({"max_completion_length": 7}, None),
        ({"generation_kwargs": {"typical_p": 0.4}}, None),
        ({}, other_answers),
    ):
        assert make_trainer(**changes).estimate_values(dataset).samples == 24 * 8
    assert make_trainer().estimate_values().samples == 0


def test_a_prompt_that_stage_one_never_saw_is_estimated(make_trainer):
    trainer = make_trainer()
    trainer.estimate_values()
    trainer.model.train()
    rows = [*problems(6).to_list(), {"prompt": "7+7=", "answer": "4"}]
    assert trainer._generate_and_score_completions(rows)["advantages"].isfinite().all()
    assert trainer.drawn[-1] == ("7+7=", 8) and len(trainer.drawn) == 24 + 1


def test_an_iterable_dataset_is_estimated_as_it_comes(make_trainer):
    trainer = make_trainer()
    trainer.train_dataset = IterableDataset.from_generator(lambda: iter(problems(24).to_list()))
    trainer.args.accelerator_config.dispatch_batches = False
    trainer.accelerator.dataloader_config.dispatch_batches = False
    trainer.train()
    assert 8 <= len(trainer.drawn) <= 16


def test_a_rewards_error_loses_no_sample(make_trainer):
    is_down = True

    def service(prompts, **_):
        if is_down and "21+12=" in prompts:  # one of the longest, which come last
            raise OSError("the service is down")
        return [5.0] * len(prompts)  # rewards may have any size

    trainer = make_trainer(rewards=service, value_batch_size=4)
    with pytest.raises(OSError, match="is down"):
        trainer.estimate_values()
    kept = len(trainer.values.read())
    is_down = False
    again = make_trainer(rewards=service, value_batch_size=4)
    assert again.estimate_values().already_known == kept  # the error's own batch is drawn again, finished ones are not
    assert kept > 0 and len(again.drawn) == 24 - kept
    with pytest.raises(ValueError, match=r" 1 rewards.* 64\b"):
        make_trainer(rewards=lambda completions, **_: [1.0]).estimate_values()


def test_a_partly_scored_prompt_is_drawn_again_by_the_next_run(make_trainer):
    answers = iter([None] * 8 + [None, None] + [1.0] * 14)

    def flaky(completions, **kwargs):
        return [next(answers) for _ in completions]

    def run():
        return make_trainer(rewards=flaky, rows=1, per_device_train_batch_size=1)

    down = run()
    partly = run()
    completed = run()
    with pytest.raises(ValueError, match="reward"):
        down.train()
    assert len(down.values.read()) == 0
    for trainer, drawn, stored in ((partly, 8, 6), (completed, 8, 8)):
        assert trainer.estimate_values().samples == drawn
        assert [len(rewards) for rewards in trainer.values.read().values()] == [stored]
        assert list(trainer.values.known.values()) == [1.0]


@pytest.mark.parametrize("kind", ["torch", "transform", "removed columns"])
def test_rows_of_stage_one_are_those_that_the_loader_gives(make_trainer, kind):
    seen = []

    def look(completions, prompts, number=None, **kwargs):
        seen.append((type((number or [None])[0]), all(prompt.startswith("1+") for prompt in prompts)))
        return [float(len(c) % 2) for c in completions]

    def one_plus(batch):
        return {**batch, "prompt": ["1+" + prompt for prompt in batch["prompt"]]}

    data = problems(24).add_column("number", list(range(24)))
    trainer = make_trainer(rewards=look, remove_unused_columns=kind == "removed columns")
    trainer.train_dataset, expected = {
        "torch": (data.with_format("torch"), (torch.Tensor, False)),
        "transform": (data.with_transform(one_plus), (int, True)),
        "removed columns": (data, (type(None), False)),
    }[kind]
    trainer.train()
    assert len(trainer.drawn) == 24  # stage 2 found every key of stage 1
    assert set(seen) == {expected}


@pytest.mark.parametrize(("objective", "full"), [("regression", True), ("advantage_weighted", False)])
def test_training_moves_the_policy_and_not_the_reference(make_trainer, full, objective):
    trainer = make_trainer(full=full, objective=objective, max_steps=3, per_device_train_batch_size=5, rows=15)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    reference = None if trainer.ref_model is None else [p.clone() for p in trainer.ref_model.parameters()]
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and (full or all("lora_" in name for name in changed))
    if full:
        assert all(map(torch.equal, trainer.ref_model.parameters(), reference))
    # 15 prompts in 3 steps of 5, an odd number: each exactly once.
    assert trainer.state.epoch == 1.0 and len(trainer._logs["prompt"]) == len(set(trainer._logs["prompt"])) == 5
    logs = trainer.state.log_history[:3]
    for log in logs:
        assert math.isfinite(log["loss"]) and 0 <= log["v_star"] <= 1
        assert log["advantage"] == pytest.approx(log["reward"] - log["v_star"], abs=1e-6)
        assert "frac_reward_zero_std" not in log
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6) and logs[2]["kl"] > 1e-6


def test_vllm_is_not_compared_without_old_log_probabilities(make_trainer):
    """A generation batch that serves two optimizer steps: TRL asks for the old policy, whose values nothing needs."""
    trainer = make_trainer(per_device_train_batch_size=4, gradient_accumulation_steps=1, steps_per_generation=2)
    trainer.estimate_values()
    trainer.model.train()
    completions = [[5, 6, 7], [8, 9], [5, 5, 5], [6]] * 2
    logprobs = [[[-3.0] for _ in tokens] for tokens in completions]
    engine = SimpleNamespace(
        sync_weights=lambda: None, generate=lambda prompts, *_, **__: (prompts, completions, logprobs, None)
    )
    trainer.use_vllm = True
    trainer._last_loaded_step = -1
    trainer.vllm_generation = engine
    trainer._generate_and_score_completions(problems(8).to_list())
    trainer.telemetry.flush()
    assert not [name for name in trainer._metrics["train"] if name.startswith("sampling/")]


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


def test_an_evaluation_leaves_the_metrics_of_training(make_trainer):
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 5}
    trainer = make_trainer(evaluate_on=problems(40).select(range(30, 40)), **evaluation)
    trainer.train()
    assert len(trainer.drawn) == 24
    history = trainer.state.log_history
    assert [0 <= log["eval_reward"] <= 1 for log in history if "eval_reward" in log] == [True, True]
    assert all("v_star" in log for log in history if "loss" in log)


def test_grpo_options_are_named_and_unsupported_ones_refused(make_trainer, model_dir, tmp_path, caplog):
    names = ("epsilon", "loss_type", "dynamic_sampling", "token_selection")
    make_trainer()
    assert "token_selection" not in caplog.text
    trainer = make_trainer(loss_type="grpo", epsilon=0.3, dynamic_sampling=True, token_selection="s_grpo")
    assert all(name in caplog.text for name in names)
    assert (trainer.args.dynamic_sampling, trainer.args.token_selection) == (False, "all")
    args = config(AStarPOConfig, tmp_path, num_generations=1)
    with pytest.raises(ValueError, match="rollout_func"):
        AStarPOTrainer(model_dir, has_digit, args, problems(8), rollout_func=lambda prompts, trainer: {})


ADAPTERS = {
    "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "lora": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
}


@pytest.mark.parametrize("kind", [*ADAPTERS, "continued"])
def test_the_reference_equals_the_base_or_the_initial_adapter(make_trainer, monkeypatch, kind):
    """Generation batches of two optimizer steps, for which TRL asks for the old log-probabilities too."""
    settings = {"rows": 8, "steps_per_generation": 2, "per_device_train_batch_size": 4, "value_samples": 2}
    reference = tiny_model()
    if kind == "continued":
        reference = get_peft_model(reference, ADAPTERS["lora"])
        trainer = make_trainer(model=copy.deepcopy(reference), full=True, **settings)  # no further peft_config
    else:
        trainer = make_trainer(adapter=ADAPTERS[kind], **settings)
    drawn_with = []
    original = trainer_module.generate

    def spy(model, *args, **kwargs):
        drawn_with.append(model.active_adapter)
        return original(model, *args, **kwargs)

    monkeypatch.setattr(trainer_module, "generate", spy)
    with torch.no_grad():
        for parameter in trainer.model.train().parameters():  # away from the reference
            if parameter.requires_grad:
                parameter += 0.1
    batch = trainer._generate_and_score_completions(problems(8).to_list())
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = reference(ids, attention_mask=mask).logits[:, -width - 1 : -1] / trainer.temperature
    want = logits.log_softmax(-1).gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)
    kept = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["ref_per_token_logps"][kept], want[kept], atol=2e-4, rtol=1e-4)
    assert set(drawn_with) == {"ref" if kind == "continued" else "default"}
    assert trainer.model.active_adapter == "default"
