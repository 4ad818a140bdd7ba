"""Further prompts for groups with equal rewards; as a script, one of two ranks that fill a batch, train under DDP and
decode.
"""

import itertools
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import IterableDataset

from tests.decode.test_decoding import greedy
from tests.distributed.launch import launch
from tests.tiny import even_start, lora, prompts, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.decode.completions import complete
from trl_fsdp_qlora.selection.dynamic_sampling import DynamicSampling, ScoredRows, groups_with_variance

NAN = float("nan")


def test_variance_is_different_rewards():
    rewards = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 0], [NAN, NAN], [2, NAN], [NAN, NAN], [NAN, NAN]])
    for weights, each, varied in (([1, 1], False, None), ([1, 1], True, 1), ([1, 2], False, 1)):
        differs = groups_with_variance(rewards, torch.tensor(weights), 2, each)
        assert differs.tolist() == [group == varied for group in range(4)]


def sampling(size=10, max_rounds=3, seed=0, group=2, accelerator=None, first=None):
    args = SimpleNamespace(num_generations=group, dynamic_sampling_max_rounds=max_rounds, seed=seed)
    args.dynamic_sampling = max_rounds > 0
    args.num_generations_first = first
    args.multi_objective_aggregation = "sum_then_normalize"
    dataset = [{"n": i} for i in range(size)]
    return DynamicSampling(args, dataset, accelerator or Accelerator(cpu=True), torch.ones(1))


def run(sampler, rewards_of, batch):
    """Fill a batch of these dataset indices; a completion is its prompt's number, its reward from `rewards_of`."""
    asked = []

    def draw(rows, count):
        assert count == 2
        asked.append([row["n"] for row in rows[::2]])
        rewards = torch.tensor([[float(r)] for row in rows[::2] for r in rewards_of(row["n"])])
        return ScoredRows(rows, [f"c{row['n']}" for row in rows], rewards)

    filled, metrics = sampler.fill([sampler.dataset[i] for i in batch for _ in range(2)], draw)
    return filled, {name.removeprefix("dynamic_sampling/"): value for name, value in metrics.items()}, asked[1:]


def test_zero_variance_groups_are_replaced_at_their_places():
    filled, metrics, asked = run(sampling(), lambda n: (0, n % 2), [0, 1, 2, 3])
    assert [row["n"] % 2 for row in filled] == [1] * 8
    assert [row["n"] for row in filled][2:4] == [1, 1]  # the others stay where they are
    assert filled.drawn == [f"c{row['n']}" for row in filled]
    assert filled.rewards_NK[:, 0].tolist() == [0.0, 1.0] * 4
    assert metrics["frac_zero_variance"] == 0 and metrics["further_prompts"] == sum(map(len, asked))
    assert metrics["rounds"] == len(asked) and len(asked[0]) == 2  # as many as had none
    # What is left after the rounds stays, and is counted.
    filled, metrics, asked = run(sampling(40, max_rounds=2), lambda n: (0, n == 1), [0, 1, 2, 3])
    assert len(asked) == 2 and [row["n"] for row in filled] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert metrics["frac_zero_variance"] == 0.75


def test_groups_grow_where_their_first_completions_differ():
    drawn_of = {}
    sampler = sampling(8, max_rounds=0, group=6, first=2)

    def draw(rows, count):
        numbers = [row["n"] for row in rows]
        assert numbers == [n for n in numbers[::count] for _ in range(count)]  # vLLM draws a group in one request
        completions_drawn = []
        for n in numbers:
            drawn_of[n] = drawn_of.get(n, 0) + 1
            completions_drawn.append(f"{n}:{drawn_of[n]}")
        # Odd prompts differ, in every other completion; of prompt 2 only later ones would.
        rewards = [[float((n % 2 and drawn_of[n] + i) % 2 or (n == 2 and i > 1))] for i, n in enumerate(numbers)]
        return ScoredRows(rows, completions_drawn, torch.tensor(rewards))

    filled, metrics = sampler.fill([sampler.dataset[i] for i in (0, 1, 2, 3) for _ in range(6)], draw)
    assert drawn_of == {0: 2, 1: 6, 2: 2, 3: 6}
    assert filled.drawn[:6] == ["0:1", "0:2"] * 3 and filled.drawn[12:18] == ["2:1", "2:2"] * 3
    assert filled.drawn[6:12] == [f"1:{i}" for i in range(1, 7)] and [row["n"] for row in filled][::6] == [0, 1, 2, 3]
    assert metrics["dynamic_sampling/frac_zero_variance"] == 0.5 and metrics["dynamic_sampling/rounds"] == 0
    # With dynamic sampling the places of those that do not grow go to others, which are screened in the same way.
    drawn_of.clear()
    sampler = sampling(8, max_rounds=9, group=6, first=2)
    filled, metrics = sampler.fill([sampler.dataset[i] for i in (0, 1, 4, 3) for _ in range(6)], draw)
    assert all(row["n"] % 2 for row in filled) and metrics["dynamic_sampling/frac_zero_variance"] == 0
    grown = {n for n in drawn_of if n % 2}
    assert all(drawn_of[n] in (2, 4) for n in drawn_of if n not in grown)
    assert [row["n"] for row in filled][6:12] == [1] * 6 and filled.drawn[6:8] == ["1:1", "1:2"]


