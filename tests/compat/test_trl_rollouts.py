"""Whose code draws a turn: TRL's as tested, a user's, or that of a TRL that was not tested."""

import inspect
import linecache
import textwrap

import pytest
from trl import GRPOTrainer, RLOOTrainer

from trl_fsdp_qlora.compat import trl as trls
from trl_fsdp_qlora.compat.trl_rollouts import foreign_turn


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
