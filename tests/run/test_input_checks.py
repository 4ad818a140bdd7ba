import asyncio
import functools

import numpy as np
import pytest
import torch
from datasets import Dataset

from tests.tiny import trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.run import input_checks as checks

PROMPTS = ["a", [{"role": "user", "content": "the second prompt"}], "c"]
COLUMNS = {"completions": ["1", "2", "3"], "row": [10, 11, 12]}


def call(function, **extra):
    return checks.guard_reward(function)(prompts=PROMPTS, **COLUMNS, **extra)


def test_values_trl_accepts_pass_through():
    assert call(lambda **_: [1, None, 0.5]) == [1, None, 0.5]
    assert call(lambda **_: np.array([1.0, 2.0, 3.0])) == [1, 2, 3]
    assert call(lambda **_: torch.ones(3)) == [1, 1, 1]
    assert call(lambda **_: [True, False, True]) == [True, False, True]


def test_a_wrong_number_of_values_names_the_function(tmp_path):
    with pytest.raises(checks.RewardError, match=r"returned 2 values for 3 completions"):
        call(lambda **_: [1.0, 2.0])
    with pytest.raises(checks.RewardError, match=r"returned 1.0 for 3 completions"):
        call(lambda **_: 1.0)

    async def later(completions, **_):
        return [1.0] * (len(completions) - 1)

    guarded = checks.guard_reward(later)
    assert asyncio.iscoroutinefunction(guarded)
    with pytest.raises(checks.RewardError, match="'later' returned 2 values"):
        asyncio.run(guarded(prompts=PROMPTS, **COLUMNS))
    assert checks.guard_reward(functools.partial(later)).__name__ == "later"
    model = torch.nn.Linear(1, 1)
    assert checks.guard_reward(model) is model
    assert checks.guard_reward("someone/reward-model") == "someone/reward-model"


def test_training_stops_with_the_reward_functions_own_exception(tmp_path):
    calls = []

    def paid_judge(completions, **_):
        calls.append(len(completions))
        raise ConnectionError("HTTP 503")

    made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, reward=paid_judge)
    with pytest.raises(ConnectionError, match="HTTP 503"):
        made.train()
    assert calls == [8]


def test_a_nan_reward_trains_as_none_does(tmp_path):
    def with_missing(missing):
        def reward(completions, **_):
            return [missing if i == 1 else float(i) for i in range(len(completions))]

        return reward

    weights = []
    for missing in (float("nan"), None):
        made = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, reward=with_missing(missing), max_steps=2)
        made.train()
        weights.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
    assert torch.equal(*weights)
    assert weights[0].isfinite().all()


def test_datasets():
    with pytest.raises(ValueError, match=r"no `prompt` column; its columns are question, answer.*rename_column"):
        checks.check_dataset(Dataset.from_dict({"question": ["1"], "answer": ["2"]}), 1)
    with pytest.raises(ValueError, match="has 0 rows"):
        checks.check_dataset(Dataset.from_dict({"prompt": []}), 1)
    with pytest.raises(ValueError, match="has 3 rows, but one generation batch takes 4"):
        checks.check_dataset(Dataset.from_dict({"prompt": ["a"] * 3}), 4)
    checks.check_dataset(Dataset.from_dict({"prompt": ["a"] * 4}), 4)


def test_the_trainer_checks_before_it_loads_a_model(tmp_path):
    empty = Dataset.from_dict({"prompt": []})
    with pytest.raises(ValueError, match="has 0 rows"):
        trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, model=str(tmp_path / "missing"), dataset=empty)


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    checks.check_processes(world_size=2)
    with pytest.raises(ValueError, match=r"2 processes were launched.* set use_cpu: true"):
        checks.check_processes(world_size=1)
    monkeypatch.delenv("WORLD_SIZE")
    checks.check_processes(world_size=1)
