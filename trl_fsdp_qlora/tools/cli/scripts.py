"""The scripts in recipes/ as commands: accelerate launches those that run in several processes, others are called.

Before that, mistyped options and keys are refused ([`refuse_typos`]), the recipe's name is replaced by its path
([`with_recipe`]), and an accelerate config is chosen if the user names none ([`default_config`]). `plan`, `compare`
and `doctor` find a recipe's method here ([`method_of`]).
"""

import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ...errors import UserError, mistyped_path
from ...trainers.methods import METHODS, Method
from ...utils.plain import counted
from ...utils.resources import accelerate_config, resource_folder
from ..recipe.keys import check_keys, check_options, known_names, read_yaml, spellings
from ..run.launch import launch
from ..run.one_line import pop_options
from .recipes import all_recipes, find

# Options of `accelerate launch` that no script has; everything else is the script's.
LAUNCHER = (
    "--accelerate_config", "--config_file", "--gpu_ids", "--machine_rank", "--main_process_ip", "--main_process_port",
    "--max_restarts", "--num_cpu_threads_per_process", "--num_machines", "--num_processes",
    "--parallelism_config_dp_replicate_size", "--parallelism_config_dp_shard_size", "--rdzv_backend", "--rdzv_conf",
)  # fmt: skip

PLANNED = tuple(method for method in METHODS if not method.is_paired)  # which `doctor` knows


def called(name: str, words: list[str]) -> int:
    """Run the script `name` in this process."""
    script = str(resource_folder("recipes") / f"{name}.py")
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
    return 0


def launched(name: str, words: list[str]) -> int:
    """Run the script `name` like `accelerate launch`, in the requested number of processes."""
    if {"--help", "-h"} & set(words):
        options = ", ".join(LAUNCHER)
        print(f"Of the launcher: {options}. Of the script, in a YAML (--config FILE) or here:\n")
        help_words = ["--help", "all"] if "all" in words else ["--help"]
        return called(name, help_words)
    launcher, rest = pop_options(words, LAUNCHER)
    rest = with_recipe(rest)
    config = launcher.pop("--accelerate_config", None) or launcher.pop("--config_file", None)
    check_gpu_ids(launcher.get("--gpu_ids"))
    flags = _config_flags(config, launcher)
    for option, value in launcher.items():
        flags += [option, value]
    script = resource_folder("recipes") / f"{name}.py"
    return launch([*flags, str(script), *rest])


def check_gpu_ids(ids: str | None) -> None:
    """Refuse GPUs that are not there, without which accelerate trains on the CPU."""
    if ids in (None, "all"):
        return
    import torch

    count = torch.cuda.device_count()
    there = set(map(str, range(count)))
    named = set(map(str.strip, ids.split(",")))
    if named <= there:
        return
    reason = "this machine has no GPU that torch sees"
    if count:
        gpus = counted(count, "GPU")
        reason = f"this machine has {gpus}, numbered from 0"
    raise UserError(f"--gpu_ids {ids}: {reason}")


def with_recipe(words: list[str]) -> list[str]:
    """`words`, with the path of one of this package's recipes if `--config` names one.

    Raises:
        UserError: `--config` names neither a file nor a recipe.
    """
    options, rest = pop_options(words, ("--config",))
    config = options.get("--config")
    if config is None:
        return rest
    if Path(config).exists():
        return ["--config", config, *rest]
    try:
        recipe = find(config)
    except UserError as error:
        is_file_name = Path(config).suffix in (".yaml", ".yml")
        if not is_file_name:
            raise
        hint = mistyped_path(config) or f", and {error}"
        raise UserError(f"--config {config}: there is no such file{hint}") from None
    return ["--config", str(recipe.path), *rest]


def _config_in(words: Sequence[str]) -> str | None:
    """The value of `--config` in `words`."""
    options, _ = pop_options(words, ("--config",))
    return options.get("--config")


# Commands whose options are another program's, names of recipes, or those of a run as they are.
NOT_CHECKED = ("launch", "doctor", "recipes", "config")
# Commands that take a recipe of any of these methods, next to options of their own.
_OF_ANY_METHOD = {"plan": METHODS, "compare": tuple(method for method in METHODS if method.stock)}


