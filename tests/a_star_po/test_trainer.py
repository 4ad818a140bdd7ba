"""Stage 1 and stage 2 in one process."""

import math
import random

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import AutoModelForSequenceClassification, Qwen3ForSequenceClassification

from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer
from trl_fsdp_qlora.a_star_po import trainer as trainer_module
from trl_fsdp_qlora.a_star_po.value_cache import ValueCache, ValueCacheError
from trl_fsdp_qlora.recipe.stats import wilson_interval

from .tiny import has_digit, problems, tiny_model, tiny_tokenizer


@pytest.fixture
def count_prompts(monkeypatch):
    """Counts the completions that stage 1 draws."""
    drawn = []
    original = AStarPOTrainer._draw

    def draw(self, items, counts, seed):
        drawn.extend((item.row["prompt"], count) for item, count in zip(items, counts, strict=True))
        return original(self, items, counts, seed)

    monkeypatch.setattr(AStarPOTrainer, "_draw", draw)
    return drawn


def table(trainer):
    return trainer.values.stage_one.cache.get(trainer.values.known)


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


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_two_optimizer_steps_a_generation_batch_need_no_pass_for_old_log_probabilities(make_trainer, full):
    """The paper's batch of 256 in mini-batches of 128, for which TRL would score the batch once more."""
    trainer = make_trainer(full=full, steps_per_generation=2, max_steps=4)
    trainer.train()
    phases = [
        {name for name, value in log.items() if name.startswith("time/") and value > 0}
        for log in trainer.state.log_history[:4]
    ]
    assert all("time/old_policy_pass_s" not in names for names in phases)
    assert ["time/reference_pass_s" in names for names in phases] == [True, False, True, False]
    assert trainer.state.log_history[1]["kl"] > 1e-6  # the reference was scored, and the policy has moved since


def test_a_second_run_samples_nothing_and_trains_the_same(make_trainer, count_prompts):
    first = make_trainer()
    first.train()
    assert sum(count for _, count in count_prompts) == 24 * 8
    count_prompts.clear()
    second = make_trainer()
    second.train()
    assert count_prompts == []
    # Sampling in stage 1 must not move the random state that stage 2 starts from.
    assert [log.get("loss") for log in second.state.log_history] == [
        log.get("loss") for log in first.state.log_history
    ]


def test_the_table_depends_on_the_seed_and_not_on_the_order_of_the_rows(make_trainer, tmp_path):
    tables = []
    for i, seed in enumerate((1, 1, 2)):
        trainer = make_trainer(seed=seed, value_cache=str(tmp_path / f"v{i}"))
        order = list(range(24))
        random.Random(i).shuffle(order)
        trainer.estimate_values(problems(24).select(order))
        tables.append({key: rewards.tolist() for key, rewards in table(trainer).items()})
    assert tables[0] == tables[1] != tables[2]
    assert tables[0].keys() == tables[2].keys()


def test_more_samples_extend_an_entry_and_any_estimator_can_follow(make_trainer, count_prompts):
    four = make_trainer(value_samples=4)
    four.estimate_values()
    old = table(four)
    count_prompts.clear()
    eight = make_trainer(value_samples=8, value_estimator="mean")
    eight.estimate_values()
    assert {count for _, count in count_prompts} == {4}
    count_prompts.clear()
    new = table(eight)
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


@pytest.mark.parametrize("change", ["reward", "temperature", "model", "row", "length"])
def test_what_a_value_depends_on_is_never_reused_after_a_change(make_trainer, count_prompts, change, caplog):
    make_trainer().estimate_values()
    count_prompts.clear()

    def other_reward(completions, answer, **kwargs):
        return [float(digit in completion[:2]) for digit, completion in zip(answer, completions, strict=True)]

    settings = {
        "reward": {"rewards": other_reward},
        "temperature": {"temperature": 0.7},
        "model": {"model": tiny_model(seed=1)},
        "row": {},
        "length": {"max_completion_length": 7},
    }[change]
    trainer = make_trainer(**settings)
    data = problems(24)
    if change == "row":
        data = data.map(lambda row: {"answer": str((int(row["answer"]) + 1) % 10)})
    trainer.estimate_values(data)
    assert len(count_prompts) == 24
    named = {
        "reward": "reward functions differ",
        "temperature": "sampling settings differ",
        "model": "reference model",
    }
    if change in named:
        assert named[change] in caplog.text


