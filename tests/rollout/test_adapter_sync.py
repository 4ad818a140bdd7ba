"""Adapter versions on their way: whole folders under new names, the adapter's bytes alone, room that runs out."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import GenerationConfig

from tests import tiny
from trl_fsdp_qlora.rollout.adapter_sync import AdapterVersions, RolloutError, adapter_weights
from trl_fsdp_qlora.rollout.completions import sampling


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    return get_peft_model(tiny.tiny_model(), tiny.lora())


def test_a_version_loads_as_the_policy_and_old_ones_go(policy, tmp_path):
    versions = AdapterVersions("run", tmp_path / "shared")
    folders = [versions.publish(v, adapter_weights(policy), policy.peft_config["default"]) for v in (1, 2, 3)]
    assert folders[0].is_absolute() and (tmp_path / "shared").resolve() in folders[0].parents  # which a server sees
    loaded = PeftModel.from_pretrained(tiny.tiny_model(), folders[0])
    ids = torch.arange(5, 15)[None]
    torch.testing.assert_close(loaded(ids).logits, policy(ids).logits, rtol=0, atol=0)
    adapter = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    on_disk = load_file(folders[0] / "adapter_model.safetensors")
    assert versions.bytes == adapter == sum(tensor.numel() * tensor.element_size() for tensor in on_disk.values())
    assert len({folder.name for folder in folders}) == 3
    versions.forget_before(3)
    assert [path.name for path in versions.root.iterdir()] == ["run-v3"]


def test_no_room_is_an_error_with_the_folder(policy, tmp_path):
    (tmp_path / "file").touch()
    versions = AdapterVersions("run", tmp_path / "file" / "run")
    with pytest.raises(RolloutError, match=r"0\.0 MiB.*could not be written.*vllm_adapter_dir"):
        versions.publish(1, adapter_weights(policy), policy.peft_config["default"])


def test_sampling_parameters():
    common = {"max_new_tokens": 7, "eos_token_id": [2, 5], "pad_token_id": 0}
    greedy = sampling(GenerationConfig(do_sample=False, **common), None)
    assert greedy == {"max_tokens": 7, "repetition_penalty": 1.0, "stop_token_ids": [2, 5], "temperature": 0.0}
    drawn = sampling(GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, top_k=0, **common), 11)
    assert (drawn["temperature"], drawn["top_p"], drawn["top_k"], drawn["seed"]) == (0.7, 0.9, 0, 11)
