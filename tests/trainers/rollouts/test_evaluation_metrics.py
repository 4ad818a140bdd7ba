"""`compute_metrics` of GRPO and RLOO: what it gets is compared with what TRL logs of the same evaluation."""

import math

import pytest
import torch

from tests.distributed.launch import launch
from tests.tiny import character_tokenizer, config, digit_share, lora, prompts, tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer, EfficientRLOOConfig, EfficientRLOOTrainer
from trl_fsdp_qlora.trainers.rollouts import on_policy

TRAINERS = [(EfficientGRPOTrainer, EfficientGRPOConfig), (EfficientRLOOTrainer, EfficientRLOOConfig)]
WORKER = "tests/trainers/rollouts/evaluation_worker.py"


def length(completions, **columns):
    return [None if i % 2 else float(len(completion[0]["content"])) for i, completion in enumerate(completions)]


class Recorded:
    """The function of a user; its metric is that of the step, so that the last checkpoint is the best."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, completions, rewards, answer, **columns):
        self.calls.append({"prompts": prompts, "completions": completions, "rewards": rewards, "answer": answer})
        return {"share": torch.tensor(sum(rewards["digit_share"]) / len(completions)), "calls": len(self.calls)}


def trained(cls, config_cls, folder, function, **changes):
    settings = {
        "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "num_generations_eval": 2, "save_steps": 1,
        "per_device_eval_batch_size": 4, "save_strategy": "steps", **changes,
    }  # fmt: skip
    made = cls(
        tiny_model(),
        [digit_share, length],
        config(config_cls, folder, **settings),
        prompts(),
        eval_dataset=prompts(3),
        processing_class=character_tokenizer(),
        peft_config=lora(),
        compute_metrics=function,
    )
    made.train()
    return made


@pytest.mark.parametrize(("cls", "config_cls"), TRAINERS)
def test_the_function_gets_the_rows_of_an_evaluation_once(tmp_path, cls, config_cls):
    function = Recorded()
    best = {"metric_for_best_model": "calls", "load_best_model_at_end": True, "greater_is_better": True}
    made = trained(cls, config_cls, tmp_path, function, **best)
    evaluations = [entry for entry in made.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == len(function.calls) == 2
    for call in function.calls:
        # Three prompts, twice each, in TRL's order, with the columns of their rows.
        answers = {row["prompt"][0]["content"]: row["answer"] for row in prompts(3)}
        asked = [prompt[0]["content"] for prompt in call["prompts"]]
        assert asked[::2] == asked[1::2] and set(asked) == set(answers)
        assert call["answer"] == [answers[text] for text in asked]
        assert len(call["completions"]) == 6
        assert call["rewards"]["digit_share"] == pytest.approx(digit_share(call["completions"]))
        assert [math.isnan(value) for value in call["rewards"]["length"]] == [False, True] * 3
    # One batch of four and one of two completions: TRL's mean is that of the batches, the function's of the rows.
    shares = digit_share(function.calls[0]["completions"])
    assert evaluations[0]["eval_share"] == pytest.approx(sum(shares) / 6)
    by_batch = (sum(shares[:4]) / 4 + sum(shares[4:]) / 2) / 2
    assert evaluations[0]["eval_rewards/digit_share/mean"] == pytest.approx(by_batch, abs=1e-6)
    assert made.state.best_metric == 2 and made.state.best_model_checkpoint.endswith("checkpoint-2")


def test_a_function_that_fails_is_a_warning(tmp_path, caplog):
    def fails(**columns):
        raise ZeroDivisionError("of the metric")

    made = trained(*TRAINERS[0], tmp_path, fails)
    assert made.state.global_step == 2
    assert any("compute_metrics" in line and "ZeroDivisionError: of the metric" in line for line in caplog.messages)


def test_an_argument_of_trls_own_is_trls(tmp_path, monkeypatch):
    """On a later TRL that takes `compute_metrics`, it gets it, and this package calls nothing."""
    taken = []
    construct = on_policy.TrainerRun.__init__

    def stock(self, compute_metrics, **call):
        taken.append(compute_metrics)
        construct(self, **call)

    monkeypatch.setattr(on_policy, "parameters_of", lambda cls, method: ["compute_metrics"])
    monkeypatch.setattr(on_policy.TrainerRun, "__init__", stock)
    function = Recorded()
    trained(*TRAINERS[0], tmp_path, function)
    assert taken == [function] and function.calls == []


@pytest.mark.processes
@pytest.mark.parametrize("rows", [4, 3], ids=["even", "filled up"])
def test_two_ranks_have_the_metrics_of_all_rows(tmp_path, rows):
    """Of three prompts the ranks' last batch is filled up with rows of the beginning, which count once."""
    launch(WORKER, tmp_path, rows)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    assert first["metrics"] == second["metrics"] and second["calls"] == 0
    assert sorted(first["answers"]) == sorted([row["answer"] for row in prompts(rows)] * 2)
    assert first["metrics"]["eval_rows"] == 2 * rows
