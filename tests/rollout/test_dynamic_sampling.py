"""Further prompts for groups with equal rewards."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import IterableDataset

from tests.distributed.launch import launch
from tests.tiny import config, lora, prompts, tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.recipe.rewards import completion_text
from trl_fsdp_qlora.rollout.dynamic_sampling import DynamicSampling, ScoredRows, groups_with_variance

NAN = float("nan")
WORKER = Path(__file__).parent / "dynamic_sampling_worker.py"


def test_variance_is_different_rewards():
    rewards = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 0], [NAN, NAN], [2, NAN], [NAN, NAN], [NAN, NAN]])
    ones = torch.ones(2)
    assert groups_with_variance(rewards, ones, 2, each=False).tolist() == [False, False, False, False]
    assert groups_with_variance(rewards, ones, 2, each=True).tolist() == [False, True, False, False]
    weighted = groups_with_variance(rewards, torch.tensor([1.0, 2.0]), 2, each=False)
    assert weighted.tolist() == [False, True, False, False]


def sampling(size=10, max_rounds=3, seed=0, group=2, accelerator=None):
    args = SimpleNamespace(num_generations=group, dynamic_sampling_max_rounds=max_rounds, seed=seed)
    args.multi_objective_aggregation = "sum_then_normalize"
    dataset = [{"n": i} for i in range(size)]
    return DynamicSampling(args, dataset, accelerator or Accelerator(cpu=True), torch.ones(1))


def run(made, rewards_of, batch):
    """Fill a batch of these dataset indices; a completion is its prompt's number, its reward from `rewards_of`."""
    asked = []

    def draw(rows):
        asked.append([row["n"] for row in rows[::2]])
        rewards = torch.tensor([[float(r)] for row in rows[::2] for r in rewards_of(row["n"])])
        return ScoredRows(rows, [f"c{row['n']}" for row in rows], rewards)

    filled, metrics = made.fill([made.dataset[i] for i in batch for _ in range(2)], draw)
    return filled, metrics, asked[1:]


def test_zero_variance_groups_are_replaced_at_their_places():
    filled, metrics, asked = run(sampling(), lambda n: (0, n % 2), [0, 1, 2, 3])
    assert [row["n"] % 2 for row in filled] == [1] * 8
    assert [row["n"] for row in filled][2:4] == [1, 1]  # the others stay where they are
    assert filled.drawn == [f"c{row['n']}" for row in filled]
    assert filled.rewards_NK[:, 0].tolist() == [0.0, 1.0] * 4
    assert metrics["dynamic_sampling/frac_zero_variance"] == 0
    assert metrics["dynamic_sampling/further_prompts"] == sum(map(len, asked))
    assert metrics["dynamic_sampling/rounds"] == len(asked)
    assert len(asked[0]) == 2  # as many as had none


def test_what_is_left_after_the_rounds_is_kept_and_counted():
    filled, metrics, asked = run(sampling(40, max_rounds=2), lambda n: (0, n == 1), [0, 1, 2, 3])
    assert len(asked) == 2
    assert [row["n"] for row in filled] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert metrics["dynamic_sampling/frac_zero_variance"] == 0.75


def test_every_prompt_comes_once_before_any_comes_twice():
    made = sampling(7)
    drawn = [index for count in (3, 1, 9, 4, 4) for index in made.next_prompts(count)]
    assert Counter(drawn) == dict.fromkeys(range(7), 3)
    assert sorted(drawn[:7]) == sorted(drawn[7:14]) == list(range(7))
    assert drawn[:7] != drawn[7:14]
    again = sampling(7)
    again.next_prompts(5)
    resumed = sampling(7)
    resumed.taken = again.taken
    assert again.next_prompts(9) == resumed.next_prompts(9) == drawn[5:14]
    assert sampling(7, seed=1).next_prompts(7) != drawn[:7]


# --- in a trainer ---------------------------------------------------------------------------------------------------


def even_start(completions, **_columns) -> list[float]:
    """Equal within many groups: whether a completion starts with an even digit, or not at all for odd problems."""
    return [float(completion_text(c)[:1] in tuple("02468")) for c in completions]


def make(folder, cls=EfficientGRPOTrainer, config_cls=EfficientGRPOConfig, **changes):
    changes = {"dynamic_sampling": True, "max_completion_length": 3, "reward": even_start, **changes}
    return trainer(cls, config_cls, folder, peft_config=lora(), **changes)


BOTH = [(EfficientGRPOTrainer, EfficientGRPOConfig), (TSPMOTrainer, TSPMOConfig)]


