"""The command: exit statuses, what bad input says, and a 70B from its config alone."""

from dataclasses import replace

import pytest
import torch

from tests.planning.models import folder, settings
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.cli.plan import plan as command
from trl_fsdp_qlora.planning import model
from trl_fsdp_qlora.planning.hardware import CONTEXT, GIB, read_hardware
from trl_fsdp_qlora.planning.plan import format_plan, plan_recipe
from trl_fsdp_qlora.planning.settings import from_config, from_yaml, read_launch
from trl_fsdp_qlora.recipe.arguments import ConfigError

RECIPE_70B = "recipes/Llama-3.1-70B-Instruct/grpo_qlora/config_gsm8k.yaml"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("tiny"))


def words(path, *more: str) -> list[str]:
    return ["--model_name_or_path", path, "--use_peft", "true", "--bf16", "false", *more]


@pytest.mark.slow  # some five plans
def test_the_exit_status_says_whether_it_fits_and_a_line_makes_it_fit(tiny, tmp_path, capsys):
    path = tmp_path / "large.yaml"
    path.write_text(
        f"model_name_or_path: {tiny}\nuse_peft: true\nlora_target_modules: all-linear\nbf16: false\nprefix_sharing: off\n"
        "num_generations: 4\nper_device_train_batch_size: 16\nmax_completion_length: 64\n"
    )
    needed = plan_recipe(str(path), hardware="24GB").peak
    assert command(["--config", str(path), "--hardware", "24GB"]) == 0
    fits = capsys.readouterr().out
    assert "it fits" in fits and "together" in fits and "forward_backward" in fits
    assert command(["--config", str(path), "--hardware", f"{(CONTEXT + 0.8 * (needed - CONTEXT)) / GIB:.4f}GB"]) == 1
    printed = capsys.readouterr().out
    assert "it does not fit" in printed and "together" in printed
    assert "makes it fit: per_device_train_batch_size: 8, gradient_accumulation_steps: 2" in printed


@pytest.mark.parametrize(
    "more, printed",
    [
        (["--hardware", "h10"], "did you mean 'h100'?"),
        (["--prompt_tokens", "0"], "must be at least 1"),
        (["--num_generations", "many"], "num_generations='many' is not a whole number"),
        (["--dtype", "float12"], "dtype='float12' is not known"),
        (["--lora_target_modules", "nothing"], "lora_target_modules"),
        (["--model_name_or_path", "nobody/gated-model"], "config.json"),
    ],
)
def test_bad_input_is_one_line(tiny, capsys, monkeypatch, more, printed):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert command(words(tiny, *more)) == 2
    captured = capsys.readouterr()
    assert printed in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.slow  # a model of 80 layers
def test_a_70b_from_its_config(tmp_path):
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    folder(tmp_path, **shape, num_hidden_layers=80, vocab_size=128256)
    plan = plan_recipe(RECIPE_70B, "fsdp2_qlora", "24GB x2", {"model_name_or_path": str(tmp_path)})
    # What the head of the recipe computes by hand, of the whole model: 31.88 GiB in 4 bits, 1.01 GiB of their state.
    base = plan.phases["forward_backward"]
    assert base["base, 4-bit weights"] == pytest.approx(31.88 * GIB / 2, rel=0.002)
    assert base["base, quantization state"] == pytest.approx(1.01 * GIB / 2, rel=0.02)
    assert plan.parameters[0] == pytest.approx(70.55e9, rel=0.001)
    assert plan.parameters[1] == pytest.approx(104e6, rel=0.01)
    assert not plan.fits and "it does not fit" in format_plan(plan)
    assert replace(plan, capacity=141 * GIB).fits
    # Four cards hold half of what two hold; a rank's own micro-batch stays.
    launch = replace(plan.settings.launch, processes=4)
    held = model.static_bytes(model.build(plan.settings, plan.config), replace(plan.settings, launch=launch))
    assert held[model.BASE_4BIT] * 2 == base["base, 4-bit weights"]


def test_the_command_reads_a_recipe_as_its_script_does(tiny, tmp_path):
    """The same run from the YAML, and from the config that the script builds of it."""
    given = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 40, "beta": 0.1}
    args = EfficientGRPOConfig(
        str(tmp_path), bf16=False, use_cpu=True, report_to="none", prefix_sharing="off", **given
    )
    path = tmp_path / "recipe.yaml"  # in which `off` is a truth value
    path.write_text("prefix_sharing: off\nbf16: false\nuse_cpu: true\n")
    from_file, started = from_yaml(str(path), given, read_launch(None)), from_config(args, settings(tiny).model)
    names = "rollout_rows rollout_batches groups mixed scores_again gradient_checkpointing optim prefix_sharing"
    for name in names.split():
        assert getattr(from_file, name) == getattr(started, name), name


def test_hardware_by_name_and_by_memory():
    assert read_hardware("H100 x4").cards == 4 and read_hardware("h100", 2).cards == 2
    assert read_hardware("24GB x2").memory == 24 * GIB
    assert read_hardware("RTX 4090").name == read_hardware("4090").name == "rtx4090"
    assert read_hardware("A100-80GB").memory == read_hardware("a100").memory == 80 * GIB
    assert not read_hardware("cpu").gpu and read_hardware(None).gpu == torch.cuda.is_available()
    with pytest.raises(ConfigError, match=r"there are .*h100"):
        read_hardware("abacus")


def test_as_many_ranks_as_cards_unless_told_otherwise(tiny, capsys):
    assert command(words(tiny, "--accelerate_config", "fsdp2", "--hardware", "24GB x4")) == 0
    assert "fsdp2 on 4 × 24 GB" in capsys.readouterr().out  # the config says 8
    assert command(words(tiny, "--hardware", "24GB x4", "--num_processes", "8")) == 1
    printed = capsys.readouterr().out
    assert "it does not fit: there are 4 cards for 8 ranks" in printed and "it fits" not in printed


def test_more_tokens_than_the_model_has_positions_are_named(tiny, capsys):
    assert command(words(tiny, "--hardware", "24GB", "--prompt_tokens", "112", "--max_completion_length", "400")) == 0
    assert "warning" not in capsys.readouterr().out
    command(words(tiny, "--hardware", "24GB", "--prompt_tokens", "113", "--max_completion_length", "400"))
    assert "the 512 positions of the model; at most 399" in capsys.readouterr().out
