"""A recipe plans before it loads: the warning, the error, and that a fault of the plan never ends a run.

Covers `tools/recipe/rendering.py`.
"""

from dataclasses import replace

import pytest
from transformers import AutoTokenizer
from trl import ModelConfig

from tests.tiny import config, prompts, save_tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.planning import first
from trl_fsdp_qlora.tools.recipe.arguments import ConfigError, ScriptArguments
from trl_fsdp_qlora.tools.recipe.checks import Recipe, user_code
from trl_fsdp_qlora.tools.recipe.rendering import longest_prompt
from trl_fsdp_qlora.tools.small_base import character_tokenizer


def test_a_run_that_does_not_fit_is_warned_of_or_refused(tmp_path, monkeypatch, capsys):
    """And a mistake of the plan's is one line."""
    base = save_tiny_model(tmp_path / "base")

    def planned(require_fit=False):
        script = ScriptArguments(dataset="addition", require_fit=require_fit)
        model = ModelConfig(model_name_or_path=base, use_peft=True, lora_target_modules=["all-linear"])
        args = config(EfficientGRPOConfig, tmp_path)
        recipe = Recipe(script, args, model, user_code(script), character_tokenizer())
        return first.plan_first(args, model, longest_prompt(recipe, prompts()), require_fit)

    plan = planned()
    printed = capsys.readouterr().out
    assert plan.fits and printed == ""
    tokenizer = AutoTokenizer.from_pretrained(base)
    texts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts()["prompt"]]
    assert plan.settings.prompt_tokens == max(len(tokenizer(text)["input_ids"]) for text in texts)
    real = first.make_plan
    monkeypatch.setattr(first, "make_plan", lambda run: replace(real(run), capacity=2**20))
    assert not planned().fits
    printed = capsys.readouterr().out
    assert printed.startswith("warning: ") and printed.count("\n") == 1
    with pytest.raises(ConfigError, match=r"require_fit: true.* 1\.0 MiB"):
        planned(require_fit=True)
    monkeypatch.setattr(first, "make_plan", lambda run: 1 / 0)
    assert planned(require_fit=True) is None
    printed = capsys.readouterr().out
    assert printed.endswith("ZeroDivisionError: division by zero\n") and printed.count("\n") == 1
