import importlib
import inspect

import pytest
import trl

from trl_fsdp_qlora import AStarPOTrainer, EfficientGRPOTrainer, TSPMOTrainer
from trl_fsdp_qlora.compat import trl as trl_seams
from trl_fsdp_qlora.compat.generation import MISFIT
from trl_fsdp_qlora.compat.signatures import misfits
from trl_fsdp_qlora.compat.vllm import adapter_misfits


def test_the_installed_libraries_fit():
    assert adapter_misfits() == [] and MISFIT is None


def test_a_changed_signature_is_named():
    changed = {
        "split_tensor_dict": "tensor_dict chunks extra",
        "GRPOTrainer._gone": "self",
        "use_adapter": "model adapter_name",
    }
    assert misfits(trl_seams, changed) == [
        "split_tensor_dict: expected (tensor_dict chunks extra), found (tensor_dict num_chunks)",
        "GRPOTrainer._gone: expected (self), found nothing",
    ]


def test_the_next_version_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    try:
        importlib.reload(trl_seams)
        assert "written for TRL 1.16 and was never run with TRL 1.99.0" in caplog.text
    finally:
        monkeypatch.undo()
        importlib.reload(trl_seams)


@pytest.mark.parametrize("cls", [EfficientGRPOTrainer, TSPMOTrainer, AStarPOTrainer])
def test_overrides_keep_trls_signature(cls):
    names = {name for name in vars(cls) if name.startswith("_") and inspect.isfunction(vars(cls)[name])}
    names = {name for name in names if name in dir(trl.GRPOTrainer)} - {"__init__"}
    assert "_compute_loss" in names
    for name in names:
        ours = inspect.signature(inspect.unwrap(getattr(cls, name))).parameters
        theirs = inspect.signature(inspect.unwrap(getattr(trl.GRPOTrainer, name))).parameters
        given = [(p.name, p.kind) for p in ours.values() if p.kind is not p.VAR_POSITIONAL]
        wanted = [(p.name, p.kind) for p in theirs.values()]
        # An override that hands on what it does not read names the beginning only.
        assert given == (wanted if len(given) == len(ours) else wanted[: len(given)]), name


def test_the_drop_in_takes_trls_arguments():
    assert inspect.signature(EfficientGRPOTrainer) == inspect.signature(trl.GRPOTrainer)
