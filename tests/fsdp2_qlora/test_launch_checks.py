"""Known wrong combinations are errors before a model is loaded, with the line to change."""

import pytest
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.fsdp2_qlora import tiny
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.fsdp2_qlora import launch_checks
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
