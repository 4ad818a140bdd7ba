"""`compat/signatures.py`: whose code a method is, and the names of a patched method's parameters."""

import contextlib
import functools

import pytest
import torch
import trl

from tests import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.compat.signatures import parameters_of, users_code

PASS = "_get_per_token_logps_and_entropies"


@contextlib.contextmanager
def around(*_args):
    yield


def decorated(method):
    """The user's own function under a decorator of torch's, which hides its module."""
    return torch.no_grad()(method)


def mine(self, *args):
    return args


@pytest.fixture
def made(tmp_path):
    return tiny.trainer(EfficientGRPOTrainer, EfficientGRPOConfig, tmp_path)


def test_a_trainer_of_this_package_has_no_code_of_the_users(made):
    assert users_code(made, [PASS, "_compute_loss", "training_step"]) is None


def test_a_wrapper_that_calls_itself_trls_is_the_users(made, monkeypatch):
    stock = getattr(trl.GRPOTrainer, PASS)
    monkeypatch.setattr(trl.GRPOTrainer, PASS, functools.wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs)))
    assert users_code(made, ["_compute_loss", PASS]) == f"GRPOTrainer.{PASS}"


@pytest.mark.parametrize("method", [mine, decorated(mine), functools.partial(mine, None), staticmethod(mine)])
def test_a_method_of_a_mixin_is_the_users(made, method):
    class Mixin:
        _compute_loss = method

    class Users(Mixin, EfficientGRPOTrainer):
        pass

    users = object.__new__(Users)
    vars(users).update(vars(made))
    assert users_code(users, [PASS, "_compute_loss"]).endswith("Mixin._compute_loss")


def test_a_method_of_an_object_is_the_users(made):
    made._compute_loss = around
    assert users_code(made, ["_compute_loss"]) == "EfficientGRPOTrainer._compute_loss"


@pytest.mark.parametrize("name", ["__init__", PASS])
def test_a_patched_methods_parameters_are_those_of_its_source(monkeypatch, name):
    expected = parameters_of(trl.GRPOTrainer, name)
    monkeypatch.setattr(trl.GRPOTrainer, name, lambda *args, **kwargs: None)
    assert parameters_of(trl.GRPOTrainer, name) == expected
    assert expected[0] == "model"
