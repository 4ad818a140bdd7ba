"""What a plan puts together, and the command.

Covers `tools/cli/plan.py`, `tools/planning/fitting.py`, `tools/planning/hardware.py`.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tools.planning.models import folder, settings, words
from trl_fsdp_qlora import EfficientDPOConfig, EfficientGRPOConfig
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.tools.cli.plan import plan as command
from trl_fsdp_qlora.tools.cli.scripts import refuse_typos
from trl_fsdp_qlora.tools.planning import fitting, largest
from trl_fsdp_qlora.tools.planning import plan as module
from trl_fsdp_qlora.tools.planning.fake_run import FakeRun, Lengths
from trl_fsdp_qlora.tools.planning.hardware import CONTEXT, GIB, Hardware, read_hardware
from trl_fsdp_qlora.tools.planning.launches import Launch
from trl_fsdp_qlora.tools.planning.plan import changed, make_plan, plan_recipe
from trl_fsdp_qlora.tools.planning.rollout import choices
from trl_fsdp_qlora.tools.planning.table import format_plan
from trl_fsdp_qlora.tools.recipe.pairs import DPOScriptArguments

CPU = Hardware("a host", 2**40, 1, gpu=False)
CARD = Hardware("a card", 2**40, 1)
RECIPE_70B = "recipes/Llama-3.1-70B-Instruct/grpo_qlora/config_gsm8k.yaml"


def test_a_prefill_has_its_prompts_keys_and_values_beside_it(tmp_path):
    """Long prompts, short completions: generation needs most before its first token."""
    run = settings(folder(tmp_path), prompt_tokens=256, max_completion_length=1, compact_generation=False)
    plan = make_plan(run, hardware=CPU)
    prompts = 8 * 256 * 5 * 2 * 2 * 32 * 4  # rows, tokens, layers, keys and values, heads, their size, bytes
    coming = sum(
        plan.phases["generate"].get(part, 0) for part in (module.ACTIVATIONS, module.CACHE, module.TOKEN_STEP)
    )
    of_a_layer = 8 * 256 * 384 * 4  # an intermediate of the MLP
    assert prompts + of_a_layer < coming == FakeRun(run, plan.config, False).generation_bytes().prefill


def test_a_base_that_vllm_shares_counts_once(tmp_path):
    """The engine's own copy is what a model in the dtype of its products takes; its share has to hold it and a row."""
    changes = {"load_in_4bit": True, "use_vllm": True, "vllm_mode": "colocate", "bf16": True, "dtype": "bfloat16"}
    base = folder(tmp_path, num_hidden_layers=1)
    run = settings(base, launch=Launch(), vllm_gpu_memory_utilization=0.5, **changes)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).num_parameters()
    plan = make_plan(run, hardware=CARD)
    one = changed(plan, vllm_share_base="on")
    assert (plan.engine.base, one.engine.base) == (2 * weights, 0)
    for phase in plan.phases:
        parts = plan.phases[phase]
        assert (
            parts[module.ENGINE] + parts[module.ENGINES_BASE] == one.phases[phase][module.ENGINE] == CARD.memory // 2
        )
    asleep = changed(plan, vllm_enable_sleep_mode=True)
    assert asleep.phases["optimizer"][module.ENGINES_BASE] == 2 * weights
    assert module.ENGINE not in asleep.phases["optimizer"]
    # With a share of less than its base an engine cannot start, and the line to change is sharing.
    tight = make_plan(run, hardware=replace(CARD, memory=int(2 * 1.9 * weights)), config=plan.config)
    assert not tight.engine.starts and not tight.fits and "it cannot start" in format_plan(tight)
    assert changed(tight, vllm_share_base="on").engine.starts
    dense = settings(base, launch=Launch(), **changes | {"load_in_4bit": False})
    shared = {
        (sync, choice): make_plan(
            replace(dense, values=dense.values | {"rollout_sync": sync, "vllm_share_base": choice}), CARD, plan.config
        ).engine.base
        == 0
        for sync in ("auto", "adapter")
        for choice in ("on", "off")
    }
    assert {key for key, is_shared in shared.items() if is_shared} == {("auto", "on"), ("adapter", "on")}


