"""A refusal is one line; a bug keeps its traceback."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig
from trl import ModelConfig

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.recipe import building, refusals, runner
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments
from trl_fsdp_qlora.run.input_checks import check_dataset


def unpack_too_much():
    _one, _two = (1, 2, 3)


def name_that_is_not_there():
    from trl_fsdp_qlora.recipe import no_such_name  # noqa: F401


def our_own_check():
    check_dataset([], 8, True)


BUGS = {
    "Python's own ValueError": unpack_too_much,
    "a wrong import": name_that_is_not_there,
    "a tensor library": lambda: torch.nn.functional.interpolate(torch.zeros(1, 1, 2), size=3, scale_factor=2),
    "text that is no number": lambda: int("ten"),
    "a key": lambda: {}["key"],
    "bytes that are no text": lambda: b"\xff".decode(),
}
REFUSALS = {
    "our own check": our_own_check,
    "transformers": lambda: AutoConfig.for_model("no-such-model"),
    "PEFT": lambda: LoraConfig(layers_pattern="h", target_modules="all-linear"),
    "a file": lambda: Path("/no/such/file").read_text(),
}


def raised_by(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_no_refusal(name):
    assert not refusals.is_refusal(raised_by(BUGS[name]))


@pytest.mark.parametrize("name", REFUSALS)
def test_a_check_is_one(name):
    assert refusals.is_refusal(raised_by(REFUSALS[name]))


@pytest.mark.parametrize(("fails", "expected"), [(unpack_too_much, ValueError), (our_own_check, ConfigError)])
def test_building_a_trainer_makes_one_line_of_a_refusal_only(fails, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(building.AutoTokenizer, "from_pretrained", lambda *args, **kwargs: fails())
    config = EfficientGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError) as caught:
        runner.build_trainer(object, ScriptArguments(dataset="d"), config, ModelConfig("m"), None)
    assert type(caught.value) is expected
