"""A key changes with everything a value depends on, and with nothing else."""

import functools
import importlib
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from tests.distributed.launch import run_code
from trl_fsdp_qlora.a_star_po.canonical import FingerprintError, canonical, digest
from trl_fsdp_qlora.a_star_po.fingerprint import reference_fingerprint, reward_fingerprint, row_key

from .tiny import tiny_model

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(plain, plain)
def test_equal_rows_have_equal_keys_and_different_rows_different_ones(a, b):
    assert (row_key("c", [1], {"x": a}) == row_key("c", [1], {"x": b})) == (repr(canonical(a)) == repr(canonical(b)))


def test_keys_depend_on_every_part():
    row = {"prompt": "1+1=", "answer": 2}
    variants = [
        row_key("c", [1, 2], row),
        row_key("d", [1, 2], row),
        row_key("c", [1, 3], row),
        row_key("c", [1, 2], {**row, "answer": 3}),
        row_key("c", [1, 2], {**row, "answer": "2"}),
        row_key("c", [1, 2], {**row, "extra": None}),
        row_key("c", [1, 2], {**row, "prompt": [{"role": "user", "content": "1+1="}]}),
    ]
    assert len(set(variants)) == len(variants)
    assert row_key("c", [1, 2], dict(reversed(row.items()))) == variants[0]


@pytest.mark.processes
def test_keys_are_the_same_in_another_process(tmp_path):
    """A child of the fork server, whose strings have hashes of its own."""
    code = "from trl_fsdp_qlora.a_star_po.canonical import digest; print(digest({'a': {1, 2, 'x'}, 'b': 0.1}))"
    run = run_code(code, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == digest({"b": 0.1, "a": {"x", 2, 1}})


def test_arrays_count_by_value_and_a_column_without_a_form_is_named():
    assert canonical(np.float64(1.5)) == 1.5
    assert digest(np.zeros(2)) != digest(np.zeros(3)) != digest(np.zeros(3, np.float32))
    assert digest(torch.ones(2, dtype=torch.bfloat16)) != digest(torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(FingerprintError, match="column 'lock'"):
        row_key("c", [1], {"prompt": "x", "lock": object()})


HELPER = "def helper(text):\n    return len(text)\n"
REWARD = """
    import re
    import rewards_helper
    SCALE = 2
    PATTERN = re.compile("a+")
    def inner(x):
        return x * SCALE
    def reward(completions, **kwargs):
        return [rewards_helper.helper(c) + inner(1) + len(PATTERN.findall(c)) for c in completions]
"""


@pytest.fixture
def load_reward(tmp_path, monkeypatch):
    """`load_reward(reward_source, helper_source)`: the functions of freshly written user modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(reward=REWARD, helper=HELPER):
        (tmp_path / "rewards_helper.py").write_text(helper)
        (tmp_path / "rewards_user.py").write_text(textwrap.dedent(reward))
        for name in ("rewards_helper", "rewards_user"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        import linecache

        linecache.clearcache()
        return importlib.import_module("rewards_user")

    yield load
    for name in ("rewards_helper", "rewards_user"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "change",
    [
        ("reward", "inner(1)", "inner(3)"),
        ("reward", "x * SCALE", "x + SCALE"),
        ("reward", "SCALE = 2", "SCALE = 3"),
        ("reward", '"a+"', '"b+"'),
        ("helper", "len(text)", "len(text) + 1"),
    ],
    ids=["itself", "helper function", "constant", "pattern", "helper module"],
)
def test_a_change_anywhere_a_reward_function_reaches_changes_its_fingerprint(load_reward, change):
    before = reward_fingerprint([load_reward().reward], ["reward"])
    assert reward_fingerprint([load_reward().reward], ["reward"]) == before
    which, old, new = change
    sources = {"reward": REWARD, "helper": HELPER}
    sources[which] = sources[which].replace(old, new)
    assert reward_fingerprint([load_reward(**sources).reward], ["reward"]) != before


def scaled(completions, scale=1.0, **kwargs):
    return [scale for _ in completions]


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, completions, **kwargs):
        return [self.scale for _ in completions]

    def method(self, completions, **kwargs):
        return [self.scale for _ in completions]


def closure(scale):
    def reward(completions, **kwargs):
        return [scale for _ in completions]

    return reward


def decorated(scale):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return [scale * value for value in function(*args, **kwargs)]

        return wrapper

    return decorate(scaled)


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: functools.partial(scaled, scale=scale),
        Scaler,
        lambda scale: Scaler(scale).method,
        closure,
        decorated,
        lambda scale: functools.cache(closure(scale)),
    ],
    ids=["partial", "object", "method", "closure", "decorator", "cache"],
)
def test_state_of_callables_counts(make):
    assert reward_fingerprint([make(1.0)], ["r"]) == reward_fingerprint([make(1.0)], ["r"])
    assert reward_fingerprint([make(1.0)], ["r"]) != reward_fingerprint([make(2.0)], ["r"])
    assert reward_fingerprint([make(1.0)], ["r"]) != reward_fingerprint([make(1.0)], ["other name"])


def test_reward_models_count_by_their_weights():
    model = nn.Linear(2, 2)
    before = reward_fingerprint([model], ["r"])
    with torch.no_grad():
        model.weight[0, 0] += 1e-6
    assert reward_fingerprint([model], ["r"]) != before


def test_what_cannot_be_followed_needs_a_version():
    generator = iter(x for x in range(3))

    def reward(completions, **kwargs):
        return [next(generator) for _ in completions]

    with pytest.raises(FingerprintError, match=r"generator.*value_reward_version"):
        reward_fingerprint([reward], ["reward"])
    one = reward_fingerprint([reward], ["reward"], "v1")
    assert one == reward_fingerprint([scaled], ["reward"], "v1")
    assert one != reward_fingerprint([reward], ["reward"], "v2")


def test_reference_is_the_base_whatever_adapter_hangs_on_it(tmp_path):
    base = reference_fingerprint(tiny_model())
    tiny_model().save_pretrained(tmp_path)
    assert reference_fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == base
    for config in (LoraConfig(r=2, target_modules=["q_proj"]), LoraConfig(r=8, target_modules="all-linear")):
        assert reference_fingerprint(get_peft_model(tiny_model(), config)) == base
    assert reference_fingerprint(tiny_model(seed=1)) != base
    assert reference_fingerprint(tiny_model().bfloat16()) != base


def test_an_adapter_that_is_part_of_the_reference_counts():
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]), adapter_name="ref")
    before = reference_fingerprint(model, "ref")
    assert before["weights"] != reference_fingerprint(model)["weights"]
    model.add_adapter("default", LoraConfig(r=2, target_modules=["q_proj"]))
    assert reference_fingerprint(model, "ref") == before
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if ".ref." in name).add_(1)
    assert reference_fingerprint(model, "ref") != before


def test_weights_that_are_not_there_need_a_version():
    with pytest.raises(FingerprintError, match="value_reference_version"):
        reference_fingerprint(tiny_model().to("meta"))
