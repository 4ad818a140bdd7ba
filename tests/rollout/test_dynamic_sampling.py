"""Further prompts for groups with equal rewards; as a script, one of two ranks that fill a batch, train under DDP and decode."""

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
from tests.rollout.test_decoding import greedy
from tests.tiny import lora, prompts, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.recipe.rewards import completion_text
from trl_fsdp_qlora.rollout.completions import complete
from trl_fsdp_qlora.rollout.dynamic_sampling import DynamicSampling, ScoredRows, groups_with_variance

NAN = float("nan")


def test_variance_is_different_rewards():
    rewards = torch.tensor([[1.0, 0], [1, 0], [0, 1], [1, 0], [NAN, NAN], [2, NAN], [NAN, NAN], [NAN, NAN]])
    for weights, each, varied in (([1, 1], False, None), ([1, 1], True, 1), ([1, 2], False, 1)):
        found = groups_with_variance(rewards, torch.tensor(weights), 2, each)
        assert found.tolist() == [group == varied for group in range(4)]


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


def test_every_prompt_comes_once_before_any_comes_twice():
    made = sampling(7)
    drawn = [index for count in (3, 1, 9, 4, 4) for index in made.next_prompts(count)]
    assert Counter(drawn) == dict.fromkeys(range(7), 3)
    assert sorted(drawn[:7]) == sorted(drawn[7:14]) == list(range(7))
    assert drawn[:7] != drawn[7:14]
    resumed = sampling(7)
    resumed.taken = 5
    assert resumed.next_prompts(9) == drawn[5:14]
    assert sampling(7, seed=1).next_prompts(7) != drawn[:7]


# --- in a trainer ---------------------------------------------------------------------------------------------------


def even_start(completions, **_columns) -> list[float]:
    """Equal within many groups: whether a completion starts with an even digit, or not at all for odd problems."""
    return [float(completion_text(c)[:1] in tuple("02468")) for c in completions]


def make(folder, cls=EfficientGRPOTrainer, config_cls=EfficientGRPOConfig, **changes):
    changes = {"dynamic_sampling": True, "max_completion_length": 3, "reward": even_start, **changes}
    return trainer(cls, config_cls, folder, peft_config=lora(), **changes)


def history(made):
    return [entry for entry in made.state.log_history if "loss" in entry]


BOTH = [(EfficientGRPOTrainer, EfficientGRPOConfig), (TSPMOTrainer, TSPMOConfig)]


@pytest.mark.parametrize("both", BOTH, ids=["grpo", "t_spmo"])
def test_training_has_fewer_zero_variance_groups_and_resumes_bit_for_bit(tmp_path, both):
    shares, settings = {}, {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    for on in (False, True):
        made = make(tmp_path / str(on), *both, dynamic_sampling=on, **settings)
        made.train()
        logs = history(made)
        shares[on] = sum(entry["frac_reward_zero_std"] for entry in logs) / len(logs)
        assert all(("dynamic_sampling/further_prompts" in entry) == on for entry in logs)
    assert made.dynamic_sampling.taken > 0 and shares[True] < shares[False]
    for entry in logs:
        assert entry["frac_reward_zero_std"] == pytest.approx(entry["dynamic_sampling/frac_zero_variance"])
    resumed = make(tmp_path / "True", *both, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "True" / "checkpoint-3"))
    assert resumed.dynamic_sampling.taken == made.dynamic_sampling.taken
    assert [entry["loss"] for entry in history(resumed)] == [entry["loss"] for entry in logs]


def test_rewards_logged_extras_and_rows_belong_together_and_no_variance_at_all_ends_no_run(tmp_path):
    def reward(completions, answer, log_extra, **_columns):
        log_extra("answer", list(answer))
        return even_start(completions)

    made = make(tmp_path, reward=reward, log_completions=False)
    made._generate_and_score_completions([made.train_dataset[i] for i in (0, 0, 0, 0, 1, 1, 1, 1)])
    logged = made._logs
    assert len(logged["prompt"]) == len(logged["completion"]) == len(logged["extra"]["answer"]) == 8
    known = {str(row["prompt"]): row["answer"] for row in made.train_dataset}
    assert list(logged["extra"]["answer"]) == [known[str(prompt)] for prompt in logged["prompt"]]
    assert list(logged["rewards"]["reward"]) == even_start(logged["completion"])
    made = make(tmp_path, reward=lambda completions, **_: [1.0] * len(completions), dataset=prompts(4), max_steps=1)
    made.train()  # as in stock TRL: a task that has been learned
    logged = made.state.log_history[0]
    assert logged["dynamic_sampling/frac_zero_variance"] == 1.0 and logged["dynamic_sampling/rounds"] == 3


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="streaming dataset"):
        make(tmp_path, dataset=IterableDataset.from_generator(lambda: iter(prompts(8).to_list())))
    with pytest.raises(ValueError, match="there is image"):
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
    # Unlike numbers of rows and tokens, so a collective in decoding would hang.
    for rank, steps in zip(together, (4 * 15, 7 * 23), strict=True):
        assert rank["wrapped"] == "DistributedDataParallel" and rank["same_weights"]
        assert rank["ours"] == rank["stock"] and rank["steps"] == [steps, steps]


def filled_of(accelerator: Accelerator) -> dict:
    """A batch of three groups of four, so that the second lies on two ranks; every third prompt has equal rewards."""

    def draw(rows):
        first, mine = accelerator.process_index * len(rows), [row["n"] for row in rows]
        everyone = gather_object(mine) if accelerator.num_processes > 1 else mine
        rewards = torch.tensor([[float(n % 3 and i % 2)] for i, n in enumerate(everyone)])
        return ScoredRows(rows, [f"{row['n']}/{first + i}" for i, row in enumerate(rows)], rewards)

    made = sampling(20, group=4, accelerator=accelerator)
    rows = [made.dataset[i] for i in (0, 3, 4) for _ in range(4)]
    share = len(rows) // accelerator.num_processes
    filled, metrics = made.fill(rows[accelerator.process_index * share :][:share], draw)
    found = {"inputs": [row["n"] for row in filled], "drawn": filled.drawn, "rewards": filled.rewards_NK.tolist()}
    return {**found, "metrics": metrics, "state": made.taken}


def rank(folder: Path) -> None:
    # Three groups of four over two ranks: six rows each.
    made = make(folder, per_device_train_batch_size=6, max_steps=3)
    made.train()
    result, rank = filled_of(made.accelerator), made.accelerator.process_index
    result |= {"trained_state": made.dynamic_sampling.taken, "wrapped": type(made.model_wrapped).__name__}
    # Completions of as many prompts as this rank has, by our loop and by transformers', and what is left behind.
    asked = [[5, 6, 7, 8]] * 4 + [[9, 10, 11 + i] for i in range(3 * rank)]
    before = [p.detach().clone() for p in made.model.parameters()]
    # No token of the vocabulary ends a row: this model may end every row with its first one.
    settings = greedy(max_new_tokens=16 + 8 * rank, eos_token_id=[63])
    with made.rollout.generating(made.model_wrapped) as (model, lockstep):
        result["ours"], work = complete(model, asked, settings, synced=lockstep)
        result["stock"], _ = complete(model, asked, settings, synced=lockstep, compact=False)
    result["steps"] = [work.row_steps, work.row_steps_stock]
    result["same_weights"] = all(map(torch.equal, made.model.parameters(), before))
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    made.accelerator.wait_for_everyone()
    made.accelerator.end_training()


if __name__ == "__main__":
    rank(Path(sys.argv[1]))