def test_what_is_left_out_by_its_rewards_turns_no_gradient():
    """Rewards of 0 and 1, five answers: over all groups whose first two differ, the expected gradient is a multiple of
    that of p.
    """
    logits = torch.tensor([0.3, -0.5, 1.0, 0.0, -1.2], dtype=torch.float64)
    right = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    chances = logits.softmax(0)
    p = float(chances @ right)
    gradient_of_p = chances * (right - p)
    gradient = torch.zeros_like(logits)
    for group in itertools.product(range(5), repeat=4):
        rewards = right[list(group)]
        if rewards[0] != rewards[1]:
            advantages = (rewards - rewards.mean()) / rewards.std()
            scores = torch.eye(5, dtype=torch.float64)[list(group)] - chances  # d log π / d logits
            gradient += chances[list(group)].prod() * (advantages[:, None] * scores).mean(0)
    factor = (gradient @ gradient_of_p) / (gradient_of_p @ gradient_of_p)
    assert factor > 0 and torch.allclose(gradient, factor * gradient_of_p, atol=1e-12)


def test_every_prompt_comes_once_before_any_comes_twice():
    sampler = sampling(7)
    drawn = [index for count in (3, 1, 9, 4, 4) for index in sampler.next_prompts(count)]
    assert Counter(drawn) == dict.fromkeys(range(7), 3)
    assert sorted(drawn[:7]) == sorted(drawn[7:14]) == list(range(7))
    assert drawn[:7] != drawn[7:14]
    resumed = sampling(7)
    resumed.taken = 5
    assert resumed.next_prompts(9) == drawn[5:14]
    assert sampling(7, seed=1).next_prompts(7) != drawn[:7]


# --- in a trainer ---------------------------------------------------------------------------------------------------


def make(folder, cls=EfficientGRPOTrainer, config_cls=EfficientGRPOConfig, **changes):
    changes = {"dynamic_sampling": True, "max_completion_length": 3, "reward": even_start, **changes}
    return trainer(cls, config_cls, folder, peft_config=lora(), **changes)


def history(grpo):
    return [entry for entry in grpo.state.log_history if "loss" in entry]


BOTH = [(EfficientGRPOTrainer, EfficientGRPOConfig), (TSPMOTrainer, TSPMOConfig)]


@pytest.mark.parametrize("both", BOTH, ids=["grpo", "t_spmo"])
def test_training_with_groups_that_grow_draws_less_and_resumes_bit_for_bit(tmp_path, both):
    settings = {
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 3,
        "num_generations_first": 2,
        "dynamic_sampling": False,
    }
    grpo = make(tmp_path, *both, **settings)
    grpo.train()
    logs = history(grpo)
    for entry in logs:
        live = 1 - entry["groups/zero_variance_fraction"]
        # Two groups: two completions each, and two more of each that grew.
        assert entry.get("groups/drawn_per_trained", 0) * 8 * live == pytest.approx(4 + 2 * 2 * live if live else 0)
    assert any(entry["groups/zero_variance_fraction"] for entry in logs)
    resumed = make(tmp_path, *both, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [entry["loss"] for entry in history(resumed)] == [entry["loss"] for entry in logs]


@pytest.mark.parametrize("both", BOTH, ids=["grpo", "t_spmo"])
def test_training_has_fewer_zero_variance_groups_and_resumes_bit_for_bit(tmp_path, both):
    shares = {}
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    for on in (False, True):
        grpo = make(tmp_path / str(on), *both, dynamic_sampling=on, **settings)
        grpo.train()
        logs = history(grpo)
        shares[on] = sum(entry["frac_reward_zero_std"] for entry in logs) / len(logs)
        assert all(("dynamic_sampling/further_prompts" in entry) == on for entry in logs)
    assert grpo.dynamic_sampling.taken > 0 and shares[True] < shares[False]
    for entry in logs:
        assert entry["frac_reward_zero_std"] == pytest.approx(entry["dynamic_sampling/frac_zero_variance"])
    resumed = make(tmp_path / "True", *both, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "True" / "checkpoint-3"))
    assert resumed.dynamic_sampling.taken == grpo.dynamic_sampling.taken
    assert [entry["loss"] for entry in history(resumed)] == [entry["loss"] for entry in logs]


