"""A run that ends by its seconds: the clock is the test's own, so nothing depends on the machine's."""

import json

import pytest

from tests.tiny import lora, save_tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.recipe import runner
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments
from trl_fsdp_qlora.recipe.checks import check_script
from trl_fsdp_qlora.recipe.record import TimeLimit


class Ticks:
    """A clock that goes on by one second with every look: a step takes one."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def made(tmp_path, **more):
    base = save_tiny_model(tmp_path / "base")
    return trainer(
        EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / "out", model=base, peft_config=lora(), max_steps=9,
        save_strategy="steps", save_steps=2, **more,
    )  # fmt: skip


def test_a_run_stops_by_its_seconds_also_over_several_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "TimeLimit", lambda seconds: TimeLimit(seconds, Ticks()))
    monkeypatch.setattr(runner, "software", lambda: "")

    def run(seconds, resume=None):
        script = ScriptArguments("addition", skip_accuracy=True, max_train_seconds=seconds)
        each = made(tmp_path)
        return each, runner.run_recipe(each, script, None, resume)

    first, record = run(3)
    assert (first.state.global_step, record["stopped_by_seconds"], record["limited_seconds"]) == (3, 3, 3.0)
    again, same = run(3, "auto")
    assert again.state.global_step == 0 and same == json.loads(json.dumps(record))  # over: nothing is trained
    longer, record = run(5, "auto")
    assert longer.state.global_step == 5 and record["limited_seconds"] == 5.0  # two more, not five
    state = json.loads((tmp_path / "out" / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["TimeLimit"]["attributes"] == {"spent": 5.0}
    free, record = run(None, "auto")
    assert free.state.global_step == 9


def test_a_checkpoint_of_a_run_without_a_limit_is_gone_on_from(tmp_path):
    first = made(tmp_path)
    first.args.max_steps = 2
    first.train()
    second = made(tmp_path)
    second.add_callback(limit := TimeLimit(2, Ticks()))
    second.train("auto")
    assert (second.state.global_step, limit.spent) == (4, 2.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"max_train_seconds=.* must be positive"):
        check_script(ScriptArguments("addition", max_train_seconds=seconds))
