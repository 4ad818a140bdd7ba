"""Whose code draws a turn (TRL's as tested, a user's, or that of a TRL that was not tested), and copies of methods."""

import functools
import inspect
import linecache
import textwrap

import pytest
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer
from trl.extras.profiling import ProfilingContext

from tests import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat import trl as trls
from trl_fsdp_qlora.compat.trl_rollouts import foreign_turn, with_names


@pytest.mark.parametrize("stock", [GRPOTrainer, RLOOTrainer])
def test_the_installed_body_is_known_by_its_source_alone(monkeypatch, stock):
    assert foreign_turn(stock._generate_single_turn) is None
    monkeypatch.setattr(trls, "is_tested", lambda: False)
    assert foreign_turn(stock._generate_single_turn) is None


@pytest.mark.parametrize("stock", [GRPOTrainer, RLOOTrainer])
def test_a_changed_body_is_foreign_on_a_trl_that_was_not_tested(monkeypatch, stock):
    text = textwrap.dedent(inspect.getsource(stock._generate_single_turn))
    changed = text.replace("is_eos.int().argmax(dim=1)", "is_eos.int().argmax(dim=1).clamp(max=3)")
    assert changed != text
    module = dict(inspect.unwrap(stock._generate_single_turn).__globals__)
    linecache.cache["changed.py"] = (len(changed), None, changed.splitlines(True), "changed.py")
    # Without the decorators and the cell of `super()`, which the comparison does not look at.
    body = changed[changed.index("def ") :].replace("super()", "self")
    exec(compile(body, "changed.py", "exec"), module)
    method = module["_generate_single_turn"]
    assert foreign_turn(method) is None, "a version that was tested is not compared"
    monkeypatch.setattr(trls, "is_tested", lambda: False)
    assert "not that of a TRL that was tested" in foreign_turn(method)


def test_a_users_function_behind_trls_own_decorator_is_the_users():
    from trl.extras.profiling import profiling_decorator

    assert "users_function" in foreign_turn(profiling_decorator(users_function))


def users_function(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
    return prompt_ids, None


def test_a_copy_with_other_names_keeps_decorators_and_defaults():
    calls = []

    def counted(function):
        @functools.wraps(function)
        def wrapper(self, *args):
            calls.append(args)
            return function(self, *args)

        return wrapper

    class Trainer:
        @counted
        @counted
        def report(self, x, *, y=2):
            return self, x, y, shuffled

    trainer = Trainer()
    assert with_names(trainer.report, shuffled="otherwise")(1) == (trainer, 1, 2, "otherwise")
    assert calls == [(1,), (1,)]
    assert trainer.report(1)[-1] == shuffled == "as the module has it"


shuffled = "as the module has it"


def test_trls_profiler_sees_the_calls_that_it_sees_in_stock(monkeypatch, tmp_path):
    """Those that wandb, MLflow and trackio show as `profiling/Time taken`."""
    names = {}
    for cls, config in ((GRPOTrainer, GRPOConfig), (EfficientGRPOTrainer, EfficientGRPOConfig)):
        seen = names[cls] = []
        monkeypatch.setattr(ProfilingContext, "_log_metrics", lambda timed, _, seen=seen: seen.append(timed.name))
        tiny.trainer(cls, config, tmp_path, max_steps=1, beta=0.1, peft_config=tiny.lora()).train()
    stock, ours = ({name.partition(".")[2] for name in seen} for seen in names.values())
    # This package draws by a loop of its own.
    assert ours == stock - {"transformers.generate"}
