"""Both stages in one process: what is sampled, kept, reused and refused; training, evaluation, the reference model."""

import math
import random

import pytest
import torch
from datasets import IterableDataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

from tests.tiny import config
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer
from trl_fsdp_qlora.a_star_po import trainer as trainer_module
from trl_fsdp_qlora.recipe.stats import wilson_interval

from .tiny import has_digit, problems, tiny_model


def test_a_second_run_samples_nothing_and_trains_the_same(make_trainer, count_prompts):
    first = make_trainer()
    first.train()
    assert sum(count for _, count in count_prompts) == 24 * 8
    count_prompts.clear()
    second = make_trainer()
    second.train()
    assert count_prompts == []
    # Sampling in stage 1 must not move the random state that stage 2 starts from.
    losses = [[log.get("loss") for log in each.state.log_history] for each in (first, second)]
    assert losses[0] == losses[1]


def test_the_table_depends_on_the_seed_and_not_on_the_order_of_the_rows(make_trainer, tmp_path):
    tables = []
    for i, seed in enumerate((1, 1, 2)):
        trainer = make_trainer(seed=seed, value_cache=str(tmp_path / f"v{i}"))
        order = list(range(24))
        random.Random(i).shuffle(order)
        trainer.estimate_values(problems(24).select(order))
        tables.append({key: rewards.tolist() for key, rewards in trainer.values.read().items()})
    assert tables[0] == tables[1] != tables[2]
    assert tables[0].keys() == tables[2].keys()


def test_more_samples_extend_an_entry_and_any_estimator_can_follow(make_trainer, count_prompts):
    four = make_trainer(value_samples=4)
    four.estimate_values()
    old = four.values.read()
    count_prompts.clear()
    eight = make_trainer(value_samples=8, value_estimator="mean")
    eight.estimate_values()
    assert {count for _, count in count_prompts} == {4}
    count_prompts.clear()
    new = eight.values.read()
    for key, rewards in new.items():
        assert rewards[:4].tolist() == old[key].tolist()
        assert eight.values.known[key] == pytest.approx(rewards.mean())
    highest = make_trainer(value_samples=4, value_estimator="max")
    highest.estimate_values()
    assert count_prompts == []
    assert all(highest.values.known[key] == rewards[:4].max() for key, rewards in new.items())


def test_adaptive_counts_draw_less_where_the_value_is_sure(make_trainer, count_prompts):
    def sure_for_even(completions, answer, **kwargs):
        return [1.0 if int(a) % 2 == 0 else float(a in c) for c, a in zip(completions, answer, strict=True)]

    trainer = make_trainer(rewards=sure_for_even, value_samples_min=2, value_samples=8)
    trainer.estimate_values()
    counts = {}
    for prompt, count in count_prompts:
        counts.setdefault(prompt, []).append(count)
    for row in problems(24):
        if int(row["answer"]) % 2 == 0:
            assert counts[row["prompt"]] == [2]
    assert any(drawn == [2, 2, 4] for drawn in counts.values())
    assert sum(count for _, count in count_prompts) < 24 * 8


def other_reward(completions, answer, **kwargs):
    return [float(digit in completion[:2]) for digit, completion in zip(answer, completions, strict=True)]


@pytest.mark.parametrize("change", ["rewards", "model", "row", "max_completion_length"])
def test_what_a_value_depends_on_is_never_reused_after_a_change(make_trainer, count_prompts, change):
    make_trainer().estimate_values()
    count_prompts.clear()
    changes = {"rewards": other_reward, "model": tiny_model(seed=1), "max_completion_length": 7}
    data = problems(24)
    if change == "row":
        data = data.map(lambda row: {"answer": str((int(row["answer"]) + 1) % 10)})
    make_trainer(**{change: changes[change]} if change in changes else {}).estimate_values(data)
    assert len(count_prompts) == 24


@pytest.mark.parametrize("setting", ["estimate", "refuse"])
def test_a_prompt_that_stage_one_never_saw(make_trainer, count_prompts, setting):
    trainer = make_trainer(unseen_prompts=setting)
    trainer.estimate_values()
    trainer.model.train()
    count_prompts.clear()
    rows = [*problems(6).to_list(), {"prompt": "7+7=", "answer": "4"}]
    if setting == "refuse":
        with pytest.raises(ValueError, match=r"1 prompts have no V\* .*'7\+7='.*unseen_prompts='estimate'"):
            trainer._generate_and_score_completions(rows)
        return
    assert trainer._generate_and_score_completions(rows)["advantages"].isfinite().all()
    assert count_prompts == [("7+7=", 8)]


def test_an_iterable_dataset_is_estimated_as_it_comes(make_trainer, count_prompts):
    trainer = make_trainer()
    trainer.train_dataset = IterableDataset.from_generator(lambda: iter(problems(24).to_list()))
    trainer.args.accelerator_config.dispatch_batches = False
    trainer.accelerator.dataloader_config.dispatch_batches = False
    trainer.train()
    assert 8 <= len(count_prompts) <= 16


