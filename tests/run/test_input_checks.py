import pytest
import torch
from datasets import Dataset, DatasetDict

from tests.tiny import trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.run import input_checks as checks


def test_training_stops_with_the_reward_functions_own_exception_and_takes_nan_for_none(tmp_path):
    def judge(missing):
        def reward(completions, **_):
            if missing is ConnectionError:
                raise ConnectionError("HTTP 503")
            return [missing if i == 1 else float(i) for i in range(len(completions))]

        return trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path, reward=reward, max_steps=2)

    with pytest.raises(ConnectionError, match="HTTP 503"):
        judge(ConnectionError).train()
    weights = []
    for missing in (float("nan"), None):
        made = judge(missing)
        made.train()
        weights.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
    assert torch.equal(*weights) and weights[0].isfinite().all()


def test_datasets():
    with pytest.raises(ValueError, match=r"no `prompt` column; its columns are question, answer.*rename_column"):
        checks.check_dataset(Dataset.from_dict({"question": ["1"], "answer": ["2"]}), 1)
    with pytest.raises(ValueError, match="has 3 rows, but one generation batch takes 4"):
        checks.check_dataset(Dataset.from_dict({"prompt": ["a"] * 3}), 4)
    part = Dataset.from_dict({"prompt": ["a"] * 4})
    checks.check_dataset(part, 4)
    with pytest.raises(ValueError, match=r"its columns are test, train.*take one: dataset\['train'\]"):
        checks.check_dataset(DatasetDict({"test": part, "train": part}), 1)


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    checks.check_processes(world_size=2)
    with pytest.raises(ValueError, match=r"2 processes were launched.* set use_cpu: true"):
        checks.check_processes(world_size=1)
    monkeypatch.delenv("WORLD_SIZE")
    checks.check_processes(world_size=1)