def test_two_rows_with_one_prompt_and_different_answers_do_not_collide(make_trainer):
    trainer = make_trainer()
    rows = Dataset.from_dict({"prompt": ["1+1="] * 2, "answer": ["2", "="]})
    trainer.estimate_values(rows)
    assert len(trainer.values.known) == 2


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
    else:
        assert trainer._generate_and_score_completions(rows)["advantages"].isfinite().all()
        assert count_prompts == [("7+7=", 8)]


def test_an_iterable_dataset_is_estimated_as_it_comes(make_trainer, count_prompts):
    trainer = make_trainer(max_steps=2)
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
    kept = len(trainer.values.stage_one.cache)
    count_prompts.clear()
    trainer = make_trainer(rewards=too_large, value_reward_range=[0.0, 5.0], value_batch_size=4)
    trainer.estimate_values()
    assert len(count_prompts) == 24 - kept  # the error's own batch is drawn again, finished ones are not
    trainer = make_trainer(rewards=lambda completions, **_: [1.0])
    with pytest.raises(ValueError, match="returned 1 values for 64"):
        trainer.estimate_values()


def test_unscorable_samples_are_left_out(make_trainer):
    def sometimes(completions, answer, **kwargs):
        return [
            None if a == "3" else (None if c[:1] == "1" else 1.0) for c, a in zip(completions, answer, strict=True)
        ]

    trainer = make_trainer(rewards=sometimes, max_steps=3)
    trainer.train()
    values = list(trainer.values.known.values())
    assert any(map(math.isnan, values)) and all(math.isnan(v) or v == pytest.approx(1) for v in values)
    assert all(math.isfinite(log["loss"]) for log in trainer.state.log_history if "loss" in log)


def test_local_scorer_equals_trl(make_trainer, tmp_path):
    config = tiny_model().config
    config.num_labels = 1
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "rm")
    tiny_tokenizer().save_pretrained(tmp_path / "rm")

    async def later(completions, answer, **kwargs):
        return [None if a == "3" else 0.25 for a in answer]

    rewards = [has_digit, later, AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", num_labels=1)]
    trainer = make_trainer(rewards=rewards)
    rows, ids = problems(6).to_list(), [[5, 6, 1], [7, 1], [8, 9, 10], [2], [3, 1], [4, 4]]
    completions = tiny_tokenizer().batch_decode(ids, skip_special_tokens=True)
    stock = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], completions, ids)
    torch.testing.assert_close(trainer._scorer()(rows, completions, ids), stock.cpu(), equal_nan=True)


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
    make_trainer(loss_type="grpo", epsilon=0.3)
    assert "epsilon, loss_type will be ignored" in caplog.text
    caplog.clear()
    make_trainer()
    assert "will be ignored" not in caplog.text
    config = AStarPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="rollout_func"):
        AStarPOTrainer(
            model_dir,
            has_digit,
            config,
            train_dataset=problems(8),
            processing_class=tiny_tokenizer(),
            rollout_func=lambda prompts, trainer: {},
        )


def test_a_cache_of_another_format_stops_the_run_before_it_samples(make_trainer, count_prompts, tmp_path):
    with ValueCache(tmp_path / "values.sqlite") as cache:
        cache._db.execute("PRAGMA user_version=7")
    with pytest.raises(ValueCacheError, match="format version 7"):
        make_trainer().train()
    assert count_prompts == []


def test_reference_is_the_adapters_initial_copy_where_training_continues_one(make_trainer, monkeypatch):
    from peft import LoraConfig, get_peft_model

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