def refuse_typos(command: str, words: Sequence[str]) -> None:
    """Refuse options, and keys of the `--config` file, that `command` does not take, before torch is imported."""
    if command in NOT_CHECKED:
        return
    config = _config_in(with_recipe(words))
    methods = _OF_ANY_METHOD.get(command, ())
    if command == "plan":
        shipped_method(config, methods)
    commands = [method.command for method in methods]
    names = known_names(command, *commands)
    if names is None:
        return  # the command's own parser refuses them
    options = spellings(names) | set(LAUNCHER)
    check_options(words, options)
    if config is not None:
        keys = {*names, "env"}
        check_keys(read_yaml(config), keys, config)


def config_of(method: Method) -> type:
    """The config class of a method."""
    module = import_module(f"trl_fsdp_qlora.trainers.{method.room}.config")
    return getattr(module, method.config)


def script_of(method: Method) -> type:
    """The class with the further arguments of a method's recipes."""
    from ..recipe.arguments import ScriptArguments
    from ..recipe.pairs import DPOScriptArguments

    return DPOScriptArguments if method.is_paired else ScriptArguments


def shipped_method(path: str | None, methods: Sequence[Method]) -> Method | None:
    """The method of this package's recipe at `path`, or `None` if no recipe is there.

    Raises:
        UserError: the recipe is of none of `methods`.
    """
    if not path:
        return None
    by_path = {recipe.path: recipe for recipe in all_recipes()}
    recipe = by_path.get(Path(path))
    if recipe is None:
        return None
    by_command = {method.command: method for method in methods}
    if recipe.command not in by_command:
        commands = ", ".join(by_command)
        raise UserError(f"{recipe.name} is a recipe of {recipe.command}; this command takes those of {commands}")
    return by_command[recipe.command]


def method_of(words: Sequence[str], methods: Sequence[Method] = METHODS) -> Method:
    """The method of the recipe that `words` name.

    It is that of a shipped recipe. Otherwise it is the first of `methods` that has every field, GRPO if none has.
    """
    options, rest = pop_options(words, ("--config",))
    config = options.get("--config")
    shipped = shipped_method(config, methods)
    if shipped is not None:
        return shipped
    used = set()
    for word in rest:
        if word.startswith("--"):
            option, _, _ = word.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            used.add(name)
    if config is not None:
        used.update(read_yaml(config))
    used.discard("env")
    for method in methods:
        if used <= field_names(method):
            return method
    return METHODS[0]


def field_names(method: Method) -> set[str]:
    """Names of the fields of a method's recipes."""
    names = known_names(method.command)
    if names is not None:
        return names
    from trl import ModelConfig

    classes = (ModelConfig, config_of(method), script_of(method))
    return set().union(*(cls.__dataclass_fields__ for cls in classes))


def _config_flags(config: str | None, launcher: dict[str, str]) -> list[str]:
    """The flags that name accelerate's config: `config` (a name or a path), the user's own, or a fitting default."""
    if config is not None:
        path = config if Path(config).is_file() else accelerate_config(config)
        return ["--config_file", str(path)]
    from accelerate.commands.config.config_args import default_config_file

    if Path(default_config_file).is_file():  # written by `accelerate config`
        return []
    name, processes = default_config(launcher.get("--num_processes"))
    launcher.setdefault("--num_processes", str(processes))
    plural = "es" if processes > 1 else ""
    line = f"accelerate config: {name}, {processes} process{plural}"
    print(f"{line} (`trl-fsdp-qlora config` lists others, for --accelerate_config)")
    return ["--config_file", str(accelerate_config(name))]


def default_config(num_processes: str | None) -> tuple[str, int]:
    """(name, processes) of the accelerate config for this machine: every GPU, or the CPU.

    Args:
        num_processes: the value of `--num_processes`; `None` if the user has set none.

    Raises:
        UserError: `num_processes` is no number of processes.
    """
    import torch

    if num_processes is not None and not (num_processes.isdigit() and int(num_processes)):
        raise UserError(f"--num_processes {num_processes} is not a number of processes; try 2")
    gpus = torch.cuda.device_count()
    processes = int(num_processes) if num_processes else max(gpus, 1)
    if processes > 1:
        name = "ddp" if gpus else "ddp_cpu"
    else:
        name = "single_gpu" if gpus else "cpu"
    return name, processes
