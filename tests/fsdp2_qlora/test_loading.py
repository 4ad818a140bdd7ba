"""The empty model of a rank that does not read the checkpoint, in one process."""

import pytest
from transformers import GenerationConfig

pytest.importorskip("bitsandbytes")
from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora.fsdp2_qlora import loading


def test_generation_settings_are_read_with_the_callers_token(tmp_path, monkeypatch):
    checkpoint = tiny.make_checkpoint(tmp_path)
    GenerationConfig(do_sample=True, top_k=7).save_pretrained(tmp_path)
    read = GenerationConfig.from_pretrained

    def refuse_without_token(name, *args, token=None, **kwargs):
        if token is None:
            raise OSError("gated: no token")
        return read(name, *args, **kwargs)

    monkeypatch.setattr(GenerationConfig, "from_pretrained", refuse_without_token)
    monkeypatch.setattr(loading, "reads_checkpoint", lambda rank: False)
    model = loading.load_quantized_base(checkpoint, tiny.quantization(), token="secret")
    assert model.generation_config.top_k == 7 and all(parameter.is_meta for parameter in model.parameters())
