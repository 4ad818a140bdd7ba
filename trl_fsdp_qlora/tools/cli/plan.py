"""`trl-fsdp-qlora plan`: whether a recipe fits, before anything is loaded."""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import UserError
from ..run.one_line import OneLineParser, check_num_processes
from .scripts import config_of, method_of, script_of, with_recipe

if TYPE_CHECKING:
    from ..planning.plan import MemoryPlan


def _parser() -> OneLineParser:
    """The parser of the command's own options; every other `--field value` is a field of the recipe."""
    parser = OneLineParser(
        prog="trl-fsdp-qlora plan",
        description="Bytes of each phase of a run, and whether it fits; needs no weights and no GPU.",
        epilog="--config FILE.yaml and any field of the recipe can follow: --max_completion_length 512. Exit status: "
        "0 fits, 1 does not, 2 bad input.",
    )
    parser.add_argument("--accelerate_config", help="file, or one of this package's names")
    parser.add_argument("--num_processes", type=int, help="ranks, instead of the accelerate config's or --hardware's")
    parser.add_argument("--hardware", help="h100, '24GB x2', cpu; what is there by default")
    parser.add_argument("--solve", action="store_true", help="also the largest group, length and model that fit")
    parser.add_argument("--prompt_tokens", type=int, help="tokens of the longest prompt, 256 by default")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, with bytes as numbers")
    return parser


def plan(words: Sequence[str]) -> int:
    """Print a recipe's plan; exit status 0 if it fits, 1 if it does not."""
    options, rest = _parser().parse_known_args(words if {"-h", "--help"}.isdisjoint(words) else ["-h"])
    check_num_processes(options.num_processes)
    if options.prompt_tokens is not None and options.prompt_tokens < 1:
        raise UserError(f"--prompt_tokens {options.prompt_tokens} is not a number of tokens; try 256")
    rest = with_recipe(rest)
    if not rest:
        raise UserError("plan needs a recipe: --config FILE.yaml")
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed writes a line when it is imported
        from ..planning.fitting import as_words, lines_that_fit
        from ..planning.plan import plan_recipe
        from ..planning.table import as_json, format_plan

        method = method_of(rest)
        planned = plan_recipe(
            rest,
            config_of(method),
            options.accelerate_config,
            options.hardware,
            options.num_processes,
            options.prompt_tokens,
            script_of(method),
        )
        largest = _largest(planned) if options.solve else {}
        lines = {} if planned.fits else lines_that_fit(planned)
    if options.json:
        print(json.dumps({**as_json(planned), "fits_with": lines, "largest": largest}, indent=2))
        return 0 if planned.fits else 1
    print(format_plan(planned))
    if lines:
        print(f"it fits with {as_words(lines)}")
    elif not planned.fits and planned.enough_cards:
        print("docs/out_of_memory.md has the lines that need less, and --solve finds what fits")
    for name, value in largest.items():
        of_known = " (of the dense models that plan knows)" if name == "model" else ""
        print(f"largest that fits: {name}: {value or 'none'}{of_known}")
    return 0 if planned.fits else 1


def _largest(planned: "MemoryPlan") -> dict[str, int | str | None]:
    """The largest group, length and model that fit, by the name of the field."""
    from ..planning import largest

    is_paired = planned.settings.is_paired
    return {
        "per_device_train_batch_size" if is_paired else "num_generations": largest.largest_group(planned),
        planned.settings.length_field: largest.longest(planned),
        "model": largest.largest_model(planned),
    }