@pytest.mark.parametrize("kind", ["prefix", "prompt", "lora"])
def test_the_reference_of_every_kind_of_adapter_is_the_base_model(tmp_path, model_dir, kind):
    """Generation batches of two optimizer steps, for which TRL asks for the old log-probabilities too."""
    adapter = {
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "lora": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    }[kind]
    trainer = AStarPOTrainer(
        model_dir,
        has_digit,
        AStarPOConfig(
            str(tmp_path / "out"),
            per_device_train_batch_size=4,
            steps_per_generation=2,
            max_completion_length=6,
            value_cache=str(tmp_path / "values.sqlite"),
            value_samples=2,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=problems(8),
        processing_class=tiny_tokenizer(),
        peft_config=adapter,
    )
    trainer.model.train()
    batch = trainer._generate_and_score_completions(problems(8).to_list())
    base = tiny_model()
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    with torch.no_grad():
        logits = base(ids, attention_mask=mask).logits[:, -width - 1 : -1] / trainer.temperature
    want = logits.log_softmax(-1).gather(2, batch["completion_ids"].unsqueeze(2)).squeeze(2)
    kept = batch["completion_mask"].bool()
    torch.testing.assert_close(batch["ref_per_token_logps"][kept], want[kept], atol=2e-4, rtol=1e-4)


def test_a_reward_that_was_down_is_an_error_and_is_sampled_again(make_trainer, count_prompts):
    def down(completions, **kwargs):
        return [None] * len(completions)

    trainer = make_trainer(rewards=down, value_reward_version="judge")
    with pytest.raises(ValueError, match=r"no sample of any of 24 prompts got a reward from down"):
        trainer.train()
    assert len(trainer.values.stage_one.cache) == 0

    def back(completions, **kwargs):
        return [1.0] * len(completions)

    back.__name__ = "down"
    count_prompts.clear()
    trainer = make_trainer(rewards=back, value_reward_version="judge")
    trainer.estimate_values()
    assert len(count_prompts) == 24 and set(trainer.values.known.values()) == {1.0}


def test_prompts_without_a_value_are_counted_and_only_they_are_sampled_again(make_trainer, count_prompts, caplog):
    def partly(completions, answer, **kwargs):
        return [None if a == "3" else 1.0 for a in answer]

    first = make_trainer(rewards=partly)
    report = first.estimate_values()
    assert "3 of 24 prompts have no V*: partly gave None or NaN" in caplog.text
    assert report.unscored == 3 * 8 and len(table(first)) == 21
    count_prompts.clear()
    make_trainer(rewards=partly).estimate_values()
    assert sorted(count_prompts) == sorted((row["prompt"], 8) for row in problems(24) if row["answer"] == "3")


def test_a_partly_scored_prompt_is_completed_by_the_next_run(make_trainer, count_prompts):
    answers = iter([None, None] + [1.0] * 10_000)

    def flaky(completions, **kwargs):
        return [next(answers) for _ in completions]

    trainer = make_trainer(rewards=flaky, rows=1, per_device_train_batch_size=1, value_reward_version="1")
    trainer.estimate_values()
    assert [len(rewards) for rewards in table(trainer).values()] == [6]
    assert list(trainer.values.known.values()) == [1.0]
    count_prompts.clear()
    trainer = make_trainer(rewards=flaky, rows=1, per_device_train_batch_size=1, value_reward_version="1")
    trainer.estimate_values()
    assert [count for _, count in count_prompts] == [2]
    assert [len(rewards) for rewards in table(trainer).values()] == [8]


@pytest.mark.parametrize("kind", ["torch", "transform", "removed columns"])
def test_rows_of_stage_one_are_those_that_the_loader_gives(make_trainer, count_prompts, kind):
    seen = []

    def look(completions, prompts, number=None, **kwargs):
        seen.append((type((number or [None])[0]), prompts[0].startswith("1+")))
        return [float(len(c) % 2) for c in completions]

    def one_plus(batch):
        return {**batch, "prompt": ["1+" + prompt for prompt in batch["prompt"]]}

    data = problems(24).add_column("number", list(range(24)))
    trainer = make_trainer(rewards=look, remove_unused_columns=kind == "removed columns")
    if kind == "torch":
        data = data.with_format("torch")
    elif kind == "transform":
        data = data.with_transform(one_plus)
    trainer.train_dataset = data
    trainer.train()
    assert len(count_prompts) == 24  # stage 2 found every key of stage 1
    assert {kind for kind, _ in seen} == {
        "torch": {torch.Tensor},
        "transform": {int},
        "removed columns": {type(None)},
    }[kind]
    if kind == "transform":
        assert all(transformed for _, transformed in seen)


def test_the_store_is_opened_by_name_and_reading_it_does_nothing(make_trainer, monkeypatch):
    trainer = make_trainer()
    with pytest.raises(RuntimeError, match="on all ranks together"):
        _ = trainer.values.stage_one
    trainer.estimate_values()
    monkeypatch.setattr("trl_fsdp_qlora.a_star_po.values.broadcast_object_list", None)
    assert trainer.values.stage_one is trainer.values.stage_one
