"""Adapter versions on their way: whole folders under new names, the adapter's bytes alone, room that runs out."""

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from tests import tiny
from trl_fsdp_qlora.rollout.adapter_sync import AdapterVersions, RolloutError, adapter_weights
from trl_fsdp_qlora.rollout.engine_model import sampling


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return get_peft_model(tiny.tiny_model(), tiny.lora())


@pytest.fixture
def versions(tmp_path):
    made = AdapterVersions("run", tmp_path / "output", in_memory=True)
    yield made
    made.close()


def test_a_version_loads_as_the_policy_and_has_the_adapters_bytes(policy, versions):
    folder = versions.publish(1, adapter_weights(policy), policy.peft_config["default"])
    loaded = PeftModel.from_pretrained(tiny.tiny_model(), folder)
    ids = torch.arange(5, 15)[None]
    torch.testing.assert_close(loaded(ids).logits, policy(ids).logits, rtol=0, atol=0)
    adapter = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    assert versions.bytes == adapter
    on_disk = load_file(folder / "adapter_model.safetensors")
    assert sum(tensor.numel() * tensor.element_size() for tensor in on_disk.values()) == adapter


def test_names_are_never_used_twice_and_old_folders_go(policy, versions):
    weights, config = adapter_weights(policy), policy.peft_config["default"]
    folders = [versions.publish(version, weights, config) for version in (1, 2, 3)]
    assert len({folder.name for folder in folders}) == 3
    versions.forget_before(3)
    assert [path.name for path in versions.root.iterdir()] == ["run-v3"]
    root = versions.root
    versions.close()
    assert not root.exists()


def test_no_room_is_said_with_the_folder(policy, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RolloutError, match=r"0\.0 MiB.*could not be written.*vllm_adapter_dir"):
        AdapterVersions("run", tmp_path / "file" / "run").publish(
            1, adapter_weights(policy), policy.peft_config["default"]
        )


def test_what_a_server_reads_lies_in_the_folder_that_was_chosen(policy, tmp_path):
    versions = AdapterVersions("run", tmp_path / "shared")
    folder = versions.publish(1, adapter_weights(policy), policy.peft_config["default"])
    assert folder.is_absolute() and (tmp_path / "shared").resolve() in folder.parents


def test_sampling_parameters():
    from transformers import GenerationConfig

    common = {"max_new_tokens": 7, "eos_token_id": [2, 5], "pad_token_id": 0}
    greedy = sampling(GenerationConfig(do_sample=False, **common), None)
    assert greedy == {"max_tokens": 7, "repetition_penalty": 1.0, "stop_token_ids": [2, 5], "temperature": 0.0}
    drawn = sampling(GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, top_k=0, **common), 11)
    assert (drawn["temperature"], drawn["top_p"], drawn["top_k"], drawn["seed"]) == (0.7, 0.9, 0, 11)