def test_experts_are_the_engines_own_and_the_rest_is_shared(tmp_path):
    experts_fields = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
    mixture = folder(tmp_path, model_type="qwen3_moe", num_hidden_layers=1, **experts_fields)
    changes = {"use_vllm": True, "vllm_mode": "colocate", "vllm_share_base": "on", "bf16": True, "dtype": "bfloat16"}
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    experts = sum(parameter.numel() for name, parameter in base.named_parameters() if ".experts." in name)
    for in_4_bits in (False, True):
        plan = make_plan(settings(mixture, launch=Launch(), load_in_4bit=in_4_bits, **changes), hardware=CARD)
        assert plan.engine.base == 2 * experts


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"rollout_sync": "adapter"}, (True, False)),
        ({"vllm_share_base": "on"}, (True, True)),
        ({"vllm_share_base": "on", "vllm_engine_kwargs": '{"load_format": "dummy"}'}, (False, False)),
        ({"vllm_share_base": "on", "dtype": "float32"}, (False, False)),
        ({"load_in_8bit": True}, (True, False)),
        ({"use_dora": True}, (False, False)),
        ({"rollout_sync": "adapter", "use_dora": True}, (False, False)),
        ({"vllm_share_base": "on", "vllm_tensor_parallel_size": 2}, (False, False)),
    ],
    ids=str,
)
def test_the_engines_base_is_planned_by_the_rules_of_the_run(tmp_path, fields, expected):
    """Whether it gets the adapter alone and shares the base; a run whose choice cannot be ends before it loads."""
    changes = {"use_vllm": True, "vllm_mode": "colocate", "bf16": True, "dtype": "bfloat16", **fields}
    run = settings(folder(tmp_path), launch=Launch(), **changes)
    assert choices(run, AutoConfig.from_pretrained(tmp_path)) == expected


def test_the_first_step_counts_the_padded_rows_it_compares(tmp_path):
    """On a CPU TRL projects every position of a padded row: with a long prompt that is more than the packed row's."""
    fields = {"per_device_train_batch_size": 4, "num_generations": 4}  # one group
    run = settings(folder(tmp_path), prompt_tokens=256, max_completion_length=4, **fields)
    plan = make_plan(run, hardware=CPU)
    rows = run.per_device_train_batch_size
    fake = FakeRun(run, plan.config, False)
    first_step = fake.step_bytes(rows, 1)
    compared = fake.stock_row_bytes(Lengths(256, 4))
    assert plan.phases["forward_backward"][module.ACTIVATIONS] == compared > first_step


@pytest.mark.slow  # a model of 80 layers
@pytest.mark.exhaustive
def test_a_70b_from_its_config(tmp_path):
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    folder(tmp_path, **shape, num_hidden_layers=80, vocab_size=128256)
    line = ["--config", RECIPE_70B, "--model_name_or_path", str(tmp_path)]
    plan = plan_recipe(line, EfficientGRPOConfig, "fsdp2_qlora", "24GB x2")
    # What the head of the recipe computes by hand, of the whole model: 31.88 GiB in 4 bits, 1.01 GiB of their state.
    base = plan.phases["forward_backward"]
    assert base["base, 4-bit weights"] == pytest.approx(31.88 * GIB / 2, rel=0.002)
    assert base["base, quantization state"] == pytest.approx(1.01 * GIB / 2, rel=0.02)
    assert plan.parameters == (pytest.approx(70.55e9, rel=0.001), pytest.approx(104e6, rel=0.01))
    assert not plan.fits and "it does not fit" in format_plan(plan) and replace(plan, capacity=141 * GIB).fits


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.mark.slow  # some ten plans
def test_the_exit_status_says_whether_it_fits(tiny, monkeypatch, capsys):
    line = words(tiny, per_device_train_batch_size=16, max_completion_length=64)
    needed = plan_recipe(line, EfficientGRPOConfig, hardware="24GB").peak
    monkeypatch.setattr(largest, "most_that_fits", lambda plan_of, most, start=1: 1)
    assert command([*line, "--hardware", "24GB", "--json", "--solve"]) == 0
    printed = capsys.readouterr().out  # DeepSpeed, which other tests imported, may have a line before
    as_json = json.loads(printed[printed.index("{\n") :])
    assert as_json["fits"] and as_json["peak"] == needed and as_json["largest"]["num_generations"] == 4
    assert sum(as_json["phases"][as_json["limiting"]].values()) == needed
    assert command([*line, "--hardware", "24GB", "--solve"]) == 0
    fits = capsys.readouterr().out
    assert all(part in fits for part in ("num_generations: 4\n", "max_completion_length: 16\n", "SmolLM2-135M"))
    assert "forward_backward" in fits
    assert command([*line, "--hardware", f"{(CONTEXT + 0.8 * (needed - CONTEXT)) / GIB:.4f}GB"]) == 1
    assert command([*line, "--accelerate_config", "fsdp2", "--hardware", "24GB x4"]) == 0
    assert re.search(r"fsdp2 .*\b4 × 24 GB", capsys.readouterr().out)  # the config has 8
    assert command([*line, "--hardware", "24GB x4", "--num_processes", "8"]) == 1
    capsys.readouterr()
    command([*words(tiny, max_completion_length=400), "--hardware", "24GB", "--prompt_tokens", "113"])
    assert re.search(r"\b399\b", capsys.readouterr().out)


