"""`trl-fsdp-qlora config`: the accelerate configs of this package, for `accelerate launch --config_file`."""

from ..errors import UserError
from ..run.one_line import OneLineParser
from ..run.shipped import accelerate_config, names
from .words import refuse


def config(words: list[str]) -> int:
    """Print the path of the config that `words` names, or the names of all."""
    parser = OneLineParser(
        prog="trl-fsdp-qlora config", description="The path of an accelerate config, or the names of all."
    )
    parser.add_argument("name", nargs="?", help=f"one of: {', '.join(names())}")
    name = parser.parse_args(words).name
    try:
        print(accelerate_config(name) if name else "\n".join(names()))
    except UserError as error:
        return refuse(str(error))
    return 0
