"""A recipe's run plans first: the warning, the error, the line after the first step, and what never stops a run."""

import runpy
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer, TrainerState
from trl import ModelConfig

from tests.tiny import config, digit_share, prompts, save_tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.planning import plan_vs_actual
from trl_fsdp_qlora.recipe import runner
from trl_fsdp_qlora.recipe.arguments import ConfigError, ScriptArguments
from trl_fsdp_qlora.recipe.small_base import character_tokenizer

GRPO = Path(__file__).parents[2] / "recipes" / "grpo.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("base"))


def first(base, tmp_path, require_fit=False, **changes):
    script = ScriptArguments(dataset="addition", require_fit=require_fit)
    model = ModelConfig(model_name_or_path=base, use_peft=True, lora_target_modules=["all-linear"])
    args = config(EfficientGRPOConfig, tmp_path, **changes)
    return plan_vs_actual.plan_first(script, args, model, prompts(), character_tokenizer())


def test_a_run_that_does_not_fit_is_warned_of_or_refused(base, tmp_path, monkeypatch, capsys):
    """And a mistake of the plan's is one line."""
    plan, tokenizer = first(base, tmp_path), AutoTokenizer.from_pretrained(base)
    assert plan.fits and capsys.readouterr().out == ""
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts()["prompt"]]
    assert plan.settings.prompt_tokens == max(len(tokenizer(text)["input_ids"]) for text in texts)
    real = plan_vs_actual.make_plan
    monkeypatch.setattr(plan_vs_actual, "make_plan", lambda run: replace(real(run), capacity=2**20))
    assert not first(base, tmp_path).fits
    said = capsys.readouterr().out
    assert said.startswith("warning: by its plan") and said.count("\n") == 1
    with pytest.raises(ConfigError, match=r"require_fit: true, and by its plan .* there are 1\.0 MiB"):
        first(base, tmp_path, require_fit=True)
    monkeypatch.setattr(plan_vs_actual, "make_plan", lambda run: 1 / 0)
    assert first(base, tmp_path, require_fit=True) is None
    assert capsys.readouterr().out == "memory was not planned: ZeroDivisionError: division by zero\n"


def test_a_recipe_says_planned_and_measured_after_its_first_step(base, tmp_path, monkeypatch, capsys):
    """Of a file with words in it that YAML reads as truth values."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("prefix_sharing: off\nphase_metrics: on\nsave_strategy: no\n")
    words = (
        f"--config {recipe} "
        f"--model_name_or_path {base} --dataset addition --held_out 8 --skip_accuracy true --output_dir {tmp_path / 'out'} "
        "--use_peft true --lora_target_modules all-linear --per_device_train_batch_size 8 --num_generations 4 "
        "--max_completion_length 4 --max_steps 2 --bf16 false --use_cpu true --report_to none --logging_steps 1 "
        "--disable_tqdm true --gradient_checkpointing false"
    )
    monkeypatch.setattr(sys, "argv", [str(GRPO), *words.split()])
    record = {}
    monkeypatch.setattr(runner, "reward_functions", lambda script: [digit_share])  # an untrained base earns nothing
    real = runner.run_recipe
    monkeypatch.setattr(runner, "run_recipe", lambda *args: record.update(real(*args)))
    runpy.run_path(str(GRPO), run_name="__main__")
    said = capsys.readouterr().out
    assert said.count("memory of step 1 on rank 0, planned and measured:") == 1
    lines = {line.split()[0]: line.split() for line in said.splitlines() if line.startswith("  ") and "MiB" in line}
    assert {"generate", "forward_backward"} <= lines.keys()
    assert not list((tmp_path / "out").glob("checkpoint-*")) and "prefix sharing: switched off" in said
    assert [entry["memory/planned_mib"] > 0 for entry in record["history"] if "loss" in entry] == [True, True]


def test_the_step_that_is_measured_has_something_to_learn(base, tmp_path, capsys):
    """Two steps on a batch without a reward, two on one with rewards: the third is the first to make gradients."""
    metrics, state = defaultdict(list), TrainerState()
    callback = plan_vs_actual.PlanVsActual(lambda: metrics, first(base, tmp_path))
    for state.global_step, zero in enumerate([1.0, None, 0.5, None], start=1):
        metrics.clear()  # as when a step is logged
        if zero is not None:
            metrics["efficiency/zero_advantage_fraction"].append(zero)
        metrics["memory/forward_backward_peak_mib"].append(100.0 * state.global_step)
        callback.on_step_end(None, state, None)
    said = capsys.readouterr().out
    assert said.count("planned and measured") == 1 and "memory of step 3" in said and " 300 MiB" in said
