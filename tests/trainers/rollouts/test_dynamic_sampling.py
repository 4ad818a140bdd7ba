"""Further prompts for groups with equal rewards.

As a script: one of two ranks that fill a batch, train under DDP and decode.
"""

import functools
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

from tests.distributed.launch import launch
from tests.engines.decode.test_decoding import greedy
from tests.tiny import even_start, lora, prompts
from tests.tiny import trainer as tiny_trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.engines.decode.completions import CompletionOptions, complete
from trl_fsdp_qlora.trainers.rollouts.dynamic_sampling import (
    DynamicSampling,
    ScoredRows,
    groups_with_variance,
)

NAN = float("nan")


def test_variance_is_different_rewards():
    rewards = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 0], [NAN, NAN], [2, NAN], [NAN, NAN], [NAN, NAN]])
    for weights, each, varied_group in (([1, 1], False, None), ([1, 1], True, 1), ([1, 2], False, 1)):
        has_variance = groups_with_variance(rewards, torch.tensor(weights), 2, each)
        assert has_variance.tolist() == [group == varied_group for group in range(4)]


def sampling(size=10, max_rounds=3, seed=0, group=2, accelerator=None):
    args = SimpleNamespace(num_generations=group, dynamic_sampling_max_rounds=max_rounds, seed=seed)
    dataset = [{"n": i} for i in range(size)]
    return DynamicSampling(args, dataset, accelerator or Accelerator(cpu=True))


def is_varied_of(group):
    return functools.partial(groups_with_variance, weights_K=torch.ones(1), group_size=group, normalizes_each=False)


def fill(dynamic_sampling, rewards_of, batch):
    """Fill a batch that starts with the prompts `batch`, two completions of each.

    Args:
        rewards_of: takes a prompt's number and returns the rewards of its two completions.
        batch: dataset indices.

    Returns:
        The filled batch, the metrics without their prefix, and the prompts' numbers of each further round.
    """
    rounds = []

    def draw(rows):
        rounds.append([row["n"] for row in rows[::2]])
        rewards = torch.tensor([[float(r)] for row in rows[::2] for r in rewards_of(row["n"])])
        return ScoredRows(rows, [f"c{row['n']}" for row in rows], rewards)

    inputs = [dynamic_sampling.dataset[i] for i in batch for _ in range(2)]
    filled, metrics = dynamic_sampling.fill(inputs, draw, is_varied_of(2))
    metrics = {name.removeprefix("dynamic_sampling/"): value for name, value in metrics.items()}
    return filled, metrics, rounds[1:]


def test_zero_variance_groups_are_replaced_at_their_places():
    filled, metrics, further_rounds = fill(sampling(), lambda n: (0, n % 2), [0, 1, 2, 3])
    assert [row["n"] % 2 for row in filled] == [1] * 8
    assert [row["n"] for row in filled][2:4] == [1, 1]  # a group whose rewards differ keeps its place
    assert filled.drawn == [f"c{row['n']}" for row in filled]
    assert filled.rewards_NK[:, 0].tolist() == [0.0, 1.0] * 4
    assert metrics["frac_zero_variance"] == 0
    assert metrics["further_prompts"] == sum(map(len, further_rounds))
    assert metrics["rounds"] == len(further_rounds)
    assert len(further_rounds[0]) == 2  # one further prompt for each of the two groups with equal rewards


def test_groups_left_after_the_last_round_stay_and_are_counted():
    filled, metrics, further_rounds = fill(sampling(40, max_rounds=2), lambda n: (0, n == 1), [0, 1, 2, 3])
    assert len(further_rounds) == 2
    assert [row["n"] for row in filled] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert metrics["frac_zero_variance"] == 0.75


