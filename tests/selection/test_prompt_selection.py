"""Prompts chosen by how much their earlier groups taught.

As a script: one of two ranks that choose.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset

from tests.distributed.launch import launch
from tests.tiny import even_start, lora, prompts
from tests.tiny import trainer as tiny_trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.selection.prompt_selection import PromptSelection, arms_of, spread_and_success

NAN = float("nan")
GROUP = 8


@pytest.fixture(autouse=True)
def state_of_accelerate():
    """The logger of Accelerate raises until its state exists."""
    Accelerator(cpu=True)


def selection(rows=200, explore=0.25, half_life=10.0, seed=0, column=None, dataset=None, each=False, weights=(1.0,)):
    aggregation = "normalize_then_sum" if each else "sum_then_normalize"
    args = SimpleNamespace(seed=seed, multi_objective_aggregation=aggregation, prompt_selection_column=column)
    args.prompt_selection_explore = explore
    args.prompt_selection_half_life = half_life
    return PromptSelection(args, dataset or [{"n": i} for i in range(rows)], torch.tensor(weights))


def play(chooser, rates, batches, places=16, start=0, seed=0):
    """Draw batches of completions, each of which is right with its prompt's probability in `rates`.

    Returns:
        The chosen prompts of each batch, and the share of each batch's groups whose rewards are equal.
    """
    chosen = []
    equal = []
    for step in range(start, start + batches):
        random = np.random.default_rng([seed, step])
        indices = chooser.choose(places, step)
        rewards = (random.random((places, GROUP)) < np.asarray(rates)[indices, None]).astype(float)
        chooser.observe(indices, torch.tensor(rewards.reshape(-1, 1)), step)
        chosen.append(indices)
        equal.append(np.mean(rewards.min(1) == rewards.max(1)))
    return chosen, equal


def test_spread_is_the_unbiased_variance_and_a_success_explains_it():
    # Over every group of 0 and 1, weighted by its probability, the spread is 4 p (1 - p).
    for p in (0.1, 0.5, 0.8):
        groups = np.array(np.meshgrid(*[[0.0, 1.0]] * 4)).reshape(4, -1).T
        chance = np.prod(np.where(groups == 1, p, 1 - p), 1)
        measured = [spread_and_success(group, 0.0, 1.0) for group in groups]
        assert chance @ [spread for spread, _ in measured] == pytest.approx(4 * p * (1 - p))
        assert chance @ [success for _, success in measured] == pytest.approx(p)


def test_rewards_in_another_range_are_scaled_by_it():
    spread, success = spread_and_success(np.array([2.0, 3.0, 4.0, 3.0]), 0.0, 10.0)
    assert spread == pytest.approx(4 * np.var([0.2, 0.3, 0.4, 0.3], ddof=1))
    # The success rate whose variance is that of the rewards.
    assert success * (1 - success) == pytest.approx(np.var([0.2, 0.3, 0.4, 0.3]))
    assert success < 0.5
    assert spread_and_success(np.array([5.0, 5.0]), 0.0, 10.0) == (0.0, 0.0)


def test_missing_rewards_do_not_count():
    with_missing = spread_and_success(np.array([NAN, 1.0, 0.0]), 0.0, 1.0)
    assert with_missing == spread_and_success(np.array([1.0, 0.0]), 0.0, 1.0)
    for too_few in ([NAN, NAN], [1.0, NAN]):
        assert spread_and_success(np.array(too_few), 0.0, 1.0) == (0.0, 0.0)


def test_prompts_that_differed_are_drawn_again_and_equal_ones_are_not():
    # A third of the prompts is always right, a third never, a third half of the time, and these rates never change.
    rates = np.array([0.0, 1.0, 0.5] * 200)
    chosen, equal = play(selection(len(rates)), rates, 30)
    assert np.mean(equal[:2]) > 0.5
    assert np.mean(equal[10:]) < 0.25
    later = np.concatenate(chosen[10:])
    assert np.mean(rates[later] == 0.5) > 0.75
    assert all(len(set(batch)) == 16 for batch in chosen)
    # The share of exploration is kept: at least a quarter of each batch was never drawn before.
    drawn = set()
    for batch in chosen:
        assert len(set(batch) - drawn) >= 4
        drawn |= set(batch)


def first_draws(chooser, rates, batches):
    """Prompts in the order of their first draw, if one group of a prompt teaches it completely."""
    rates = rates.copy()
    random = np.random.default_rng(0)
    drawn = []
    for step in range(batches):
        indices = chooser.choose(16, step)
        drawn += [index for index in indices if chooser.last_step[index] < 0]
        rewards = (random.random((16, GROUP)) < rates[indices, None]).astype(float)
        chooser.observe(indices, torch.tensor(rewards.reshape(-1, 1)), step)
        rates[indices] = rates[indices].round()
    return drawn


def test_prompts_that_are_learned_at_once_are_not_drawn_again():
    drawn = first_draws(selection(2000, explore=0.0), np.full(2000, 0.51), 20)
    assert len(drawn) > 0.75 * 20 * 16


def test_arms_distinguish_prompts_that_were_never_drawn():
    rates = np.array([1.0, 0.51, 0.0] * 300)
    dataset = Dataset.from_dict({"n": list(range(900)), "difficulty": ["easy", "middle", "hard"] * 300})
    without_arms = first_draws(selection(dataset=dataset), rates, 16)[64:]
    with_arms = first_draws(selection(dataset=dataset, column="difficulty"), rates, 16)[64:]
    assert np.mean(rates[without_arms] == 0.51) < 0.45
    assert np.mean(rates[with_arms] == 0.51) > 0.6
    # A quarter of the places goes over the whole dataset, so that every arm is drawn from again.
    assert set(rates[with_arms]) == {0.0, 0.51, 1.0}


def test_arms_of_columns(caplog):
    dataset = Dataset.from_dict(
        {"length": list(range(200)), "level": [1, 2] * 100, "text": [str(i) for i in range(200)]}
    )
    for column in (None, "text", "nothing"):
        assert arms_of(dataset, column) == ([0] * 200, ["all"])
    too_many_values, no_column = (record.getMessage() for record in caplog.records)
    assert "'text'" in too_many_values
    assert "200" in too_many_values
    assert "'nothing'" in no_column
    assert "length, level, text" in no_column
    assert arms_of(dataset, "level") == ([0, 1] * 100, ["1", "2"])
    assert arms_of(dataset, "length")[0] == [i // 20 for i in range(200)]
    assert arms_of([{"kind": {"terms": i % 3}} for i in range(9)], "kind")[0] == [0, 1, 2] * 3


def test_several_rewards_and_missing_ones():
    rewards = torch.tensor([[1.0, NAN], [0, NAN], [1, 0], [0, 1], [NAN, NAN], [NAN, NAN], [1, 1], [1, 1]])
    for each, spreads in ((False, [True, False, False, False]), (True, [True, True, False, False])):
        chooser = selection(10, each=each, weights=(1.0, 1.0))
        chooser.observe([0, 1, 2, 3], rewards, 0)
        differed = [0 < chooser.successes[i] < 2 for i in range(4)]
        assert differed == spreads, each
    # A run without any reward goes on.
    chooser = selection(40)
    for step in range(3):
        chooser.observe(chooser.choose(4, step), torch.full((16, 1), NAN), step)
    assert chooser.history[-1][0] == 2
    assert len(set(chooser.choose(4, 3))) == 4


def test_all_solved_or_none_goes_through_the_dataset():
    for rate in (0.0, 1.0):
        chosen, equal = play(selection(64), np.full(64, rate), 8, places=8)
        assert np.mean(equal) == 1
        assert len(set(np.concatenate(chosen).tolist())) > 32


def test_fewer_prompts_than_places_are_chosen_equally_often():
    assert sorted(selection(3).choose(6, 0)) == [0, 0, 1, 1, 2, 2]


def test_seed_and_state_determine_what_is_chosen():
    rates = np.random.default_rng(1).random(300)
    whole, _ = play(selection(300), rates, 12)
    assert play(selection(300), rates, 12)[0] == whole
    assert play(selection(300, seed=1), rates, 1)[0] != whole[:1]
    first = selection(300)
    play(first, rates, 5)
    resumed = selection(300)
    resumed.load(first.state())
    assert play(resumed, rates, 7, start=5)[0] == whole[5:]
    assert resumed.history[:5] == first.history


def test_a_group_observed_in_two_parts_counts_once():
    chooser = selection(4, explore=0.0)
    for step in range(2):
        indices = chooser.choose(4, step)
        promised = dict(chooser.promised_for)
        chooser.observe(indices, torch.tensor([[1.0], [0.0]] * 4), step)
        after_first_part = [chooser.taught, chooser.promised, chooser.arm_groups[0]]
        chooser.observe(indices, torch.tensor([[1.0], [1.0]] * 4), step)  # the rest of each group
        assert [chooser.taught, chooser.promised, chooser.arm_groups[0]] == after_first_part
        assert chooser.metrics()["prompt_selection/new_fraction"] == (step == 0)
        assert chooser.successes.tolist() == [3 + 3 * 0.5 ** (step / 10) * step] * 4
    assert len(promised) == 4
    assert chooser.promised == pytest.approx(sum(promised.values()))


def test_the_picture_is_drawn_from_the_history(tmp_path):
    dataset = Dataset.from_dict({"n": list(range(60)), "difficulty": ["easy", "middle", "hard"] * 20})
    chooser = selection(dataset=dataset, column="difficulty")
    play(chooser, np.array([1.0, 0.5, 0.0] * 20), 4)
    for row in chooser.history:
        assert len(row) == 12
        assert sum(row[1:9]) == sum(row[9:]) == 16
    chooser.draw(tmp_path / "chosen.png")
    assert (tmp_path / "chosen.png").stat().st_size > 10_000


def test_the_history_of_another_dataset_starts_anew(caplog):
    smaller = selection(50)
    play(smaller, np.full(50, 0.5), 3)
    for state in (smaller.state(), None):
        larger = selection(60)
        caplog.clear()
        larger.load(state)
        assert (larger.last_step == -1).all()
        assert larger.batches == 0
        assert len(caplog.records) == 1


# --- in a trainer ---------------------------------------------------------------------------------------------------


def make(folder, cls=EfficientGRPOTrainer, config_cls=EfficientGRPOConfig, **changes):
    changes = {"prompt_selection": "history", "max_completion_length": 3, "reward": even_start, **changes}
    return tiny_trainer(cls, config_cls, folder, peft_config=lora(), **changes)


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def record_chosen(trainer) -> list[list[int]]:
    """Returns a list to which `trainer` appends the prompts of each batch when it chooses them."""
    batches = []
    choose = trainer.prompt_selection.choose

    def recorded(*args):
        batches.append(choose(*args))
        return batches[-1]

    trainer.prompt_selection.choose = recorded
    return batches


BOTH = [(EfficientGRPOTrainer, EfficientGRPOConfig), (TSPMOTrainer, TSPMOConfig)]


@pytest.mark.parametrize("both", BOTH, ids=["grpo", "t_spmo"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, both, dynamic):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "dynamic_sampling": dynamic}
    trainer = make(tmp_path, *both, **settings)
    trainer.train()
    assert (tmp_path / "prompt_selection.png").is_file()
    resumed = make(tmp_path, *both, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed) == losses(trainer)
    assert resumed.prompt_selection.history == trainer.prompt_selection.history
    assert (resumed.prompt_selection.successes == trainer.prompt_selection.successes).all()
    entry = trainer.state.log_history[-2]
    assert 0 < entry["prompt_selection/new_fraction"] <= 1


def test_switched_off_there_is_no_selection(tmp_path):
    assert make(tmp_path, prompt_selection="off").prompt_selection is None


def test_the_chosen_prompts_are_trained_on(tmp_path):
    trainer = make(tmp_path, max_steps=4)
    batches = record_chosen(trainer)
    trainer.train()
    chosen = [str(trainer.train_dataset[i]["prompt"]) for batch in batches for i in batch for _ in range(4)]
    logged = [str(prompt) for prompt in trainer._logs["prompt"]]
    assert logged == chosen[-len(logged) :]


def test_bad_input(tmp_path, caplog):
    streaming = IterableDataset.from_generator(lambda: iter(prompts(8).to_list()))
    trainer = make(tmp_path, dataset=streaming, max_steps=1)
    assert trainer.prompt_selection is None
    assert "prompt_selection='history'" in caplog.text
    trainer.train()
    with pytest.raises(ValueError, match="prompt_selection='best'"):
        make(tmp_path, prompt_selection="best")
    with pytest.raises(ValueError, match="prompt_selection_explore=2"):
        make(tmp_path, prompt_selection_explore=2)
    with pytest.raises(ValueError, match="prompt_selection_half_life=0"):
        make(tmp_path, prompt_selection_half_life=0)


@pytest.mark.processes
def test_two_ranks_choose_as_one(tmp_path):
    launch(__file__, str(tmp_path), timeout=240)
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    for key in ("history", "successes", "parameters"):
        assert first[key] == second[key]
    # Two ranks draw other completions than one, but the first prompts are determined by the seed.
    assert first["chosen"] == make(tmp_path / "alone", **SETTINGS).prompt_selection.choose(4, 0)


SETTINGS = {"max_steps": 3, "prompt_selection_explore": 0.5}


def on_two_ranks(folder: Path) -> None:
    trainer = make(folder / "together", **SETTINGS)
    batches = record_chosen(trainer)
    trainer.train()
    chooser = trainer.prompt_selection
    result = {
        "chosen": batches[0],
        "history": chooser.history,
        "successes": chooser.successes.tolist(),
        "parameters": [float(p.detach().sum()) for p in trainer.model.parameters() if p.requires_grad],
    }
    (folder / f"rank{Accelerator().process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    on_two_ranks(Path(sys.argv[1]))
