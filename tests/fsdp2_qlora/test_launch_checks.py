"""Known wrong combinations are errors before a model is loaded, with the line to change."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.fsdp2_qlora import generation, launch_checks, prepare
from trl_fsdp_qlora.fsdp2_qlora.launch_checks import LaunchError, check_launch, check_reference

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True)


@pytest.fixture
def fsdp(monkeypatch):
    def launch(**overrides):
        for name, value in fsdp_environment(**overrides).items():
            monkeypatch.setenv(name, value)

    return launch


def test_combinations_that_work_and_that_do_not(fsdp):
    check_launch(FOUR_BIT, zero_stage=2)
    check_launch(None, zero_stage=3)
    with pytest.raises(LaunchError, match="--accelerate_config fsdp2_qlora"):
        check_launch(FOUR_BIT, zero_stage=3)
    fsdp()
    for quantized in (FOUR_BIT, None):
        check_launch(quantized)
    with pytest.raises(LaunchError, match="`load_in_4bit: true` instead of `load_in_8bit: true`"):
        check_launch(BitsAndBytesConfig(load_in_8bit=True))


def test_a_reference_model_of_zeros_is_refused(fsdp, monkeypatch):
    monkeypatch.setattr(launch_checks, "version", lambda name: "5.22.0")
    check_reference(True)  # not under FSDP
    fsdp()
    check_reference(True)  # one process
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_reference(False)
    with pytest.raises(LaunchError, match="fsdp_cpu_ram_efficient_loading: false"):
        check_reference(True)
    fsdp(fsdp_cpu_ram_efficient_loading="false")
    check_reference(True)
    fsdp()
    monkeypatch.setattr(launch_checks, "version", lambda name: "5.23.0")
    check_reference(True)


def test_the_trainer_checks_before_it_loads(fsdp, tmp_path):
    fsdp(fsdp_version="1")
    with pytest.raises(LaunchError, match="fsdp_version: 2"):
        EfficientGRPOTrainer(
            model=str(tmp_path / "there-is-no-model-here"),
            reward_funcs=len,
            args=EfficientGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
            train_dataset=tiny.prompt_data(),
            quantization_config=FOUR_BIT,
            peft_config=LoraConfig(target_modules="all-linear"),
        )


def test_another_release_of_torch_gathers_by_layer_and_shards_no_4_bit_base(monkeypatch):
    monkeypatch.setattr(generation, "misfit", lambda: "torch 9.9 has no FSDPState._lazy_init")
    monkeypatch.setattr(prepare, "misfit", generation.misfit)
    for mode in ("auto", "once"):
        assert generation.choose(nn.Linear(2, 2), torch.device("cpu"), mode) == "per_layer"
    accelerator = SimpleNamespace(is_fsdp2=True, prepare=lambda model: pytest.fail("it was sharded all the same"))
    prepare.shard_quantized_base(accelerator)
    quantized_layer = type("Linear4bit", (nn.Linear,), {})  # known by the name of its class
    with pytest.raises(LaunchError, match=r"torch 9\.9 has no FSDPState\._lazy_init.*ddp\.yaml"):
        accelerator.prepare(nn.Sequential(quantized_layer(2, 2)))