@pytest.mark.parametrize(("cls", "config_cls"), BOTH, ids=["grpo", "t_spmo"])
def test_training_has_fewer_zero_variance_groups(tmp_path, cls, config_cls):
    shares = {}
    for on in (False, True):
        made = make(tmp_path / str(on), cls, config_cls, dynamic_sampling=on, max_steps=6, beta=0.0)
        made.train()
        logs = [entry for entry in made.state.log_history if "loss" in entry]
        shares[on] = sum(entry["frac_reward_zero_std"] for entry in logs) / len(logs)
        assert ("dynamic_sampling/further_prompts" in logs[0]) == on
        if on:
            assert sum(entry["dynamic_sampling/further_prompts"] for entry in logs) > 0
            for entry in logs:
                assert entry["frac_reward_zero_std"] == pytest.approx(entry["dynamic_sampling/frac_zero_variance"])
    assert shares[False] > 0
    assert shares[True] < shares[False]


def test_a_dataset_without_any_variance_trains_on(tmp_path):
    """As in stock TRL: a task that has been learned ends no run."""
    made = make(tmp_path, reward=lambda completions, **_: [1.0] * len(completions), dataset=prompts(4), max_steps=3)
    made.train()
    assert made.state.global_step == 3
    assert made.state.log_history[0]["dynamic_sampling/frac_zero_variance"] == 1.0
    assert made.state.log_history[0]["dynamic_sampling/rounds"] == 3


def test_rewards_logged_extras_and_rows_belong_together(tmp_path):
    def reward(completions, answer, log_extra, **_columns):
        log_extra("answer", list(answer))
        return even_start(completions)

    made = make(tmp_path, reward=reward, log_completions=False)
    rows = [made.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)]
    made._generate_and_score_completions(rows)
    logged = made._logs
    assert len(logged["prompt"]) == len(logged["completion"]) == len(logged["extra"]["answer"]) == 8
    known = {str(row["prompt"]): row["answer"] for row in made.train_dataset}
    assert list(logged["extra"]["answer"]) == [known[str(prompt)] for prompt in logged["prompt"]]
    assert list(logged["rewards"]["reward"]) == even_start(logged["completion"])


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    def losses(made):
        return {e["step"]: e["loss"] for e in made.state.log_history if "loss" in e}

    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = make(tmp_path, **settings)
    whole.train()
    assert whole.dynamic_sampling.taken > 0
    resumed = make(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.dynamic_sampling.taken == whole.dynamic_sampling.taken
    assert losses(resumed) == losses(whole)


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="streaming dataset"):
        make(tmp_path, dataset=IterableDataset.from_generator(lambda: iter(prompts(8).to_list())))
    with pytest.raises(ValueError, match="rollout_func"):
        args = config(EfficientGRPOConfig, tmp_path, dynamic_sampling=True)
        EfficientGRPOTrainer(tiny_model(), even_start, args, prompts(), rollout_func=lambda *_: None)


@pytest.mark.processes
def test_two_ranks_fill_as_one_and_train_in_step(tmp_path):
    launch(WORKER, str(tmp_path), timeout=240)
    alone = filled_of(Accelerator(cpu=True))
    together = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for key in ("inputs", "drawn"):
        assert together[0][key] + together[1][key] == alone[key]
    for key in ("rewards", "metrics", "state"):
        assert together[0][key] == together[1][key] == alone[key]
    assert together[0]["trained_state"] == together[1]["trained_state"]
    assert together[0]["trained_state"] > 0
    # Unlike numbers of rows and tokens, so a collective in decoding would hang.
    for rank, steps in zip(together, (4 * 15, 7 * 23), strict=True):
        assert rank["wrapped"] == "DistributedDataParallel"
        drawn = rank["completions"]
        assert drawn["ours"] == drawn["stock"] and drawn["same_weights"]
        assert drawn["steps"] == [steps, steps]


def filled_of(accelerator: Accelerator) -> dict:
    """A batch of three groups of four, so that the second lies on two ranks; every third prompt has equal rewards."""

    def draw(rows):
        first = accelerator.process_index * len(rows)
        everyone = (
            gather_object([row["n"] for row in rows]) if accelerator.num_processes > 1 else [r["n"] for r in rows]
        )
        rewards = torch.tensor([[float(n % 3 and i % 2)] for i, n in enumerate(everyone)])
        return ScoredRows(rows, [f"{row['n']}/{first + i}" for i, row in enumerate(rows)], rewards)

    made = sampling(20, group=4, accelerator=accelerator)
    rows = [made.dataset[i] for i in (0, 3, 4) for _ in range(4)]
    share = len(rows) // accelerator.num_processes
    mine = rows[accelerator.process_index * share :][:share]
    filled, metrics = made.fill(mine, draw)
    found = {"inputs": [row["n"] for row in filled], "drawn": filled.drawn, "rewards": filled.rewards_NK.tolist()}
    return {**found, "metrics": metrics, "state": made.taken}
