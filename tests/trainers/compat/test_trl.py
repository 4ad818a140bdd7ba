import ast
import inspect
import textwrap
from inspect import Parameter

import pytest
import trl

from trl_fsdp_qlora import AStarPOTrainer, EfficientGRPOTrainer, TSPMOTrainer
from trl_fsdp_qlora.compat import trl as trl_seams
from trl_fsdp_qlora.compat.generation import MISFIT
from trl_fsdp_qlora.compat.signatures import misfits
from trl_fsdp_qlora.compat.vllm import adapter_misfits

VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def test_a_signature_that_differs_is_named_and_the_installed_ones_fit():
    changed = {"split_tensor_dict": "tensor_dict chunks extra", "GRPOTrainer._gone": "self"}
    named = ["expected (tensor_dict chunks extra), found (tensor_dict num_chunks)", "expected (self), found nothing"]
    assert misfits(trl_seams, changed | {"use_adapter": "model adapter_name"}) == [
        f"{name}: {what}" for name, what in zip(changed, named, strict=True)
    ]
    assert adapter_misfits() == [] and MISFIT is None


def test_one_more_parameter_of_a_function_that_is_called_by_name_is_no_misfit():
    """TRL 1.17 may add, reorder and give defaults; what this package passes has to stay."""

    class Newer:
        def ask(self, sampling_mask=None, *, max_tokens, prompts, **further): ...

    def differences(parameters, by_name=True):
        return misfits(Newer, {"ask": parameters}, by_name)

    assert differences("self prompts max_tokens") == differences("self prompts max_tokens sampling_mask") == []
    found = "found (self sampling_mask max_tokens prompts further)"
    assert differences("self prompts") == [f"ask: expected (self prompts), {found}"]  # `max_tokens` has no default
    in_order = differences("self prompts max_tokens", by_name=False)
    assert in_order == [f"ask: expected (self prompts max_tokens), {found}"]

    class Older:
        def ask(self, prompts, limit=None): ...

    assert misfits(Older, {"ask": "self prompts max_tokens"}, by_name=True)  # renamed


def test_what_trl_hands_over_in_order_has_trls_names():
    """Of arguments the signature has the names, and of results the `return` of the method."""
    turn = inspect.signature(trl.GRPOTrainer._generate_single_turn).parameters
    assert ("self", *trl_seams.Turn._fields) == tuple(turn)
    of_rloo = inspect.signature(trl.RLOOTrainer._generate_single_turn).parameters
    assert ("self", *trl_seams.Turn._fields[:3]) == tuple(of_rloo)
    tree = ast.parse(textwrap.dedent(inspect.getsource(trl.GRPOTrainer._generate)))
    (result,) = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    assert trl_seams.Generated._fields == tuple(entry.id for entry in result.elts)


@pytest.mark.parametrize("cls", [EfficientGRPOTrainer, TSPMOTrainer, AStarPOTrainer])
def test_overrides_keep_trls_signature(cls):
    names = {name for name in vars(cls) if name.startswith("_") and inspect.isfunction(vars(cls)[name])}
    names = {name for name in names if name in dir(trl.GRPOTrainer)} - {"__init__"}
    assert names
    assert inspect.signature(EfficientGRPOTrainer) == inspect.signature(trl.GRPOTrainer)
    for name in names:
        ours = inspect.signature(inspect.unwrap(getattr(cls, name))).parameters
        theirs = inspect.signature(inspect.unwrap(getattr(trl.GRPOTrainer, name))).parameters
        arguments = [(p.name, p.kind) for p in ours.values()]
        wanted = [(p.name, p.kind) for p in theirs.values()]
        if any(p.kind is p.VAR_POSITIONAL for p in ours.values()):
            # An override that hands on what it does not read names the beginning only.
            arguments = [
                (name, kind)
                for name, kind in arguments
                if kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            ]
            wanted = wanted[: len(arguments)]
        assert arguments == wanted, name
