import inspect

import pytest
import trl

from trl_fsdp_qlora import AStarPOTrainer, EfficientGRPOTrainer, TSPMOTrainer
from trl_fsdp_qlora.compat import trl as trl_seams
from trl_fsdp_qlora.compat.generation import MISFIT
from trl_fsdp_qlora.compat.signatures import misfits
from trl_fsdp_qlora.compat.vllm import adapter_misfits


def test_a_signature_that_differs_is_named_and_the_installed_ones_fit():
    changed = {"split_tensor_dict": "tensor_dict chunks extra", "GRPOTrainer._gone": "self"}
    named = ["expected (tensor_dict chunks extra), found (tensor_dict num_chunks)", "expected (self), found nothing"]
    assert misfits(trl_seams, changed | {"use_adapter": "model adapter_name"}) == [
        f"{name}: {what}" for name, what in zip(changed, named, strict=True)
    ]
    assert adapter_misfits() == [] and MISFIT is None


@pytest.mark.parametrize("cls", [EfficientGRPOTrainer, TSPMOTrainer, AStarPOTrainer])
def test_overrides_keep_trls_signature(cls):
    names = {name for name in vars(cls) if name.startswith("_") and inspect.isfunction(vars(cls)[name])}
    names = {name for name in names if name in dir(trl.GRPOTrainer)} - {"__init__"}
    assert "_compute_loss" in names
    assert inspect.signature(EfficientGRPOTrainer) == inspect.signature(trl.GRPOTrainer)
    for name in names:
        ours = inspect.signature(inspect.unwrap(getattr(cls, name))).parameters
        theirs = inspect.signature(inspect.unwrap(getattr(trl.GRPOTrainer, name))).parameters
        arguments = [(p.name, p.kind) for p in ours.values() if p.kind is not p.VAR_POSITIONAL]
        wanted = [(p.name, p.kind) for p in theirs.values()]
        # An override that hands on what it does not read names the beginning only.
        assert arguments == (wanted if len(arguments) == len(ours) else wanted[: len(arguments)]), name