def test_filter_leaves_out_prompts_whose_samples_all_failed(make_trainer, monkeypatch):
    def impossible_for_some(completions, answer, **kwargs):
        return [0.0 if a in "0123" else float(len(c) % 2) for c, a in zip(completions, answer, strict=True)]

    trainer = make_trainer(rewards=impossible_for_some, filter_all_failed=True, max_steps=1)
    trainer.train()
    assert 8 <= len(trainer.train_dataset) <= 14
    assert not set("0123") & set(trainer.train_dataset["answer"])
    trainer = make_trainer(rewards=lambda completions, **_: [0.0] * len(completions), filter_all_failed=True)
    with pytest.raises(ValueError, match="leaves 0 of 24 prompts"):
        trainer.train()


def test_rewards_outside_the_range_and_wrong_counts_are_errors_that_lose_nothing(make_trainer, count_prompts):
    def too_large(completions, answer, **kwargs):
        return [5.0 if a == "7" else 0.0 for a in answer]

    trainer = make_trainer(rewards=too_large, value_batch_size=4)
    with pytest.raises(ValueError, match=r"reward 5 is outside value_reward_range=\[0, 1\]"):
        trainer.estimate_values()
    kept = len(trainer.values.read())
    count_prompts.clear()
    trainer = make_trainer(rewards=too_large, value_reward_range=[0.0, 5.0], value_batch_size=4)
    trainer.estimate_values()
    assert len(count_prompts) == 24 - kept  # the error's own batch is drawn again, finished ones are not
    trainer = make_trainer(rewards=lambda completions, **_: [1.0])
    with pytest.raises(ValueError, match="returned 1 rewards, but 64"):
        trainer.estimate_values()


def test_a_reward_that_was_down_is_an_error(make_trainer):
    trainer = make_trainer(rewards=lambda completions, **_: [None] * len(completions), value_reward_version="judge")
    with pytest.raises(ValueError, match="24 of 24 prompts got no reward from "):
        trainer.train()
    assert len(trainer.values.read()) == 0


def test_a_partly_scored_prompt_is_completed_by_the_next_run(make_trainer, count_prompts):
    answers = iter([None, None] + [1.0] * 10_000)

    def flaky(completions, **kwargs):
        return [next(answers) for _ in completions]

    trainer = make_trainer(rewards=flaky, rows=1, per_device_train_batch_size=1, value_reward_version="1")
    trainer.estimate_values()
    assert [len(rewards) for rewards in trainer.values.read().values()] == [6]
    assert list(trainer.values.known.values()) == [1.0]
    count_prompts.clear()
    trainer = make_trainer(rewards=flaky, rows=1, per_device_train_batch_size=1, value_reward_version="1")
    trainer.estimate_values()
    assert [count for _, count in count_prompts] == [2]
    assert [len(rewards) for rewards in trainer.values.read().values()] == [8]


@pytest.mark.parametrize("kind", ["torch", "transform", "removed columns"])
def test_rows_of_stage_one_are_those_that_the_loader_gives(make_trainer, count_prompts, kind):
    seen = []

    def look(completions, prompts, number=None, **kwargs):
        seen.append((type((number or [None])[0]), prompts[0].startswith("1+")))
        return [float(len(c) % 2) for c in completions]

    def one_plus(batch):
        return {**batch, "prompt": ["1+" + prompt for prompt in batch["prompt"]]}

    data = problems(24).add_column("number", list(range(24)))
    of = {"torch": (data.with_format("torch"), torch.Tensor), "transform": (data.with_transform(one_plus), int)}
    trainer = make_trainer(rewards=look, remove_unused_columns=kind == "removed columns")
    trainer.train_dataset, expected = of.get(kind, (data, type(None)))
    trainer.train()
    assert len(count_prompts) == 24  # stage 2 found every key of stage 1
    assert {kind for kind, _ in seen} == {expected}
    assert kind != "transform" or all(transformed for _, transformed in seen)


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("objective", ["regression", "advantage_weighted"])
def test_training_moves_the_policy_and_not_the_reference(make_trainer, full, objective):
    trainer = make_trainer(full=full, objective=objective, max_steps=3, per_device_train_batch_size=5, rows=15)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    reference = None if trainer.ref_model is None else [p.clone() for p in trainer.ref_model.parameters()]
    trainer.train()
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed and (full or all("lora_" in name for name in changed))
    if full:
        assert all(map(torch.equal, trainer.ref_model.parameters(), reference))
        assert not any(p.requires_grad and p.grad is not None for p in trainer.ref_model.parameters())
    # 15 prompts in 3 steps of 5, an odd number: each exactly once.
    assert trainer.state.epoch == 1.0 and len(trainer._logs["prompt"]) == len(set(trainer._logs["prompt"])) == 5
    logs = trainer.state.log_history[:3]
    for log in logs:
        assert math.isfinite(log["loss"]) and 0 <= log["v_star"] <= 1
        assert log["advantage"] == pytest.approx(log["reward"] - log["v_star"], abs=1e-6)
        assert "frac_reward_zero_std" not in log
    assert logs[0]["kl"] == pytest.approx(0, abs=1e-6) and logs[2]["kl"] > 1e-6


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
    logs = trainer.state.log_history[:4]
    phases = [{name for name, value in log.items() if value and "time/" in name} for log in logs]
    assert all("time/old_policy_pass_s" not in names for names in phases)
    assert ["time/reference_pass_s" in names for names in phases] == [True, False, True, False]
    assert logs[1]["kl"] > 1e-6  # the reference was scored, and the policy has moved since


@pytest.mark.parametrize("n", [13, 8])
def test_evaluation_counts_every_problem_once(make_trainer, n):
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
