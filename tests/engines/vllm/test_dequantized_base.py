"""The dense copy of a 4-bit base: the same function of its inputs, an ordinary checkpoint, made once."""

import shutil

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.launch import run_script
from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora.engines.vllm import dequantized_base as module
from trl_fsdp_qlora.engines.vllm.adapter_sync import RolloutError
from trl_fsdp_qlora.engines.vllm.dequantized_base import dequantized_base, has_packed_base
from trl_fsdp_qlora.fsdp2_qlora.loading import keep_plain_kernel


def write(model, folder, **options):
    return dequantized_base(model, tiny.make_tokenizer(), folder, torch.float32, progress=False, **options)


@pytest.mark.parametrize("tied, double, adapted", [(True, True, True), (False, True, False), (False, False, True)])
def test_logits_are_the_4_bit_models(tmp_path, tied, double, adapted):
    checkpoint = tiny.make_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    model = tiny.load(checkpoint, double=double)
    keep_plain_kernel(model)
    assert has_packed_base(model)
    ids = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
    folder = write(get_peft_model(model, tiny.lora()) if adapted else model, tmp_path)
    # By plain transformers, of a file for each layer, with nothing missing and nothing left over.
    dense, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not has_packed_base(dense) and len(list(folder.glob("*.safetensors"))) > 2
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        torch.testing.assert_close(dense(ids).logits, expected, rtol=1e-5, atol=1e-5)
        whole = tiny.load_whole(checkpoint)(ids).logits
    assert (whole - expected).abs().max() > 1e-3  # the rounding is there to be seen
    assert AutoTokenizer.from_pretrained(folder)("1+2=")["input_ids"] == tiny.make_tokenizer()("1+2=")["input_ids"]


@pytest.mark.processes
def test_made_once_per_content_and_as_the_script_makes_it(tmp_path, monkeypatch):
    checkpoint = tiny.make_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    first = write(tiny.load(checkpoint), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [first]  # no scratch left
    with monkeypatch.context() as patch:
        patch.setattr(module, "save_file", lambda *_, **__: pytest.fail("written again"))
        assert write(get_peft_model(tiny.load(checkpoint), tiny.lora()), tmp_path / "cache") == first
    other = tiny.load(checkpoint, double=False)
    assert write(other, tmp_path / "cache") != first
    command = ["--model_name_or_path", checkpoint, "--dtype", "float32"]
    command += ["--use_bnb_nested_quant", "true", "--dense_dtype", "float32", "--output", str(tmp_path / "dense")]
    run = run_script("recipes/dequantize.py", *command, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == str(tmp_path / "dense")
    assert (tmp_path / "dense" / module.DONE).read_text() == (first / module.DONE).read_text()
    with pytest.raises(RolloutError, match="dense"):
        write(other, tmp_path / "cache", output=tmp_path / "dense")


def test_a_copy_that_another_run_finished_first_is_used(tmp_path, monkeypatch):
    """Two runs that start at the same time write the same copy."""
    model = tiny.load(tiny.make_checkpoint(tmp_path / "model"))
    of_other_run = write(model, tmp_path / "other")
    cache = tmp_path / "cache"

    def save_after_the_other_run(*args, **kwargs):
        if not (cache / of_other_run.name).exists():
            shutil.copytree(of_other_run, cache / of_other_run.name)
        save_file(*args, **kwargs)

    monkeypatch.setattr(module, "save_file", save_after_the_other_run)
    assert write(model, cache) == cache / of_other_run.name
    assert list(cache.iterdir()) == [cache / of_other_run.name]  # no scratch left
