"""`trl-fsdp-qlora compare`: a recipe's own steps, stock TRL beside this package on the same completions."""

import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from ..run.redaction import redact
from .scripts import LAUNCHER, with_recipe
from .words import refuse, take

_HELP = """usage: trl-fsdp-qlora compare --config FILE.yaml [--steps 3] [--picture compare.png] [any field]

Takes a few steps of a GRPO recipe with stock TRL's GRPOTrainer and with this package's, in one process, on the same prompts,
completions, rewards and weights; prints losses and gradients beside each other, seconds and bytes of each phase, and draws a
picture. Nothing is saved of the training, and the recipe's output_dir is left alone.
The exit status is 0 where both are equal within rounding, 1 where they are not, 2 for input that cannot be compared."""
_OWN = ("--steps", "--picture")
# What a run would start that a comparison does not need.
_QUIET = {
    "skip_accuracy": "true",
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": "false",
    "push_to_hub": "false",
    "log_completions": "false",
    "disable_tqdm": "true",
}


def compare(words: list[str]) -> int:
    """Compare, print, draw; returns the exit status."""
    if {"--help", "-h"} & set(words):
        print(_HELP)
        return 0
    warnings.simplefilter("ignore")  # libraries about each other
    try:
        own, steps, rest = _words(words)
    except ValueError as error:
        return refuse(str(error))
    from ..recipe.arguments import DEBUG_ERRORS
    from ..recipe.refusals import is_refusal
    from ..recipe.script import USER_ERRORS

    with tempfile.TemporaryDirectory() as folder:
        try:
            return _compared(rest, steps, Path(own.get("--picture", "compare.png")), Path(folder))
        except Exception as error:
            if DEBUG_ERRORS in words or not (isinstance(error, USER_ERRORS) or is_refusal(error)):
                raise
            return refuse(redact(str(error)))


def _words(words: list[str]) -> tuple[dict[str, str], int, list[str]]:
    """(this command's options, steps, the recipe's words).

    Raises:
        ValueError: what cannot be compared, or is not a number of steps.
    """
    launcher, rest = take(words, LAUNCHER)
    if launcher or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"compare runs in one process: leave {', '.join(launcher) or 'the launcher'} out. (Under FSDP2 stock TRL trains "
            "no 4-bit base: there is nothing to compare with.)"
        )
    own, rest = take(rest, _OWN)
    steps = own.get("--steps", "3")
    if not steps.isdigit() or not int(steps):
        raise ValueError(f"--steps {steps} is not a number of steps; try 3")
    if Path(own.get("--picture", "compare.png")).suffix != ".png":
        raise ValueError(f"--picture {own['--picture']} must end in .png")
    rest = with_recipe(rest)
    if not rest:
        raise ValueError("compare needs a recipe: --config FILE.yaml")
    return own, int(steps), rest


def _compared(rest: list[str], steps: int, picture: Path, folder: Path) -> int:
    from transformers.utils import logging

    from ..recipe.data import load_data
    from ..telemetry import terminal
    from .comparison import compared
    from .comparison_report import draw, shown, verdict

    terminal.no_bars_in_files()
    logging.set_verbosity_error()
    script, config, model = _parsed(rest, folder)
    for line in _levelled(config, model):
        print(line, flush=True)
    train, _ = load_data(script)
    result = compared(script, config, model, train, steps)
    print(shown(result))
    try:
        print(f"picture: {draw(result, picture)}")
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'trl-fsdp-qlora[plots]')")
    equal, line = verdict(result)
    print(line)
    return 0 if equal else 1


def _parsed(rest: list[str], folder: Path) -> tuple[Any, Any, Any]:
    """A GRPO recipe's script, config and model, with `folder` to write to.

    Raises:
        ConfigError: a field is wrong, or the recipe is another method's.
    """
    from trl import ModelConfig

    from .. import EfficientGRPOConfig
    from ..recipe.arguments import ConfigError, ScriptArguments, parse_recipe
    from ..recipe.checks import check_recipe
    from .catalog import all_recipes
    from .run_findings import method_of

    taken, fields = take(rest, ("--config",))
    path = Path(taken["--config"]) if taken else None
    command = next((recipe.command for recipe in all_recipes() if path and recipe.path == path), "grpo")
    method = method_of(fields, path)
    if method is not EfficientGRPOConfig or command != "grpo":
        name = {"TSPMOConfig": "T-SPMO", "AStarPOConfig": "A*-PO"}.get(method.__name__, command)
        raise ConfigError(f"stock TRL has no {name} to compare with: compare takes recipes of `trl-fsdp-qlora grpo`")
    types = (ScriptArguments, EfficientGRPOConfig, ModelConfig)
    ours = {**_QUIET, "output_dir": str(folder / "run")}
    script, config, model = parse_recipe(types, [*rest, *(f"--{name}={value}" for name, value in ours.items())])
    check_recipe(script, config, model)
    return script, config, model


def _levelled(config: Any, model: Any) -> list[str]:
    """Set what would make the two trainers differ by design, in place; a line for each."""
    lines = []

    def level(holder: Any, name: str, value: Any, why: str) -> None:
        given = getattr(holder, name)
        if given != value:
            setattr(holder, name, value)
            lines.append(f"{name}: {given} is taken as {value} here: {why}")

    level(config, "token_selection", "all", "a subset of tokens is another objective, which stock TRL does not have")
    level(config, "dynamic_sampling", False, "it changes which prompts are trained on, which stock TRL cannot")
    level(config, "use_vllm", False, "completions come from transformers, and what is compared is the loss")
    level(model, "lora_dropout", 0.0, "each trainer would draw masks of its own")
    return lines