def test_left_out_groups_keep_the_direction_of_the_gradient():
    """The policy chooses one of five answers, with a reward of 0 or 1.

    Averaged over all groups whose first two rewards differ, the gradient is a multiple of the gradient of p, the
    chance of a right answer.
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
    dynamic_sampling = sampling(7)
    drawn = [index for count in (3, 1, 9, 4, 4) for index in dynamic_sampling.next_prompts(count)]
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
    return tiny_trainer(cls, config_cls, folder, peft_config=lora(), **changes)


def history(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


BOTH = [(EfficientGRPOTrainer, EfficientGRPOConfig), (TSPMOTrainer, TSPMOConfig)]


@pytest.mark.parametrize(
    "both", [BOTH[0], pytest.param(BOTH[1], marks=pytest.mark.exhaustive)], ids=["grpo", "t_spmo"]
)
def test_dynamic_sampling_has_fewer_equal_groups_and_resumes(tmp_path, both):
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    zero_variance = {}
    for on in (False, True):
        trainer = make(tmp_path / str(on), *both, dynamic_sampling=on, **settings)
        trainer.train()
        logs = history(trainer)
        zero_variance[on] = sum(entry["frac_reward_zero_std"] for entry in logs) / len(logs)
        assert all(("dynamic_sampling/further_prompts" in entry) == on for entry in logs)
    assert trainer.dynamic_sampling.taken > 0
    assert zero_variance[True] < zero_variance[False]
    for entry in logs:
        assert entry["frac_reward_zero_std"] == pytest.approx(entry["dynamic_sampling/frac_zero_variance"])
    resumed = make(tmp_path / "True", *both, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "True" / "checkpoint-3"))
    assert resumed.dynamic_sampling.taken == trainer.dynamic_sampling.taken
    assert [entry["loss"] for entry in history(resumed)] == [entry["loss"] for entry in logs]


def test_logged_rewards_and_extras_belong_to_their_rows(tmp_path):
    def reward(completions, answer, log_extra, **_columns):
        log_extra("answer", list(answer))
        return even_start(completions)

    trainer = make(tmp_path, reward=reward, log_completions=False)
    trainer._generate_and_score_completions([trainer.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    logged = trainer._logs
    assert len(logged["prompt"]) == len(logged["completion"]) == len(logged["extra"]["answer"]) == 8
    answers = {str(row["prompt"]): row["answer"] for row in trainer.train_dataset}
    assert list(logged["extra"]["answer"]) == [answers[str(prompt)] for prompt in logged["prompt"]]
    assert list(logged["rewards"]["reward"]) == even_start(logged["completion"])


def test_equal_rewards_in_every_group_do_not_end_the_run(tmp_path):
    """As in stock TRL: such a task has been learned."""

    def always_right(completions, **_columns):
        return [1.0] * len(completions)

    trainer = make(tmp_path, reward=always_right, dataset=prompts(4), max_steps=1)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["dynamic_sampling/frac_zero_variance"] == 1.0
    assert logged["dynamic_sampling/rounds"] == 3


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="dynamic_sampling=False"):
        make(tmp_path, dataset=IterableDataset.from_generator(lambda: iter(prompts(8).to_list())))
    with pytest.raises(ValueError, match=r"image: .*dynamic_sampling=False"):
        make(tmp_path, dataset=prompts(8).add_column("image", [None] * 8))


@pytest.mark.processes
def test_two_ranks_fill_as_one_and_train_in_step(tmp_path):
    launch(__file__, str(tmp_path), timeout=240)
    alone = filled_of(Accelerator(cpu=True))
    together = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for key in ("inputs", "drawn"):
        assert together[0][key] + together[1][key] == alone[key]
    for key in ("rewards", "metrics", "state"):
        assert together[0][key] == together[1][key] == alone[key]
    assert together[0]["trained_state"] == together[1]["trained_state"] > 0
    # The ranks decode different numbers of rows and tokens, so a collective in decoding would hang.
    for results, steps in zip(together, (4 * 15, 7 * 23), strict=True):
        assert results["wrapped"] == "DistributedDataParallel"
        assert results["same_weights"]
        assert results["ours"] == results["stock"]
        assert results["steps"] == [steps, steps]


def filled_of(accelerator: Accelerator) -> dict:
    """A batch of three groups of four, so that the second is on two ranks; every third prompt has equal rewards."""

    def draw(rows):
        first_row = accelerator.process_index * len(rows)
        own_numbers = [row["n"] for row in rows]
        all_numbers = gather_object(own_numbers) if accelerator.num_processes > 1 else own_numbers
        rewards = torch.tensor([[float(n % 3 and i % 2)] for i, n in enumerate(all_numbers)])
        return ScoredRows(rows, [f"{row['n']}/{first_row + i}" for i, row in enumerate(rows)], rewards)

    dynamic_sampling = sampling(20, group=4, accelerator=accelerator)
    rows = [dynamic_sampling.dataset[i] for i in (0, 3, 4) for _ in range(4)]
    share = len(rows) // accelerator.num_processes
    filled, metrics = dynamic_sampling.fill(rows[accelerator.process_index * share :][:share], draw, is_varied_of(4))
    return {
        "inputs": [row["n"] for row in filled],
        "drawn": filled.drawn,
        "rewards": filled.rewards_NK.tolist(),
        "metrics": metrics,
        "state": dynamic_sampling.taken,
    }


def fill_train_and_decode(folder: Path) -> None:
    """The work of one of two ranks, which writes `rank0.json` or `rank1.json` in `folder`."""
    # Three groups of four over two ranks: six rows each.
    trainer = make(folder, per_device_train_batch_size=6, max_steps=3)
    trainer.train()
    rank = trainer.accelerator.process_index
    results = filled_of(trainer.accelerator)
    results["trained_state"] = trainer.dynamic_sampling.taken
    results["wrapped"] = type(trainer.model_wrapped).__name__
    # Rank 1 has three more prompts than rank 0. Both decode them by our loop and by transformers'.
    prompt_ids = [[5, 6, 7, 8]] * 4 + [[9, 10, 11 + i] for i in range(3 * rank)]
    weights_before = [p.detach().clone() for p in trainer.model.parameters()]
    # No token of the vocabulary ends a row: this model may end every row with its first one.
    settings = greedy(max_new_tokens=16 + 8 * rank, eos_token_id=[63])
    with trainer.rollout.generating(trainer.model_wrapped) as (model, synced_gpus):
        results["ours"], work = complete(model, prompt_ids, settings, CompletionOptions(synced_gpus=synced_gpus))
        results["stock"], _ = complete(
            model, prompt_ids, settings, CompletionOptions(synced_gpus=synced_gpus, compact=False)
        )
    results["steps"] = [work.row_steps, work.row_steps_stock]
    results["same_weights"] = all(map(torch.equal, trainer.model.parameters(), weights_before))
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    fill_train_and_decode(Path(sys.argv[1]))