def test_rewards_logged_extras_and_rows_belong_together_and_no_variance_at_all_ends_no_run(tmp_path):
    def reward(completions, answer, log_extra, **_columns):
        log_extra("answer", list(answer))
        return even_start(completions)

    grpo = make(tmp_path, reward=reward, log_completions=False)
    grpo._generate_and_score_completions([grpo.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    logged = grpo._logs
    assert len(logged["prompt"]) == len(logged["completion"]) == len(logged["extra"]["answer"]) == 8
    known = {str(row["prompt"]): row["answer"] for row in grpo.train_dataset}
    assert list(logged["extra"]["answer"]) == [known[str(prompt)] for prompt in logged["prompt"]]
    assert list(logged["rewards"]["reward"]) == even_start(logged["completion"])
    grpo = make(tmp_path, reward=lambda completions, **_: [1.0] * len(completions), dataset=prompts(4), max_steps=1)
    grpo.train()  # as in stock TRL: a task that has been learned
    logged = grpo.state.log_history[0]
    assert logged["dynamic_sampling/frac_zero_variance"] == 1.0 and logged["dynamic_sampling/rounds"] == 3


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="streaming dataset"):
        make(tmp_path, dataset=IterableDataset.from_generator(lambda: iter(prompts(8).to_list())))
    with pytest.raises(ValueError, match="image"):
        make(tmp_path, dataset=prompts(8).add_column("image", [None] * 8))
    for first in (1, 5):
        with pytest.raises(ValueError, match=f"num_generations_first={first}"):
            make(tmp_path, num_generations_first=first)


@pytest.mark.processes
def test_two_ranks_fill_as_one_and_train_in_step(tmp_path):
    launch(__file__, str(tmp_path), timeout=240)
    alone = filled_of(Accelerator(cpu=True))
    together = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for key in ("inputs", "drawn"):
        assert together[0][key] + together[1][key] == alone[key]
    for key in ("rewards", "metrics", "state"):
        assert together[0][key] == together[1][key] == alone[key]
    grown = filled_of(Accelerator(cpu=True), grows=True)
    assert together[0]["grown"]["inputs"] + together[1]["grown"]["inputs"] == grown["inputs"]
    assert together[0]["grown"]["rewards"] == together[1]["grown"]["rewards"] == grown["rewards"]
    assert together[0]["trained_state"] == together[1]["trained_state"] > 0
    # Unlike numbers of rows and tokens, so a collective in decoding would hang.
    for rank, steps in zip(together, (4 * 15, 7 * 23), strict=True):
        assert rank["wrapped"] == "DistributedDataParallel" and rank["same_weights"]
        assert rank["ours"] == rank["stock"] and rank["steps"] == [steps, steps]


def filled_of(accelerator: Accelerator, grows: bool = False) -> dict:
    """A batch of three groups of four, so that the second lies on two ranks; every third prompt has equal rewards."""

    def draw(rows, count):
        first = accelerator.process_index * len(rows)
        mine = [row["n"] for row in rows]
        everyone = gather_object(mine) if accelerator.num_processes > 1 else mine
        rewards = torch.tensor([[float(n % 3 and i % 2)] for i, n in enumerate(everyone)])
        return ScoredRows(rows, [f"{row['n']}/{first + i}" for i, row in enumerate(rows)], rewards)

    sampler = sampling(20, group=4, accelerator=accelerator, first=3 if grows else None)
    rows = [sampler.dataset[i] for i in (0, 3, 4) for _ in range(4)]
    share = len(rows) // accelerator.num_processes
    filled, metrics = sampler.fill(rows[accelerator.process_index * share :][:share], draw)
    result = {"inputs": [row["n"] for row in filled], "drawn": filled.drawn, "rewards": filled.rewards_NK.tolist()}
    return {**result, "metrics": metrics, "state": sampler.taken}


def rank(folder: Path) -> None:
    # Three groups of four over two ranks: six rows each.
    grpo = make(folder, per_device_train_batch_size=6, max_steps=3)
    grpo.train()
    result = filled_of(grpo.accelerator)
    rank = grpo.accelerator.process_index
    result["grown"] = filled_of(grpo.accelerator, grows=True)
    result["trained_state"] = grpo.dynamic_sampling.taken
    result["wrapped"] = type(grpo.model_wrapped).__name__
    # Completions of as many prompts as this rank has, by our loop and by transformers', and what is left behind.
    asked = [[5, 6, 7, 8]] * 4 + [[9, 10, 11 + i] for i in range(3 * rank)]
    before = [p.detach().clone() for p in grpo.model.parameters()]
    # No token of the vocabulary ends a row: this model may end every row with its first one.
    settings = greedy(max_new_tokens=16 + 8 * rank, eos_token_id=[63])
    with grpo.rollout.generating(grpo.model_wrapped) as (model, synced_gpus):
        result["ours"], work = complete(model, asked, settings, synced_gpus=synced_gpus)
        result["stock"], _ = complete(model, asked, settings, synced_gpus=synced_gpus, compact=False)
    result["steps"] = [work.row_steps, work.row_steps_stock]
    result["same_weights"] = all(map(torch.equal, grpo.model.parameters(), before))
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    grpo.accelerator.wait_for_everyone()
    grpo.accelerator.end_training()


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
