"""Stage 1 in one process: what is sampled, kept, reused and refused."""

import random

import pytest
import torch
from datasets import IterableDataset

from .tiny import problems, tiny_model


def table(trainer):
    """What the folder holds: rewards by key, float64 of shape (samples, functions)."""
    return trainer.values.read()


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
    else:
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
    kept = len(table(trainer))
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
    assert len(table(trainer)) == 0


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
    types = {"torch": torch.Tensor, "transform": int, "removed columns": type(None)}
    assert {kind for kind, _ in seen} == {types[kind]}
    assert kind != "transform" or all(transformed for _, transformed in seen)
