"""A model object with a mixture of experts that a user loads in 4 bit with plain transformers."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Llama4TextConfig,
    MambaConfig,
    Qwen3MoeConfig,
)

from trl_fsdp_qlora.fsdp2_qlora.coverage import experts_in_16_bit
from trl_fsdp_qlora.fsdp2_qlora.loading import experts_in_4bit

pytest.importorskip("bitsandbytes")

TINY = Qwen3MoeConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_experts=4,
    num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize("settings", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=str)
def test_what_is_left_of_experts_is_counted(tmp_path, settings):
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(TINY)
    dense.save_pretrained(tmp_path)
    assert experts_in_16_bit(dense) is None  # nothing is asked to be in 4 bit
    quantized = BitsAndBytesConfig(**settings)
    line = experts_in_16_bit(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantized))
    experts = sum(p.numel() for name, p in dense.named_parameters() if ".experts." in name)
    assert line.startswith(f"{2 * experts / 2**30:.2f} GiB of experts stay in 16 bit") and "experts_in_4bit()" in line
    with experts_in_4bit():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantized)
    assert (experts_in_16_bit(whole) is None) == ("load_in_4bit" in settings)


def test_experts_of_another_kind_are_named_and_convolutions_are_none(tmp_path):
    llama4 = Llama4TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, intermediate_size_mlp=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=2,
    )  # fmt: skip
    mamba = MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, state_size=8)
    lines = []
    for name, config in (("llama4", llama4), ("mamba", mamba)):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        with experts_in_4bit():
            loaded = AutoModelForCausalLM.from_pretrained(
                tmp_path / name, quantization_config=BitsAndBytesConfig(load_in_4bit=True)
            )
        lines.append(experts_in_16_bit(loaded))
    assert "Llama4TextExperts holds has no 4-bit form here" in lines[0] and lines[1] is None
