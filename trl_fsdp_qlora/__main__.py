"""`trl-fsdp-qlora`, or `python -m trl_fsdp_qlora`: everything that can be done from a shell.

trl-fsdp-qlora grpo --config small-base/grpo/quickstart
trl-fsdp-qlora launch --config_file ddp_cpu my_script.py

It has only a table, so that `--help` and a typo are answered at once: a command is imported when it is called.
"""

import logging
import sys
from importlib import import_module
from typing import NamedTuple

from . import __version__
from .errors import UserError, did_you_mean
from .tools.run.one_line import in_one_line
from .trainers.methods import METHODS


class _Command(NamedTuple):
    """A command: a function of a module of this package.

    The functions of `cli.scripts` run the script in recipes/ that `script` names.
    """

    module: str
    function: str
    does: str
    script: str | None = None


COMMANDS = {
    "quickstart": _Command("tools.cli.quickstart", "quickstart", "build a small model and train it, in minutes"),
    **{method.command: _Command("tools.cli.scripts", "launched", method.does, method.room) for method in METHODS},
    "sft": _Command("tools.cli.scripts", "launched", "teach worked answers first, if a base is never right", "sft"),
    "distillation": _Command(
        "tools.cli.scripts", "launched", "TRL's distillation from a teacher model", "distillation"
    ),
    "evaluate": _Command("tools.cli.scripts", "launched", "measure accuracy on held-out problems", "evaluate"),
    "merge": _Command("tools.cli.scripts", "called", "merge an adapter into its unquantized base", "merge"),
    "publish": _Command("tools.publishing.publish", "run_publish", "check an adapter, upload it, prove that it loads"),
    "dequantize": _Command(
        "tools.cli.scripts", "called", "write a 4-bit base for a vLLM server to hold", "dequantize"
    ),
    "small-base": _Command("tools.cli.scripts", "called", "build the quickstart's small model", "small_base"),
    "plan": _Command("tools.cli.plan", "plan", "bytes of each phase of a run, and whether it fits"),
    "compare": _Command("tools.cli.compare", "compare", "a few steps next to stock TRL's, on the same completions"),
    "report": _Command("tools.cli.report", "report", "a page with the curves and the completions of a run"),
    "doctor": _Command("tools.cli.doctor", "doctor", "list what would fail or go wrong, before it does"),
    "recipes": _Command("tools.cli.recipes", "recipes", "list the recipes; print one"),
    "launch": _Command("tools.run.launch", "launch", "accelerate launch for a script of your own"),
    "config": _Command("tools.cli.recipes", "config", "print the path of an accelerate config, or all names"),
}


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:<{width}}{command.does}" for name, command in COMMANDS.items())
    launched = ", ".join(name for name, command in COMMANDS.items() if command.function == "launched")
    return (
        "usage: trl-fsdp-qlora COMMAND ...\n\n"
        f"{lines}\n\n"
        "trl-fsdp-qlora COMMAND --help has each command's options; --version prints the version.\n"
        f"{launched} also take --accelerate_config NAME and --num_processes N."
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command that `argv` (the process's own by default) names, and return its exit status.

    [`~trl_fsdp_qlora.tools.run.one_line.in_one_line`] prints a `UserError` and exits.
    """
    with in_one_line():
        argv = sys.argv[1:] if argv is None else argv
        name, *words = argv or ["--help"]
        if name in ("--help", "-h", "--version"):
            print(f"trl-fsdp-qlora {__version__}" if name == "--version" else _help())
            return 0
        command = COMMANDS.get(name)
        if command is None:
            hint = did_you_mean(name.replace("_", "-"), COMMANDS, 0.5) or f"; there are {', '.join(COMMANDS)}"
            raise UserError(f"trl-fsdp-qlora has no command {name!r}{hint}")
        scripts = import_module(".tools.cli.scripts", __package__)
        scripts.refuse_typos(name, words)
        # bitsandbytes warns about 4-bit products on a CPU whenever it is imported without another package. The warning
        # has nothing to do with the command.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        function = getattr(import_module(f".{command.module}", __package__), command.function)
        return function(words) if command.script is None else function(command.script, words)


if __name__ == "__main__":
    sys.exit(main())
