"""`trl-fsdp-qlora plan`: whether a recipe fits, before anything is loaded."""

from collections.abc import Sequence

from ..errors import UserError
from ..run.one_line import OneLineParser, refuse, refuse_misspelled
from ..run.signals import stop_at_once, stop_by_exception
from .scripts import with_recipe


def parser() -> OneLineParser:
    """Of the command's own options; every other `--field value` is a field of the recipe."""
    found = OneLineParser(
        prog="trl-fsdp-qlora plan",
        description="Bytes of each phase of a run, and whether it fits; needs no weights and no GPU.",
        epilog="Any field of the recipe can follow: --max_completion_length 512. Exit status: 0 fits, 1 does not, 2 bad input.",
    )
    found.add_argument("--config", help="the recipe's YAML file")
    found.add_argument("--accelerate_config", help="file, or one of this package's names")
    found.add_argument(
        "--num_processes", type=int, help="ranks, instead of the accelerate config's or of --hardware's"
    )
    found.add_argument("--hardware", help="h100, '24GB x2', cpu; what is there by default")
    found.add_argument("--solve", action="store_true", help="also what is the most that fits, and the fewest cards")
    found.add_argument("--prompt_tokens", type=int, help="tokens of the longest prompt")
    return found


def plan(words: Sequence[str]) -> int:
    """Print a recipe's plan; exit status 0 where it fits, 1 where it does not, 2 for bad input."""
    options = parser()
    try:
        own, rest = options.parse_known_args(
            with_recipe(list(words)) if {"-h", "--help"}.isdisjoint(words) else ["-h"]
        )
        refuse_misspelled(rest, [option for action in options._actions for option in action.option_strings])
        for name in ("num_processes", "prompt_tokens"):
            if getattr(own, name) is not None and getattr(own, name) < 1:
                raise UserError(f"--{name} {getattr(own, name)} must be at least 1")
        overrides = _fields(rest)
        if own.config is None and not overrides:
            raise UserError("plan needs a recipe: --config FILE.yaml")
        # On fake tensors a KeyboardInterrupt may be raised in a callback, and is lost there. Nothing is written that could be half.
        stop_at_once()
        from ..a_star_po.config import AStarPOConfig
        from ..planning import plan as planning
        from ..t_spmo.config import TSPMOConfig

        more = {} if own.prompt_tokens is None else {"prompt_tokens": own.prompt_tokens, "prompt_source": "given"}
        more |= {"overrides": overrides, "processes": own.num_processes, "types": (TSPMOConfig, AStarPOConfig)}
        made = planning.plan_recipe(own.config, own.accelerate_config, own.hardware, **more)
        print(planning.format_plan(made))
        if not made.fits and made.enough_cards:
            lines = [f"makes it fit: {line}" for line in planning.ways(made)]
            print("\n".join(lines) or "no single line makes it fit")
        if own.solve:
            rows = planning.largest(made, "per_device_train_batch_size", made.settings.num_generations)
            print(f"largest that fits: per_device_train_batch_size: {rows}")
            print(f"longest that fits: max_completion_length: {planning.largest(made, 'max_completion_length', 16)}")
            if made.hardware.gpu:
                print(f"fewest cards that it fits: {planning.fewest_cards(made) or 'none'}")
        return 0 if made.fits else 1
    except UserError as error:
        return refuse(str(error))
    finally:
        stop_by_exception()


def _fields(words: Sequence[str]) -> dict[str, str]:
    """`--field value` and `--field=value` as a mapping; several values are a list in YAML's brackets."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            last = found[name.replace("-", "_")] = [value] if equals else []
        elif not found:
            raise UserError(f"command line: {word!r} belongs to no option")
        else:
            last.append(word)
    return {
        name: "true" if not values else values[0] if len(values) == 1 else f"[{', '.join(values)}]"
        for name, values in found.items()
    }
