"""On a TRL that was not tested the first micro-batch is computed by TRL's own trainer class, too.

Covers `trainers/starting/first_step.py`.
"""

import pytest
import torch

import trl_fsdp_qlora
from tests import tiny
from tests.trainers.next_trl import steps
from tests.trainers.next_trl.changes import Change
from trl_fsdp_qlora.trainers import trainer_run
from trl_fsdp_qlora.trainers.grpo import trainer as grpo_trainer
from trl_fsdp_qlora.trainers.starting import first_step
from trl_fsdp_qlora.trainers.step.trl_pass import TrlPass

NOTHING = Change("nothing", lambda folder: None)
SAMPLED = {"token_selection": "uniform", "token_selection_rate": 0.5}


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setattr(trainer_run, "is_tested", lambda: False)


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "DPO"])
def test_the_comparison_happens_once_and_changes_nothing(name, monkeypatch):
    calls = []
    stock = first_step._difference

    def difference(*args):
        calls.append(stock(*args))
        return calls[-1]

    monkeypatch.setattr(first_step, "_difference", difference)
    expected = steps.run(name, True, NOTHING)
    assert not calls
    monkeypatch.setattr(trainer_run, "is_tested", lambda: False)
    losses, update = steps.run(name, True, NOTHING)
    assert calls == [None]
    # RLOO's first reference and old passes run as in stock TRL, which rounds differently.
    assert losses == pytest.approx(expected[0], abs=1e-7)
    torch.testing.assert_close(update, expected[1], rtol=1e-4, atol=1e-7)


def lines_of_comparison(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == first_step.__name__]


def test_a_selection_of_tokens_is_no_difference(untested, caplog):
    change = Change("nothing", lambda folder: None, settings=SAMPLED)
    steps.run("GRPO", True, change)
    assert lines_of_comparison(caplog) == []


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_a_difference_is_one_line_and_the_run_continues_as_stock(name, untested, monkeypatch, caplog):
    expected = steps.run(name, False, NOTHING)
    finished = TrlPass._finished
    monkeypatch.setattr(TrlPass, "_finished", lambda *args: (1.5 * finished(*args)[0], *finished(*args)[1:]))
    losses, update = steps.run(name, True, NOTHING)
    (line,) = lines_of_comparison(caplog)
    assert "pip install 'trl~=1.16.0'" in line
    assert losses == pytest.approx(expected[0], abs=1e-6)
    torch.testing.assert_close(update, expected[1], rtol=1e-4, atol=1e-7)


def test_what_cannot_be_compared_runs_as_stock(untested, monkeypatch, caplog):
    def fails(*_args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(first_step, "_difference", fails)
    steps.run("RLOO", True, NOTHING)
    assert "RuntimeError: no such thing" in caplog.text


@pytest.mark.parametrize("under", ["DeepSpeed", "FSDP1"])
def test_what_cannot_compare_has_a_line(under, tmp_path, caplog):
    trainer = steps.make("RLOO", True, str(tmp_path), NOTHING)
    name = {"DeepSpeed": "is_deepspeed_enabled", "FSDP1": "is_fsdp_enabled"}[under]
    setattr(trainer, name, True)
    assert not first_step.is_to_be_compared(trainer)
    (line,) = lines_of_comparison(caplog)
    assert under in line


def with_own_loss(cls):
    """A user's loss that doubles TRL's and counts its calls."""

    class Doubled(cls):
        calls = 0

        def compute_loss(self, *args, **kwargs):
            Doubled.calls += 1
            return 2 * super().compute_loss(*args, **kwargs)

    return Doubled


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "DPO"])
def test_below_a_users_loss_passes_are_compared_with_stock(name, untested, monkeypatch):
    """It was never compared, and the line said that it was."""
    made = trl_fsdp_qlora.__getattr__(f"Efficient{name}Trainer")
    users = with_own_loss(made)
    monkeypatch.setattr(trl_fsdp_qlora, f"Efficient{name}Trainer", users, raising=False)
    reasons = []
    stock = first_step._difference
    monkeypatch.setattr(first_step, "_difference", lambda *args: reasons.append(stock(*args)) or reasons[-1])
    steps.run(name, True, NOTHING)
    assert reasons == [None]
    assert users.calls == 2 * 4  # two steps of four micro-batches


@pytest.mark.parametrize("cls, config", [("TSPMOTrainer", "TSPMOConfig"), ("AStarPOTrainer", "AStarPOConfig")])
def test_a_loss_that_is_not_trls_has_a_line(cls, config, untested, tmp_path, caplog):
    cls, config = (getattr(trl_fsdp_qlora, name) for name in (cls, config))
    made = tiny.trainer(cls, config, tmp_path, peft_config=tiny.lora(), per_device_train_batch_size=4)
    assert not first_step.is_to_be_compared(made)
    lines = lines_of_comparison(caplog)
    assert lines and all(cls.__name__ in line for line in lines)


def test_no_completion_is_left_out_on_a_trl_that_was_not_tested(monkeypatch, tmp_path):
    monkeypatch.setattr(grpo_trainer, "is_tested", lambda: False)
    made = steps.make("GRPO", True, str(tmp_path), NOTHING)
    made.train()
    assert "tokens/scored_fraction" not in made.state.log_history[0]
