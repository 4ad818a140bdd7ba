"""Classes that take images, as TRL builds them: which class, what LoRA adapts, and merging."""

import copy

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from tests.prefix_sharing.helpers import MULTIMODAL, awkward_batch, build, tokenizer
from tests.trainers.helpers import make_trainer
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.compat.transformers import model_class
from trl_fsdp_qlora.tools.publishing.adapted_base import check_loads, load_model
from trl_fsdp_qlora.tools.publishing.merge import merge_adapter
from trl_fsdp_qlora.trainers.starting.input_checks import language_model_only

EVERYTHING = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)


def saved(name, tmp_path) -> str:
    build(MULTIMODAL[name]).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def adapted(model):
    return {name.split(".lora_")[0] for name, p in model.named_parameters() if "lora_" in name}


def test_a_text_class_of_a_family_with_images_stays_one(tmp_path):
    model = tf.Qwen3_5ForCausalLM(build(MULTIMODAL["qwen3_5"]).config.get_text_config())
    model.save_pretrained(tmp_path)
    assert model_class(tf.AutoConfig.from_pretrained(tmp_path)) is tf.AutoModelForCausalLM
    assert language_model_only(EVERYTHING, model) is EVERYTHING  # nothing to leave out


@pytest.mark.parametrize("by_name", [True, False])
def test_all_linear_is_the_language_model(by_name, tmp_path):
    folder = saved("qwen3_vl", tmp_path)
    model = folder if by_name else load_model(folder)
    trainer = make_trainer(EfficientGRPOTrainer, model, tmp_path, copy.deepcopy(EVERYTHING))
    names = adapted(trainer.model)
    assert names and all(".language_model." in name for name in names)
    whole = LoraConfig(r=2, target_modules="all-linear", exclude_modules=[])
    assert any(".visual." in name for name in adapted(get_peft_model(load_model(folder), whole)))
    assert language_model_only(whole, folder) is whole


@pytest.mark.processes
def test_an_adapter_is_merged_and_checked_on_its_class(tmp_path):
    """One family may have a class for text alone, whose weights are called otherwise."""
    folder = saved("mistral3", tmp_path)
    torch.manual_seed(1)
    base = load_model(folder)
    assert type(base) is type(build(MULTIMODAL["mistral3"]))
    model = get_peft_model(base, language_model_only(copy.deepcopy(EVERYTHING), base)).eval()
    model.peft_config["default"].base_model_name_or_path = folder
    model.save_pretrained(tmp_path / "adapter")
    check_loads(tmp_path / "adapter", folder)
    ids, _ = awkward_batch()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        merged = load_model(str(merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype=torch.float32)))
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-3, rtol=1e-3)


def test_a_config_without_architectures_is_a_text_model():
    """A config that is made in code has no `architectures`."""
    assert model_class(tf.Qwen2Config()) is tf.AutoModelForCausalLM
