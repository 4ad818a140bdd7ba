import importlib
import inspect

import pytest
import transformers
import trl

from trl_fsdp_qlora import AStarPOTrainer, EfficientGRPOTrainer, TSPMOTrainer
from trl_fsdp_qlora.compat import transformers as transformers_seams
from trl_fsdp_qlora.compat import trl as trl_seams
from trl_fsdp_qlora.compat.generation import MISFIT
from trl_fsdp_qlora.compat.signatures import misfits, warn_of_misfits
from trl_fsdp_qlora.compat.vllm import adapter_misfits


def test_the_installed_libraries_fit():
    assert misfits(trl_seams, trl_seams.EXPECTED) == misfits(transformers.Trainer, transformers_seams.EXPECTED) == []
    assert adapter_misfits() == [] and MISFIT is None


def test_a_changed_signature_is_named(caplog):
    changed = {"split_tensor_dict": "tensor_dict chunks extra", "GRPOTrainer._gone": "self"}
    warn_of_misfits("TRL", "1.99.0", trl_seams, changed)
    assert "TRL 1.99.0" in caplog.text
    assert "split_tensor_dict: expected (tensor_dict chunks extra), found (tensor_dict num_chunks)" in caplog.text
    assert "GRPOTrainer._gone: expected (self), found nothing" in caplog.text


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
