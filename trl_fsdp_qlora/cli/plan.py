"""`trl-fsdp-qlora plan`: whether a recipe fits, see [`trl_fsdp_qlora.planning.command`]."""

from collections.abc import Sequence

from ..errors import UserError
from ..run.quiet_end import stop_at_once, stop_by_exception
from .scripts import with_recipe
from .words import refuse


def plan(words: Sequence[str]) -> int:
    """Print a recipe's plan; exit status 0 where it fits, 1 where it does not, 2 for bad input."""
    from ..a_star_po.config import AStarPOConfig
    from ..planning.command import parser, run_plan
    from ..t_spmo.config import TSPMOConfig

    if "-h" in words or "--help" in words:
        parser().print_help()
        return 0
    try:
        words = with_recipe(list(words))
    except UserError as error:
        return refuse(str(error))
    # On fake tensors a KeyboardInterrupt may be raised in a callback, and is lost there. Nothing is written that could be half.
    stop_at_once()
    try:
        return run_plan(words, (TSPMOConfig, AStarPOConfig))
    finally:
        stop_by_exception()
