from peft import get_peft_model
from trl import ModelConfig

from tests.tiny import tiny_model
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
