"""`trl-fsdp-qlora`, or `python -m trl_fsdp_qlora`: small helpers for the shell.

accelerate launch --config_file $(trl-fsdp-qlora config ddp_cpu) my_script.py
trl-fsdp-qlora launch --config_file ddp_cpu my_script.py
"""

import argparse
import sys

from . import __version__
from .run.accelerate_configs import accelerate_config, names
from .run.launch import launch


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="trl-fsdp-qlora", description="Helpers of trl-fsdp-qlora.")
    parser.add_argument("--version", action="version", version=f"trl-fsdp-qlora {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    config = commands.add_parser("config", help="print the path of an accelerate config, or the names of all")
    config.add_argument("name", nargs="?", help=f"one of: {', '.join(names())}")
    commands.add_parser(
        "launch", help="accelerate launch, without its traceback after a script's own error", add_help=False
    )
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["launch"]:
        sys.exit(launch(argv[1:]))
    arguments = parser.parse_args(argv)
    if arguments.name is None:
        print("\n".join(names()))
        return
    try:
        print(accelerate_config(arguments.name))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
