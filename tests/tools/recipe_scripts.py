"""The scripts in recipes/ as modules, and the options that they take."""

import importlib.util
import re
import types
from pathlib import Path

from transformers import TrainingArguments
from trl import ModelConfig

from trl_fsdp_qlora.tools.cli.scripts import config_of, script_of
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.checks import Recipe, user_code
from trl_fsdp_qlora.trainers.methods import METHODS

RECIPES = Path(__file__).parents[2] / "recipes"


def script(name: str) -> types.ModuleType:
    """The script `name` of recipes/, imported and not run."""
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def option_types(name: str) -> list[type]:
    """The classes that the script `name` parses its options into; none if it has a parser of its own."""
    module = script(name)
    method = next((each for each in METHODS if each.room == name), None)
    if method is not None:
        return [script_of(method), config_of(method), ModelConfig]
    match = re.search(r"parse_recipe\(\((.*?),?\)", (RECIPES / f"{name}.py").read_text(encoding="utf-8"))
    return [getattr(module, each.strip()) for each in match[1].split(",")] if match else []


def recipe_of(config: TrainingArguments, script: ScriptArguments, model: ModelConfig | None = None) -> Recipe:
    """A recipe of these arguments that was not checked, and whose model has no tokenizer."""
    return Recipe(script, config, model or ModelConfig(), user_code(script, vars(config)), tokenizer=None)
