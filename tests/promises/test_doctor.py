"""`doctor` finds what a run's own command would refuse, before the run starts."""

from pathlib import Path

import pytest

from tests.promises.commands import TINY, run
from tests.tiny import save_recipe_files


@pytest.fixture(autouse=True)
def recipe_files(tmp_path, monkeypatch):
    """A model `base`, and `data.jsonl`."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)


def finding(check: str, *words: str) -> tuple[int, str]:
    """The status of `doctor`, and its line of a check."""
    status, text = run("doctor", *TINY, *words)
    (line,) = [line for line in text.splitlines() if line.split(maxsplit=1)[1:] and f" {check}: " in line]
    return status, line


@pytest.mark.parametrize("named", ["Qwen3DecoderLayer", "LlamaDecoderLayer"])
def test_a_class_to_wrap_is_one_of_this_model(named):
    Path("launch.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
        f"  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: {named}\n"
    )
    status, line = finding("recipe", "--accelerate_config", "launch.yaml")
    if named == "Qwen3DecoderLayer":
        assert status == 0 and line.startswith("ok")
    else:
        assert status == 1 and line.startswith("error")
        assert f"fsdp_transformer_layer_cls_to_wrap: this model has no {named}, but Qwen3DecoderLayer" in line


def test_a_tracker_without_its_package():
    status, line = finding("recipe", "--report_to", "wandb")
    assert status == 1 and "report_to: wandb needs its package" in line
