"""A mistyped option or key is answered before torch is imported, from the source of the command and of its script.

What is not found here is refused by the parser of the script, with the same text.
"""

from collections.abc import Sequence
from pathlib import Path

from ...trainers.methods import METHODS
from ...utils.resources import resource_folder
from ..recipe.keys import check_keys, check_options, read_yaml
from .one_line import pop_options
from .scripts import LAUNCHER, refuse_other_trainers, with_recipe
from .source_fields import option_fields, written_options

_PACKAGE = Path(__file__).parents[2]
_TRAINING = tuple(method.room for method in METHODS)
_WITH_TEACHER = ("distillation", "sdft")
# By command, the scripts in recipes/ whose options it takes. `doctor` is not here: it lists a typo among its findings.
SCRIPTS = {
    **{method.command: (method.room,) for method in METHODS},
    "sft": ("sft",),
    "distillation": ("distillation",),
    "sdft": ("sdft",),
    "evaluate": ("evaluate",),
    "merge": ("merge",),
    "dequantize": ("dequantize",),
    "small-base": ("small_base",),
    "publish": (),
    "report": (),
    "plan": (*_TRAINING, *_WITH_TEACHER),
    "compare": (*_TRAINING, *_WITH_TEACHER),
}


def script_paths(command: str) -> list[Path]:
    return [resource_folder("recipes") / f"{name}.py" for name in SCRIPTS[command]]


def known_names(module: str, scripts: Sequence[Path]) -> tuple[set[str], set[str]] | None:
    """(keys of a YAML file, options) that a command in this package's `module` takes, with those of its `scripts`.

    The options contain all that the parser takes, and `--no_<field>` of every switch, of which it takes some. Returns
    `None` if the names cannot be read.
    """
    keys = {"env", "config"}
    options = {"--config", "--help", *LAUNCHER}
    options |= written_options(_PACKAGE.joinpath(*module.split(".")).with_suffix(".py"))
    for script in scripts:
        fields = option_fields(script)
        if fields is None:
            return None
        keys |= fields.keys()
        options |= written_options(script)
        for name, type_text in fields.items():
            for spelling in (name, f"no_{name}") if "bool" in type_text else (name,):
                options |= {f"--{spelling}", f"--{spelling.replace('_', '-')}"}
    return keys, options


def refuse_typos(command: str, module: str, words: list[str]) -> None:
    """Refuse options of the command line, and keys of its `--config` file, that `command` does not take.

    Raises:
        ConfigError: the message has the nearest name.
    """
    trainer = pop_options(words, ("--trainer",))[0].get("--trainer") if command in ("compare", "plan") else None
    # For most of TRL's own trainers there is no script; the command refuses what they do not have.
    is_read = trainer is None or trainer in SCRIPTS
    if command not in SCRIPTS or not is_read:
        return
    paths = script_paths(command)
    names = known_names(module, paths)
    if names is None:
        return
    keys, options = names
    check_options(words, options)
    config = pop_options(with_recipe(words), ("--config",))[0].get("--config")
    if command == "plan":
        refuse_other_trainers(config, further=_WITH_TEACHER)
    if config is not None:
        written = read_yaml(config)
        ours = [path for path in paths if path.stem not in _WITH_TEACHER]
        of_teachers = [known_names(module, [path])[0] for path in paths if path not in ours]
        names_teacher = any(name.startswith(("teacher_", "distillation_", "privileged_")) for name in written)
        if ours and not names_teacher and not any(written.keys() <= known for known in of_teachers):
            # What only SDFT has, as `max_prompt_length`, is an older name in a recipe of GRPO.
            keys, _ = known_names(module, ours)
        check_keys(written, keys, config)