def test_rows_beyond_the_models_positions_are_a_warning(tiny):
    plan = plan_recipe(words(tiny, max_completion_length=400), EfficientGRPOConfig, hardware="24GB")

    def warning(prompt: int) -> str | None:
        return replace(plan, settings=replace(plan.settings, prompt_tokens=prompt)).warning

    assert warning(112) is None
    assert "at most 399" in warning(113)
    assert "512 positions" in warning(512)


def test_a_rank_plans_without_the_others(tmp_path, monkeypatch):
    """The main rank of a launch is alone in a plan, so nothing of it may be collective."""

    def collective(*_, **__):
        raise AssertionError("other ranks are not here")

    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list"):
        monkeypatch.setattr(torch.distributed, name, collective)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "tokens_per_pass": 90}
    run = settings(folder(tmp_path, num_hidden_layers=1), Launch("ddp", 2), **fields)
    two_cards = replace(CARD, cards=2)
    assert make_plan(run, hardware=two_cards).fits
    assert make_plan(settings(tmp_path, Launch("fsdp2", 2), **fields), hardware=two_cards).fits


@pytest.mark.exhaustive  # `make test` has the promise of such lines, in tests/promises/test_plan.py
def test_the_lines_with_which_a_run_fits_were_planned_themselves(tmp_path):
    fields = {"per_device_train_batch_size": 8, "num_generations": 8, "gradient_accumulation_steps": 8}
    base = folder(tmp_path, num_hidden_layers=1, vocab_size=65536)
    run = settings(base, Launch(), max_completion_length=32, **fields)
    plan = make_plan(run, hardware=CARD)
    assert plan.limiting == "generate" and fitting.lines_that_fit(plan) == {}
    two_batches = changed(plan, steps_per_generation=2)
    tight = make_plan(run, hardware=replace(CARD, memory=two_batches.peak))
    lines = fitting.lines_that_fit(tight)
    assert not tight.fits and changed(tight, **lines).fits
    assert lines == {"steps_per_generation": 2} and fitting.as_words(lines) == "--steps_per_generation 2"
    assert fitting.lines_that_fit(make_plan(run, hardware=replace(CARD, memory=2**20))) == {}
    short = make_plan(settings(folder(tmp_path / "narrow", num_hidden_layers=2), Launch(), **fields), hardware=CARD)
    assert short.limiting == "forward_backward"
    tight = make_plan(short.settings, hardware=replace(CARD, memory=short.peak - 2**20))
    lines = fitting.lines_that_fit(tight)
    assert "gradient_checkpointing" in lines and changed(tight, **lines).fits


def test_a_plan_of_dpo_computes_the_prompt_of_a_pair_once(tmp_path):
    line = [*words(folder(tmp_path, num_hidden_layers=1)), "--max_length", "96"]
    dropped = ("--num_generations", "--max_completion_length")
    line = [word for i, word in enumerate(line) if word not in dropped and (i == 0 or line[i - 1] not in dropped)]
    plan = plan_recipe(line, EfficientDPOConfig, None, "24GB", prompt_tokens=56, script=DPOScriptArguments)
    assert list(plan.phases) == ["forward_backward", "optimizer"]
    assert (plan.settings.rows, plan.settings.completion_tokens) == (16, 40)
    fields = {"per_device_train_batch_size": 16, "num_generations": 2, "max_completion_length": 40}
    fields["disable_dropout"] = True  # DPO's default
    of_groups = make_plan(settings(tmp_path, Launch(), prompt_tokens=56, **fields), plan.hardware)
    of_pairs, of_the_same = (x.phases["forward_backward"][module.ACTIVATIONS] for x in (plan, of_groups))
    # The losses keep vectors of tokens that differ.
    assert of_pairs == pytest.approx(of_the_same, rel=0.005)
    padded = changed(plan, prefix_sharing="off")
    assert padded.phases["forward_backward"][module.ACTIVATIONS] > plan.phases["forward_backward"][module.ACTIVATIONS]
    assert "score" in changed(plan, precompute_ref_log_probs=True).phases


def test_a_recipe_with_a_teacher_is_refused_in_one_line():
    with pytest.raises(UserError, match="is a recipe of distillation; this command takes those of grpo"):
        refuse_typos("plan", ["--config", "small-base/distillation/quickstart"])


def test_hardware_by_name_and_by_memory():
    assert read_hardware("H100 x4").cards == 4 and read_hardware("24GB x2").memory == 24 * GIB
    assert read_hardware("RTX 4090").memory == 24 * GIB and read_hardware("A100-40GB").memory == 40 * GIB
    with pytest.raises(UserError, match="b200, h200, h100"):
        read_hardware("h10")
    assert not read_hardware("cpu").gpu and read_hardware(None).gpu == torch.cuda.is_available()
