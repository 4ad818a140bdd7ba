"""Adapters of a whole model in one process; test_trainer.py has those of sharded models."""

import pytest
import torch
from peft import PeftModel, get_peft_model

pytest.importorskip("bitsandbytes")

from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora.fsdp2_qlora.adapters import gather_adapter, load_adapter


@pytest.fixture
def adapted(tmp_path):
    """A quantized model with a trained adapter, and the frozen copy that TRL makes for the KL term."""
    model = tiny.load(tiny.make_checkpoint(tmp_path / "base"))
    config = tiny.lora(init_lora_weights=False)
    adapted = get_peft_model(model, config)
    adapted.add_adapter("ref", config)
    return adapted


def test_gathered_weights_are_those_of_all_adapters_alone(adapted):
    gathered = gather_adapter(adapted)
    wanted = {name: value for name, value in adapted.state_dict().items() if ".lora_" in name}
    assert any(".ref." in name for name in wanted)
    assert gathered.keys() == wanted.keys()
    assert all(torch.equal(gathered[name], wanted[name]) for name in wanted)


def test_a_saved_adapter_is_loaded_as_peft_loads_it(adapted, tmp_path):
    adapted.save_pretrained(tmp_path, state_dict=gather_adapter(adapted))
    wanted = {name: value.clone() for name, value in gather_adapter(adapted).items()}
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.zero_()
    load_adapter(adapted, tmp_path)
    loaded = gather_adapter(adapted)
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    by_peft = PeftModel.from_pretrained(tiny.load(str(tmp_path / "base")), tmp_path)
    of_peft = {name: value for name, value in by_peft.state_dict().items() if ".lora_" in name}
    assert of_peft and all(torch.equal(value, wanted[name]) for name, value in of_peft.items())


def test_an_adapter_of_other_modules_changes_nothing(adapted, tmp_path):
    before = {name: value.clone() for name, value in gather_adapter(adapted).items()}
    other = get_peft_model(tiny.load(str(tmp_path / "base")), tiny.lora(target_modules=["o_proj"]))
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="does not hold this model's adapter 'default'"):
        load_adapter(adapted, tmp_path / "other")
    after = gather_adapter(adapted)
    assert all(torch.equal(after[name], before[name]) for name in before)
