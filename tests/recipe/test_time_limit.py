"""A run that ends by its seconds: the clock is the test's own, so nothing depends on the machine's."""

import itertools
import json

import pytest

from tests.tiny import lora, save_tiny_model, trainer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.recipe import runner
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments
from trl_fsdp_qlora.recipe.checks import check_script
from trl_fsdp_qlora.recipe.record import TimeLimit


def test_a_run_stops_by_its_seconds_also_over_several_parts(tmp_path, monkeypatch):
    # A clock that goes on by one second with every look: a step takes one.
    monkeypatch.setattr(runner, "TimeLimit", lambda seconds: TimeLimit(seconds, itertools.count(1.0).__next__))
    monkeypatch.setattr(runner, "software", lambda: "")
    base = save_tiny_model(tmp_path / "base")

    def run(seconds, resume=None, steps=9, output="out"):
        script = ScriptArguments("addition", skip_accuracy=True, max_train_seconds=seconds)
        more = {"peft_config": lora(), "max_steps": steps, "save_strategy": "steps", "save_steps": 2}
        each = trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path / output, model=base, **more)
        return each, runner.run_recipe(each, script, None, resume)

    first, record = run(3)
    assert (first.state.global_step, record["stopped_by_seconds"], record["limited_seconds"]) == (3, 3, 3.0)
    again, same = run(3, "auto")
    assert again.state.global_step == 0 and same == json.loads(json.dumps(record))  # over: nothing is trained
    longer, record = run(5, "auto")
    assert longer.state.global_step == 5 and record["limited_seconds"] == 5.0  # two more, not five
    state = json.loads((tmp_path / "out" / "checkpoint-5" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["TimeLimit"]["attributes"] == {"spent": 5.0}
    assert run(None, "auto", steps=7)[0].state.global_step == 7
    run(None, steps=2, output="free")
    limited, record = run(1, "auto", output="free")  # its checkpoint has no seconds
    assert (limited.state.global_step, record["limited_seconds"]) == (3, 1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(seconds):
    with pytest.raises(ConfigError, match=r"max_train_seconds=.* must be positive"):
        check_script(ScriptArguments("addition", max_train_seconds=seconds))
