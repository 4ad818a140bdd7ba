"""TRL's names, signatures and versions: each that is used is there, and one that is gone is named in a line."""

import ast
import inspect
import textwrap
from inspect import Parameter
from operator import attrgetter

import pytest
import trl
from trl.generation import vllm_generation

from trl_fsdp_qlora import AStarPOTrainer, EfficientGRPOTrainer, TSPMOTrainer
from trl_fsdp_qlora.compat import trl as trl_seams
from trl_fsdp_qlora.compat import trl_rollouts
from trl_fsdp_qlora.compat.signatures import misfits
from trl_fsdp_qlora.compat.transformers_generation import MISFIT

# What `engines/vllm/engine.py` and `engines/decode/completions.py` pass, and what they read of an engine under the
# same name. TRL's trainer passes the rest, and `AdapterEngine` hands it on.
PASSED = {
    "VLLMGeneration.__init__": "self model accelerator processing_class mode server_base_url server_host server_port "
    "server_timeout tensor_parallel_size gpu_memory_utilization max_model_length max_num_seqs enable_sleep_mode "
    "model_impl trust_remote_code temperature generation_kwargs",
    "VLLMGeneration._init_vllm": "self",
    "VLLMGeneration.sync_weights": "self",
    "VLLMClient.__init__": "self base_url connection_timeout",
    "VLLMClient.get_server_info": "self",
    "VLLMClient.generate": "self prompts max_tokens generation_kwargs",
}
VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def test_a_differing_signature_is_named_and_installed_ones_fit():
    changed = {"split_pixel_values_by_grid": "batch extra", "GRPOTrainer._gone": "self"}
    named = ["expected (batch extra), found (batch)", "expected (self), found nothing"]
    assert misfits(trl_seams, changed | {"use_adapter": "model adapter_name"}) == [
        f"{name}: {what}" for name, what in zip(changed, named, strict=True)
    ]
    assert MISFIT is None


@pytest.mark.parametrize("name", PASSED)
def test_trl_takes_what_the_engines_pass_by_name(name):
    if name == "VLLMClient.get_server_info" and trl.__version__.startswith("1.15."):
        pytest.skip("TRL 1.15's client cannot ask for a server's options: engines/vllm/engine.py does")
    function = inspect.unwrap(attrgetter(name)(vllm_generation))
    inspect.signature(function).bind(**dict.fromkeys(PASSED[name].split()))


def test_what_trl_passes_by_position_has_trls_names():
    """Of arguments the signature has the names, and of results the `return` of the method."""
    turn = inspect.signature(trl.GRPOTrainer._generate_single_turn).parameters
    assert ("self", *trl_rollouts.Turn._fields) == tuple(turn)
    of_rloo = inspect.signature(trl.RLOOTrainer._generate_single_turn).parameters
    assert ("self", *trl_rollouts.Turn._fields[:3]) == tuple(of_rloo)
    tree = ast.parse(textwrap.dedent(inspect.getsource(trl.GRPOTrainer._generate)))
    (result,) = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    assert trl_rollouts.Generated._fields == tuple(entry.id for entry in result.elts)


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


def test_a_name_that_is_gone_is_named_when_it_is_used(monkeypatch):
    monkeypatch.setitem(trl_seams.BORROWED, "gone", ("trl.trainer.utils", "prompts with pictures"))
    monkeypatch.setitem(trl_seams.BORROWED, "further", ("trl.nowhere", "prompts with pictures"))
    for name in ("trl.trainer.utils.gone", "trl.nowhere.further"):
        with pytest.raises(
            ImportError, match=f"TRL {trl.__version__} has no {name} \\(needed by: prompts with pictures"
        ):
            getattr(trl_seams, name.rpartition(".")[2])
    with pytest.raises(AttributeError):
        _ = trl_seams.never_there


def test_a_trl_that_is_too_old_or_lacks_a_trainer_is_one_line(monkeypatch):
    monkeypatch.setattr(trl, "__version__", "1.14.2")
    with pytest.raises(
        trl_seams.MissingName, match=r"^TRL 1\.14\.2 is too old for trl_fsdp_qlora: pip install 'trl~="
    ):
        trl_seams._borrow("GRPOTrainer", *trl_seams.BORROWED["GRPOTrainer"])
    monkeypatch.setattr(trl, "__version__", "1.20.0.dev0")
    expected = r"TRL 1.20.0.dev0 has no trl.KTOTrainerOfNext \(needed by: EfficientKTOTrainer\); pip install"
    with pytest.raises(trl_seams.MissingName, match=expected):
        trl_seams._borrow("KTOTrainerOfNext", "trl", "EfficientKTOTrainer")


@pytest.mark.parametrize(
    "version, tested",
    [
        ("1.14.2", False),
        ("1.15.0", True),
        ("1.16.3", True),
        ("1.16.0.dev0", True),
        ("1.20.0.dev0", False),
        ("1.17", False),
    ],
)
def test_a_version_that_was_not_tested_is_one_line(version, tested, caplog):
    trl_seams.is_tested.cache_clear()
    assert trl_seams.is_tested(version) == tested
    assert trl_seams.is_tested(version) == tested
    assert len(caplog.records) == (0 if tested or version == "1.14.2" else 1)


def test_all_borrowed_names_are_there():
    assert all(getattr(trl_seams, name) is not None for name in trl_seams.BORROWED)
