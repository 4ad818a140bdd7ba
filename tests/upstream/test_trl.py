import importlib
import inspect

import pytest
import trl

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.upstream import trl as trl_seams


def test_the_installed_trl_fits():
    trl_seams.check_seams()


def test_a_changed_signature_is_named():
    changed = {**trl_seams.EXPECTED, "split_tensor_dict": (trl_seams.split_tensor_dict, "tensor_dict chunks extra")}
    with pytest.raises(
        trl_seams.UnsupportedTRLVersion, match=r"split_tensor_dict: expected \(tensor_dict chunks extra\)"
    ):
        trl_seams.check_seams(changed)


def test_an_unknown_version_is_a_message(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    try:
        with pytest.raises(ImportError, match=r"written for TRL 1\.16\.x and found TRL 1\.99\.0.*pip install"):
            importlib.reload(trl_seams)
    finally:
        monkeypatch.undo()
        importlib.reload(trl_seams)


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "_get_per_token_logps_and_entropies",
        "_generate",
        "_calculate_rewards",
        "_save_checkpoint",
        "_generate_and_score_completions",
    ],
)
def test_overrides_keep_trls_signature(name):
    ours = inspect.signature(inspect.unwrap(getattr(EfficientGRPOTrainer, name))).parameters
    theirs = inspect.signature(inspect.unwrap(getattr(trl.GRPOTrainer, name))).parameters
    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
