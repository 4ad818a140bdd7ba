"""`trl-fsdp-qlora plan`: whether a recipe fits, before anything is loaded."""

import json
import math
from collections.abc import Sequence

from ...errors import UserError
from ...trainers.methods import METHODS
from .one_line import OneLineParser, check_num_processes, stop_at_once, stop_by_exception
from .scripts import config_of, have_all_fields, method_of, script_of, with_recipe

# TRL's own trainers that are planned: those with a teacher.
WITH_TEACHER = ("distillation", "sdft", "sdpo")


def _parser() -> OneLineParser:
    """The parser of the command's own options; every other `--field value` is a field of the recipe."""
    parser = OneLineParser(
        prog="trl-fsdp-qlora plan",
        description="Bytes of each phase of a run, and whether it fits; needs no weights and no GPU.",
        epilog="--config FILE.yaml and any field of the recipe can follow: --max_completion_length 512. Exit status: "
        "0 fits, 1 does not, 2 bad input. With --dataset FILE (or --pairs FILE of DPO) the data is read, and the "
        "tokens of its micro-batches are counted.",
    )
    parser.add_argument("--accelerate_config", help="file, or one of this package's names")
    parser.add_argument("--num_processes", type=int, help="ranks, instead of the accelerate config's or --hardware's")
    parser.add_argument(
        "--trainer", help="which the recipe is of (sdpo, grpo, ...); the first with its fields by default"
    )
    parser.add_argument("--hardware", help="h100, '24GB x2', cpu; what is there by default")
    parser.add_argument("--solve", action="store_true", help="also what is the most that fits, and the fewest cards")
    parser.add_argument("--json", action="store_true", help="the plan as JSON, bytes as numbers")
    parser.add_argument("--prompt_tokens", type=int, default=256, help="tokens of the longest prompt")
    help_text = "tokens that the teacher of SDFT or SDPO reads besides a prompt"
    parser.add_argument("--privileged_tokens", type=int, default=128, help=help_text)
    return parser


def plan(words: Sequence[str]) -> int:
    """Print a recipe's plan; exit status 0 if it fits, 1 if it does not."""
    options, rest = _parser().parse_known_args(words if {"-h", "--help"}.isdisjoint(words) else ["-h"])
    check_num_processes(options.num_processes)
    rest = with_recipe(rest)
    if not rest:
        raise UserError("plan needs a recipe: --config FILE.yaml")
    # A callback may raise a KeyboardInterrupt on fake tensors, which loses it. Ending at once leaves no half-written
    # file, because nothing is written.
    stop_at_once()
    try:
        from ..planning import plan as planning

        config, script = classes_of(rest, options.trainer)
        named = {word.partition("=")[0] for word in rest}
        planned = planning.plan_recipe(
            rest,
            config,
            options.accelerate_config,
            options.hardware,
            options.num_processes,
            script=script,
            counts_data=bool({"--dataset", "--pairs"} & named),
            prompt_tokens=options.prompt_tokens,
            privileged_tokens=options.privileged_tokens,
        )
        lines = planning.changes_that_fit(planned) if not planned.fits and planned.enough_cards else []
        solved = _solve(planned) if options.solve else {}
        if options.json:
            print(json.dumps(planning.as_dict(planned) | {"makes_it_fit": lines} | solved, indent=2))
            return 0 if planned.fits else 1
        print(planning.format_plan(planned))
        if not planned.fits and planned.enough_cards:
            print("\n".join(f"makes it fit: {line}" for line in lines) or "no single line makes it fit")
        if options.solve:
            largest = solved["largest"]
            print(f"largest that fits: per_device_train_batch_size: {largest['per_device_train_batch_size']}")
            print(f"longest that fits: {planned.settings.length_field}: {largest[planned.settings.length_field]}")
            if planned.hardware.gpu:
                print(f"fewest cards that it fits: {largest['cards'] or 'none'}")
            if "with_vllm" in solved:
                names = ", ".join(f"{name or 'none'} with {base}" for base, name in solved["with_vllm"].items())
                print(f"largest model with vLLM on this card, of those that plan knows: {names}")
            if "at_most" in solved:
                print(planning.format_most(planned, solved["at_most"]))
            if "longest" in solved:
                print(planning.format_longest(planned, solved["longest"]))
        return 0 if planned.fits else 1
    finally:
        stop_by_exception()


def classes_of(words: Sequence[str], trainer: str | None = None) -> tuple[type, type]:
    """The classes of config and script arguments of a recipe.

    They are those of `trainer`, else those of the first trainer that has every field in `words`, of this package's
    and then of those with a teacher.

    Raises:
        UserError: there is no such trainer.
    """
    ours = {method.command: method for method in METHODS}
    if trainer is not None and trainer not in (*ours, *WITH_TEACHER):
        raise UserError(f"--trainer {trainer}: plan knows {', '.join((*ours, *WITH_TEACHER))}")
    if trainer not in WITH_TEACHER:
        method = ours.get(trainer) or method_of(words)
        classes = config_of(method), script_of(method)
        if trainer in ours or have_all_fields(words, *classes):
            return classes
    # TRL's modules are imported only if no trainer of ours has the fields.
    from .compare import compared

    if trainer in WITH_TEACHER:
        return compared(trainer).config, compared(trainer).script
    candidates = ((each.config, each.script) for each in map(compared, WITH_TEACHER))
    return next((each for each in candidates if have_all_fields(words, *each)), classes)


def _solve(planned) -> dict:
    """The most that fits, for this run and for the ways to compute groups."""
    from ...utils.progress import progress
    from ..planning import plan as planning
    from ..planning.largest_model import largest_models

    settings = planned.settings
    length = settings.length_field
    # Micro-batches of a rank and of all have to be whole groups together.
    together = settings.gradient_accumulation_steps * settings.launch.processes
    rows = 1 if settings.is_paired else settings.num_generations // math.gcd(settings.num_generations, together)
    on_gpu = planned.hardware.gpu
    has_groups = "num_generations" in settings.values
    with progress("solving", (6 if has_groups else 3) + 4 * on_gpu, "searches") as bar:
        at_most = planning.most_that_fits(planned, bar.update) if has_groups else {}
        batch = planning.largest(planned, "per_device_train_batch_size", rows)
        bar.update()
        longest = at_most[planning.HERE][length] if at_most else planning.largest(planned, length, 16)
        cards = planning.fewest_cards(planned) if on_gpu else None
        rows_by_option = planning.longest_rows(planned, bar.update) if on_gpu else {}
        bar.update(bar.total - bar.n)
    solved = {"largest": {"per_device_train_batch_size": batch, length: longest, "cards": cards}}
    if at_most:
        solved["at_most"] = at_most
    if planned.engine is not None and settings.model.use_peft:
        solved["with_vllm"] = largest_models(planned)
    if rows_by_option:
        solved["longest"] = rows_by_option
    return solved
