"""`trl-fsdp-qlora plan`: whether a recipe fits, before anything is loaded."""

from collections.abc import Sequence

from ..errors import UserError
from ..run.one_line import OneLineParser, check_processes, stop_at_once, stop_by_exception
from .scripts import method_of, with_recipe


def _parser() -> OneLineParser:
    """Of the command's own options; every other `--field value` is a field of the recipe."""
    found = OneLineParser(
        prog="trl-fsdp-qlora plan",
        description="Bytes of each phase of a run, and whether it fits; needs no weights and no GPU.",
        epilog="--config FILE.yaml and any field of the recipe can follow: --max_completion_length 512. Exit status: 0 fits, 1 does not, 2 bad input.",
    )
    found.add_argument("--accelerate_config", help="file, or one of this package's names")
    found.add_argument("--num_processes", type=int, help="ranks, instead of the accelerate config's or --hardware's")
    found.add_argument("--hardware", help="h100, '24GB x2', cpu; what is there by default")
    found.add_argument("--solve", action="store_true", help="also what is the most that fits, and the fewest cards")
    found.add_argument("--prompt_tokens", type=int, default=256, help="tokens of the longest prompt")
    found.epilog += " With --dataset FILE (or --pairs FILE of DPO) the data is read, and the tokens of its micro-batches are counted."
    return found


def plan(words: Sequence[str]) -> int:
    """Print a recipe's plan; exit status 0 where it fits, 1 where it does not."""
    own, rest = _parser().parse_known_args(words if {"-h", "--help"}.isdisjoint(words) else ["-h"])
    check_processes(own.num_processes)
    rest = with_recipe(rest)
    if not rest:
        raise UserError("plan needs a recipe: --config FILE.yaml")
    # On fake tensors a KeyboardInterrupt may be raised in a callback, and is lost there. Nothing is written that could be half.
    stop_at_once()
    try:
        from .. import EfficientDPOConfig, EfficientRLOOConfig
        from ..planning import plan as planning
        from ..recipe.arguments import ScriptArguments
        from ..recipe.pairs import DPOScriptArguments

        scripts = {EfficientRLOOConfig: ScriptArguments, EfficientDPOConfig: DPOScriptArguments}
        config = method_of(rest, scripts)
        launch = own.accelerate_config, own.hardware, own.num_processes
        named = {word.partition("=")[0] for word in rest}
        made = planning.plan_recipe(
            rest,
            config,
            *launch,
            script=scripts.get(config, ScriptArguments),
            counts_data=bool({"--dataset", "--pairs"} & named),
            prompt_tokens=own.prompt_tokens,
        )
        print(planning.format_plan(made))
        if not made.fits and made.enough_cards:
            lines = [f"makes it fit: {line}" for line in planning.ways(made)]
            print("\n".join(lines) or "no single line makes it fit")
        if own.solve:
            length = made.settings.length_field
            rows_at_once = 1 if made.settings.is_paired else made.settings.num_generations
            rows = planning.largest(made, "per_device_train_batch_size", rows_at_once)
            print(f"largest that fits: per_device_train_batch_size: {rows}")
            print(f"longest that fits: {length}: {planning.largest(made, length, 16)}")
            if made.hardware.gpu:
                print(f"fewest cards that it fits: {planning.fewest_cards(made) or 'none'}")
        return 0 if made.fits else 1
    finally:
        stop_by_exception()
