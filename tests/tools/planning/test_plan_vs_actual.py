"""A recipe's run plans first: the warning, the error, the line after the first step, and what never stops a run."""

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, TrainerState
from trl import DistillationConfig, ModelConfig
from trl.experimental.sdft import SDFTConfig

from tests.tiny import config, prompts, save_tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.planning import plan_vs_actual
from trl_fsdp_qlora.tools.planning.hardware import Hardware
from trl_fsdp_qlora.tools.recipe.arguments import ConfigError, ScriptArguments
from trl_fsdp_qlora.tools.small_base.text import character_tokenizer


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
    plan = first(base, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert plan.fits and capsys.readouterr().out == ""
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts()["prompt"]]
    assert plan.settings.prompt_tokens == max(len(tokenizer(text)["input_ids"]) for text in texts)
    real = plan_vs_actual.make_plan
    monkeypatch.setattr(plan_vs_actual, "make_plan", lambda run: replace(real(run), capacity=2**20))
    assert not first(base, tmp_path).fits
    printed = capsys.readouterr().out
    assert printed.startswith("warning: by its plan") and printed.count("\n") == 1
    with pytest.raises(ConfigError, match=r"require_fit: true.* 1\.0 MiB"):
        first(base, tmp_path, require_fit=True)
    monkeypatch.setattr(plan_vs_actual, "make_plan", lambda run: 1 / 0)
    assert first(base, tmp_path, require_fit=True) is None
    assert capsys.readouterr().out == "memory was not planned: ZeroDivisionError: division by zero\n"


def test_a_host_without_memory_for_offloaded_activations_is_named_before_the_first_step(
    base, tmp_path, monkeypatch, capsys
):
    real = plan_vs_actual.make_plan
    card = Hardware("a card", 2**40)
    monkeypatch.setattr(plan_vs_actual, "make_plan", lambda run: real(run, card))
    offload = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}
    plan = first(base, tmp_path, **offload)
    assert plan.host_bytes and capsys.readouterr().out == ""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=plan.host_bytes - 1))
    first(base, tmp_path, **offload)
    assert "offloaded activations need" in capsys.readouterr().out


def test_the_step_that_is_measured_has_something_to_learn(base, tmp_path, capsys):
    """Two steps on a batch without a reward, two on one with rewards: the third is the first to make gradients."""
    metrics = defaultdict(list)
    state = TrainerState()
    callback = plan_vs_actual.PlanVsActual(lambda: metrics, first(base, tmp_path))
    for state.global_step, zero in enumerate([1.0, None, 0.5, None], start=1):
        metrics.clear()  # as when a step is logged
        if zero is not None:
            metrics["efficiency/zero_advantage_fraction"].append(zero)
        metrics["memory/forward_backward_peak_mib"].append(100.0 * state.global_step)
        callback.on_step_end(None, state, None)
    printed = capsys.readouterr().out
    assert printed.count("planned and measured") == 1 and "memory of step 3" in printed and " 300 MiB" in printed


@pytest.mark.parametrize("kind", ["distillation", "sdft"])
def test_a_run_with_a_teacher_is_planned_before_it_loads_one(base, tmp_path, kind):
    """And with the tokens of what the teacher of SDFT reads besides a prompt, of characters here."""
    train = prompts()
    contexts = ["7" * (i % 20) for i in range(len(train))]
    fields = {"per_device_train_batch_size": 8, "max_completion_length": 6, "use_cpu": True, "bf16": False}
    if kind == "distillation":
        args = DistillationConfig(str(tmp_path), teacher_model_name_or_path=base, **fields)
    else:
        template = "So: {privileged_context}!\n{prompt}"
        fields |= {"num_generations": 4, "distillation_mode": "full_logits", "distillation_topk": None}
        args = SDFTConfig(str(tmp_path), teacher_prompt_template=template, **fields)
        train = train.add_column("privileged_context", contexts)
    model = ModelConfig(model_name_or_path=base, use_peft=True, lora_target_modules=["all-linear"])
    script = ScriptArguments(dataset="addition")
    plan = plan_vs_actual.plan_first(script, args, model, train, character_tokenizer())
    read = plan.settings.prompt_tokens + 6  # of each of the eight rows
    if kind == "distillation":
        assert plan.teacher.name == base and plan.teacher.call.padded == 8 * read
    else:
        assert plan.teacher.held == 0 and plan.teacher.call.padded == 8 * (read + len("So: !\n") + 19)
