import json

import pytest
from peft import get_peft_model
from trl import ModelConfig

from tests.tiny import LOSS_TYPES, save_tiny_model, tiny_model
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.recipe import checks


def targeted(model_config):
    return sorted(get_peft_model(tiny_model(), checks.lora_config(model_config)).targeted_module_names)


def test_one_lora_target_is_a_name_and_an_expression_stays_one():
    q_proj = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    assert targeted(ModelConfig(use_peft=True, lora_target_modules=["q_proj"])) == q_proj
    assert targeted(ModelConfig(use_peft=True, lora_target_modules=["self_attn.q_proj"])) == q_proj
    assert targeted(ModelConfig(use_peft=True, lora_target_modules=[r".*\.1\..*q_proj"])) == q_proj[1:]
    assert len(targeted(ModelConfig(use_peft=True, lora_target_modules=["all-linear"]))) == 14
    assert checks.lora_config(ModelConfig(use_peft=False)) is None


def test_the_losses_are_those_that_are_compared_with_trl():
    assert checks.LOSS_TYPES == LOSS_TYPES


def test_a_base_that_is_quantized_in_another_way_is_not_packed_again(tmp_path):
    base = save_tiny_model(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is quantized by mxfp4, which load_in_4bit cannot pack again"):
        checks.skeleton(ModelConfig(model_name_or_path=base, load_in_4bit=True))
