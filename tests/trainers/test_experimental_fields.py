"""The fields that switch an experiment on: each is a field of GRPO's config, and names a module that is there.

A contract of import-linter checks that nothing else knows an experiment by name.
"""

import dataclasses
import importlib
import importlib.util

import pytest

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.trainers.experimental_fields import MODULES, experiment


@pytest.mark.parametrize("field", MODULES)
def test_a_field_of_the_config_names_a_module(field):
    assert field in {item.name for item in dataclasses.fields(EfficientGRPOConfig)}
    folder, _, file = MODULES[field].partition(".")
    spec = importlib.util.find_spec(f"trl_fsdp_qlora.experimental.{folder}")
    assert spec is not None
    if file:  # which imports vLLM
        assert importlib.util.find_spec(f"{spec.name}.{file}") is not None


def test_the_experiment_of_a_field_is_its_module():
    module = experiment("rollouts_ahead")
    assert module is importlib.import_module("trl_fsdp_qlora.experimental.one_generation_ahead")
    with pytest.raises(KeyError):
        experiment("beta")
