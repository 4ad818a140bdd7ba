"""Prompts chosen by what they taught; as a script, one of two ranks that choose."""

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
from tests.tiny import even_start, lora, prompts, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.selection.prompt_selection import PromptSelection, arms_of, spread_and_success

NAN = float("nan")
GROUP = 8


@pytest.fixture(autouse=True)
def state_of_accelerate():
    Accelerator(cpu=True)  # its logger asks for it


def selection(rows=200, explore=0.25, half_life=10.0, seed=0, column=None, dataset=None, each=False, weights=(1.0,)):
    aggregation = "normalize_then_sum" if each else "sum_then_normalize"
    args = SimpleNamespace(seed=seed, multi_objective_aggregation=aggregation, prompt_selection_column=column)
    args.prompt_selection_explore = explore
    args.prompt_selection_half_life = half_life
    return PromptSelection(args, dataset or [{"n": i} for i in range(rows)], torch.tensor(weights))


def play(chooser, rates, batches, places=16, start=0, seed=0):
    """Batches of completions that are right as often as `rates` says of each prompt; what was chosen, and shares of
    equal groups.
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
        spreads = [spread_and_success(group, 0.0, 1.0) for group in groups]
        assert chance @ [spread for spread, _ in spreads] == pytest.approx(4 * p * (1 - p))
        assert chance @ [success for _, success in spreads] == pytest.approx(p)
    # Other rewards: in units of the run's range, with the success whose variance is theirs.
    spread, success = spread_and_success(np.array([2.0, 3.0, 4.0, 3.0]), 0.0, 10.0)
    assert spread == pytest.approx(4 * np.var([0.2, 0.3, 0.4, 0.3], ddof=1))
    assert success * (1 - success) == pytest.approx(np.var([0.2, 0.3, 0.4, 0.3])) and success < 0.5
    assert spread_and_success(np.array([5.0, 5.0]), 0.0, 10.0) == (0.0, 0.0)
    assert spread_and_success(np.array([NAN, 1.0, 0.0]), 0.0, 1.0) == spread_and_success(
        np.array([1.0, 0.0]), 0.0, 1.0
    )
    for nothing in ([NAN, NAN], [1.0, NAN]):
        assert spread_and_success(np.array(nothing), 0.0, 1.0) == (0.0, 0.0)


def test_prompts_that_differed_are_drawn_again_and_equal_ones_are_not():
    # Of prompts whose rates stay as they are: a third always right, a third never, a third half of the time.
    rates = np.array([0.0, 1.0, 0.5] * 200)
    chosen, equal = play(selection(len(rates)), rates, 30)
    assert np.mean(equal[:2]) > 0.5 and np.mean(equal[10:]) < 0.25
    later = np.concatenate(chosen[10:])
    assert np.mean(rates[later] == 0.5) > 0.75
    assert all(len(set(batch)) == 16 for batch in chosen)
    # The share of exploration is kept: at least a quarter of each batch was never drawn before.
    drawn = set()
    for batch in chosen:
        assert len(set(batch) - drawn) >= 4
        drawn |= set(batch)


def first_draws(chooser, rates, batches):
    """Prompts in the order of their first draw, if one group teaches all there is to learn."""
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


def test_arms_tell_prompts_apart_that_were_never_drawn():
    rates = np.array([1.0, 0.51, 0.0] * 300)
    dataset = Dataset.from_dict({"n": list(range(900)), "difficulty": ["easy", "middle", "hard"] * 300})
    drawn = {
        column: first_draws(selection(dataset=dataset, column=column), rates, 16) for column in (None, "difficulty")
    }
    middle = {column: np.mean(rates[indices[64:]] == 0.51) for column, indices in drawn.items()}
    assert middle[None] < 0.45 < 0.6 < middle["difficulty"]
    # A quarter of the places goes over the whole dataset, so that every arm is looked at again.
    assert set(rates[drawn["difficulty"][64:]]) == {0.0, 0.51, 1.0}


def test_arms_of_columns(caplog):
    dataset = Dataset.from_dict(
        {"length": list(range(200)), "level": [1, 2] * 100, "text": [str(i) for i in range(200)]}
    )
    for column in (None, "text", "nothing"):
        assert arms_of(dataset, column) == ([0] * 200, ["all"])
    too_many_values, no_column = (record.getMessage() for record in caplog.records)
    assert "'text'" in too_many_values and "200" in too_many_values
    assert "'nothing'" in no_column and "length, level, text" in no_column
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
    assert chooser.history[-1][0] == 2 and len(set(chooser.choose(4, 3))) == 4


def test_all_solved_or_none_goes_through_the_dataset():
    for rate in (0.0, 1.0):
        chosen, equal = play(selection(64), np.full(64, rate), 8, places=8)
        assert len(set(np.concatenate(chosen).tolist())) > 32 and np.mean(equal) == 1
    # Fewer prompts than places.
    assert sorted(selection(3).choose(6, 0)) == [0, 0, 1, 1, 2, 2]


def test_the_same_from_seed_and_state():
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


def test_a_group_that_grows_counts_once_as_new_and_once_for_what_it_was_chosen_for():
    chooser = selection(4, explore=0.0)
    for step in range(2):
        indices = chooser.choose(4, step)
        promised = dict(chooser.promised_for)
        chooser.observe(indices, torch.tensor([[1.0], [0.0]] * 4), step)
        once = [chooser.taught, chooser.promised, chooser.arm_groups[0]]
        chooser.observe(indices, torch.tensor([[1.0], [1.0]] * 4), step)  # the rest of each group
        assert [chooser.taught, chooser.promised, chooser.arm_groups[0]] == once
        assert chooser.metrics()["prompt_selection/new_fraction"] == (step == 0)
        assert chooser.successes.tolist() == [3 + 3 * 0.5 ** (step / 10) * step] * 4
    assert chooser.promised == pytest.approx(sum(promised.values())) and len(promised) == 4


def test_the_picture_has_what_was_chosen(tmp_path):
    dataset = Dataset.from_dict({"n": list(range(60)), "difficulty": ["easy", "middle", "hard"] * 20})
    chooser = selection(dataset=dataset, column="difficulty")
    play(chooser, np.array([1.0, 0.5, 0.0] * 20), 4)
    assert all(sum(row[1:9]) == sum(row[9:]) == 16 and len(row) == 12 for row in chooser.history)
    chooser.draw(tmp_path / "chosen.png")
    assert (tmp_path / "chosen.png").stat().st_size > 10_000


def test_the_history_of_another_dataset_starts_anew(caplog):
    first = selection(50)
    rates = np.full(50, 0.5)
    play(first, rates, 3)
    for state in (first.state(), None):
        other = selection(60)
        caplog.clear()
        other.load(state)
        assert (other.last_step == -1).all() and other.batches == 0
        assert len(caplog.records) == 1


# --- in a trainer ---------------------------------------------------------------------------------------------------


def make(folder, cls=EfficientGRPOTrainer, config_cls=EfficientGRPOConfig, **changes):
    changes = {"prompt_selection": "history", "max_completion_length": 3, "reward": even_start, **changes}
    return trainer(cls, config_cls, folder, peft_config=lora(), **changes)


def losses(grpo):
    return [entry["loss"] for entry in grpo.state.log_history if "loss" in entry]


BOTH = [(EfficientGRPOTrainer, EfficientGRPOConfig), (TSPMOTrainer, TSPMOConfig)]


@pytest.mark.parametrize("both", BOTH, ids=["grpo", "t_spmo"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, both, dynamic):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "dynamic_sampling": dynamic}
    grpo = make(tmp_path, *both, **settings)
    grpo.train()
    assert (tmp_path / "prompt_selection.png").is_file()
    resumed = make(tmp_path, *both, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(resumed) == losses(grpo)
    assert resumed.prompt_selection.history == grpo.prompt_selection.history
    assert (resumed.prompt_selection.successes == grpo.prompt_selection.successes).all()
    entry = grpo.state.log_history[-2]
    assert 0 < entry["prompt_selection/new_fraction"] <= 1


def test_switched_off_it_changes_nothing_and_switched_on_it_trains_on_what_was_chosen(tmp_path):
    off = make(tmp_path / "off", prompt_selection="off")
    assert off.prompt_selection is None
    grpo = make(tmp_path / "on", max_steps=4)
    seen = []
    draw = grpo.prompt_selection.choose

    def choose(*args):
        seen.append(draw(*args))
        return seen[-1]

    grpo.prompt_selection.choose = choose
    grpo.train()
    chosen = [str(grpo.train_dataset[i]["prompt"]) for batch in seen for i in batch for _ in range(4)]
    assert [str(prompt) for prompt in grpo._logs["prompt"]] == chosen[-len(grpo._logs["prompt"]) :]


def test_bad_input(tmp_path, caplog):
    streaming = IterableDataset.from_generator(lambda: iter(prompts(8).to_list()))
    grpo = make(tmp_path, dataset=streaming, max_steps=1)
    assert grpo.prompt_selection is None and "a streaming dataset has no index" in caplog.text
    grpo.train()
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
    assert first["history"] == second["history"] and first["successes"] == second["successes"]
    assert first["parameters"] == second["parameters"]
    # Their completions are other than those of one rank, but the first prompts are those of the seed.
    assert first["chosen"] == make(tmp_path / "alone", **SETTINGS).prompt_selection.choose(4, 0)


SETTINGS = {"max_steps": 3, "prompt_selection_explore": 0.5}


def on_two_ranks(folder: Path) -> None:
    grpo = make(folder / "together", **SETTINGS)
    chosen = []
    choose = grpo.prompt_selection.choose
    grpo.prompt_selection.choose = lambda *args: chosen.append(choose(*args)) or chosen[-1]
    grpo.train()
    chooser = grpo.prompt_selection
    result = {"chosen": chosen[0], "history": chooser.history, "successes": chooser.successes.tolist()}
    result["parameters"] = [float(p.detach().sum()) for p in grpo.model.parameters() if p.requires_grad]
    (folder / f"rank{Accelerator().process_index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    on_two_ranks(Path(sys.argv[1]))
