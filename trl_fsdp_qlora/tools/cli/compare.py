"""usage: trl-fsdp-qlora compare --config FILE.yaml [--trainer NAME] [--steps 3] [any field]

Builds two trainers with the arguments of a recipe, stock TRL's and this package's, and takes a few steps with both, in
one process, on the same prompts, completions, rewards (or preference pairs) and weights. Rewards are drawn from a
fixed seed. NAME is grpo, rloo or dpo; without --trainer it is the shipped recipe's, or the first that has its fields.
Prints losses and gradients of both, seconds of scoring and of loss and backward, and how many of the padded tokens
this package computes. Step 0 warms up, and its seconds do not count. Stock TRL's passes are padded, and may need much
more memory.
Nothing is saved of the training, and the recipe's output_dir is left alone.
The exit status is 0 if both are equal within rounding, 1 if they are not, and 2 for input that cannot be compared.
"""

import contextlib
import copy
import itertools
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import trl
from transformers import TrainerCallback
from transformers.utils import logging
from trl import ModelConfig

import trl_fsdp_qlora as this_package

from ...compat.trl import joined_images
from ...compat.trl_rollouts import ROWS
from ...errors import UserError
from ...prefix_sharing.check import rounding_unit
from ...prefix_sharing.dropout import draws, without_dropout
from ...trainers.methods import METHODS, Method
from ...trainers.reporting.phases import Moment, seconds
from ...trainers.reporting.startup import StartupCallback
from ...trainers.reporting.terminal import no_bars_in_files
from ...trainers.starting.input_checks import language_model_only
from ...trainers.step.groups import micro_batches
from ...utils.replaced import replaced
from ...utils.threads import fit_threads
from ..recipe.arguments import parse_recipe
from ..recipe.checks import check_recipe
from ..recipe.pairs import read_pairs
from ..recipe.problems import load_data
from ..recipe.runner import model_arguments, trainer_arguments
from ..run.one_line import OneLineParser
from .scripts import config_of, method_of, script_of, with_recipe

if TYPE_CHECKING:
    from ...trainers.trainer_run import TrainerRun

STOCK, OURS = "stock TRL", "this package"
PHASES = ("scoring", "loss and backward")
Spans = dict[tuple[str, str], list[tuple[Moment, Moment]]]  # by trainer and phase, one per step
COMPARED = {method.command: method for method in METHODS if method.stock}
# Side effects of building a trainer that a comparison does not need.
_QUIET = ("--report_to=none", "--push_to_hub=false", "--disable_tqdm=true", "--skip_accuracy=true")
# Settings that would make the two trainers differ by design: (field, value, why).
_LEVELLED = (
    ("token_selection", "all", "a subset of tokens is another objective, which stock TRL does not have"),
    ("dynamic_sampling", False, "it changes which prompts are trained on, which stock TRL cannot"),
    ("rollouts_ahead", 0, "stock TRL waits for its completions"),
    ("use_vllm", False, "completions come from transformers, and what is compared is the loss"),
    ("precompute_ref_log_probs", False, "both compute the reference in their steps, so that it is compared, too"),
    ("reward_weights", None, "rewards are drawn from a fixed seed"),
)
# In float32 the two add the same numbers in another order. Losses of new completions are sums of advantages of about
# one that cancel to about zero, so their difference is compared with one; that of the gradients is divided by their
# norm, as in the trainer's tests. In half precision single tokens differ by hundredths of a nat from run to run.
LIMITS = {"float32": (1e-5, 1e-4), "half precision": (0.05, 0.25)}


def compare(words: list[str]) -> int:
    """Compare and print; returns the exit status."""
    if {"--help", "-h"} & set(words):
        print(__doc__)
        return 0
    warnings.simplefilter("ignore")  # the libraries warn about each other
    no_bars_in_files()
    logging.set_verbosity_error()
    parser = OneLineParser("trl-fsdp-qlora compare")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trainer", choices=COMPARED)
    options, rest = parser.parse_known_args(words)
    if options.steps < 1:
        parser.error(f"--steps {options.steps} is not a number of steps; try 3")
    rest = with_recipe(rest)
    method = COMPARED[options.trainer] if options.trainer else method_of(rest, tuple(COMPARED.values()))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        trainers = _trainers(method, [*rest, *_QUIET, f"--output_dir={folder}/run"])
        ours = trainers[OURS]
        if draws(ours.model):
            print("dropout is off here: each trainer would draw masks of its own", flush=True)
        for trainer in trainers.values():
            stack.enter_context(without_dropout(trainer.model))
        spans: Spans = defaultdict(list)
        done = list(_steps(trainers, options.steps, spans))
    for phase in PHASES[method.is_paired :]:
        stock, own = (statistics.median(seconds(*span) for span in spans[who, phase][1:]) for who in (STOCK, OURS))
        print(f"{phase}: {stock:.4f} s and {own:.4f} s ({stock / own:.2f}×)")
    figures = ours.sharing.figures  # of the last pass
    if figures.tokens:
        fraction = figures.tokens / figures.padded_tokens
        print(f"tokens computed by this package's passes: {fraction:.1%} of the padded ones")
    print(f"medians of {options.steps}, stock TRL first; {ours.sharing.describe()}")
    with ours.accelerator.autocast():
        is_half = rounding_unit(ours.sharing.base, ours.accelerator.device)
    equal, line = verdict(done, "half precision" if is_half else "float32")
    print(line)
    return 0 if equal else 1


def verdict(apart: list[tuple[float, float]], precision: str) -> tuple[bool, str]:
    """(whether both are equal within rounding in all steps, a line with the result and the allowed difference)."""
    loss_limit, gradient_limit = LIMITS[precision]
    # NaN is not equal: every comparison with it is false.
    equal = all(loss <= loss_limit and gradient <= gradient_limit for loss, gradient in apart)
    return equal, (
        f"{'equal' if equal else 'DIFFERENT'} ({precision}): losses may be {loss_limit:.0e} apart (of the loss, if it "
        f"is more than one), gradients {gradient_limit:.0e} of their norm"
    )


def drawn_rewards(completions: list, **_columns: object) -> list[float]:
    """The same rewards in every call, so that no group is without a difference to learn from."""
    return torch.randn(len(completions), generator=torch.Generator().manual_seed(0)).tolist()


def _arguments(method: Method, words: list[str]) -> dict[str, Any]:
    """The arguments, by name, with which the script of `method` builds its trainer for the recipe in `words`.

    Raises:
        UserError: the script would refuse the recipe.
    """
    script, config, model = parse_recipe((script_of(method), config_of(method), ModelConfig), words)
    check_recipe(script, config, model)
    if method.is_paired:
        arguments = {
            "model": model.model_name_or_path,
            "args": config,
            "train_dataset": read_pairs(script.pairs, script.dataset_split),
            **model_arguments(config, model),
        }
    else:
        trainer_class = getattr(this_package, method.trainer)
        prompts, _ = load_data(script)
        arguments = trainer_arguments(trainer_class, script, config, model, prompts)
        arguments["reward_funcs"] = drawn_rewards
    for field_name, value, why in _LEVELLED:
        value_in_recipe = vars(config).get(field_name, value)
        if value_in_recipe != value:
            setattr(config, field_name, value)
            print(f"{field_name}: {value_in_recipe} is taken as {value} here: {why}", flush=True)
    return arguments


class _Ready(TrainerCallback, Exception):
    """Raises itself when a trainer's first step would begin."""

    def on_train_begin(self, args, state, control, **kwargs):
        raise self


def _trainers(method: Method, words: list[str]) -> dict[str, Any]:
    """Both trainers with weights of their own, prepared by `train` for a first step."""
    arguments = _arguments(method, words)
    # In a text run stock TRL's `all-linear` adapts a vision tower, too; here both train the same weights.
    revision = (arguments["args"].model_init_kwargs or {}).get("revision")
    adapter = arguments.get("peft_config")
    of_stock = {
        "args": copy.deepcopy(arguments["args"]),
        "processing_class": copy.deepcopy(arguments.get("processing_class")),
        "peft_config": language_model_only(adapter, arguments["model"], revision, arguments["train_dataset"]),
    }
    of_stock["args"].__class__ = getattr(trl, f"{method.stock}Config")  # stock TRL reads its own fields alone
    trainers = {
        STOCK: getattr(trl, f"{method.stock}Trainer")(**arguments | of_stock),
        OURS: getattr(this_package, method.trainer)(**arguments),
    }
    for trainer in trainers.values():
        trainer.remove_callback(StartupCallback)
        trainer.add_callback(_Ready())
        with contextlib.suppress(_Ready):
            trainer.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    fit_threads(trainers[OURS].model)
    return trainers


def _steps(trainers: dict[str, Any], steps: int, spans: Spans) -> Iterator[tuple[float, float]]:
    """Step 0, which warms up, and `steps` more. Both begin each with the same weights, which ours updates.

    Yields for each step the difference of the losses (over stock's, if that is more than one) and of the gradients
    (over the norm of stock's).
    """
    ours = trainers[OURS]
    args = ours.args
    endless = itertools.chain.from_iterable(itertools.repeat(ours.get_train_dataloader()))
    for i in range(steps + 1):
        with torch.no_grad():
            for weight, own_weight in zip(*map(_trainable, (trainers[STOCK], ours)), strict=True):
                weight.copy_(own_weight)
        if hasattr(ours, "num_generations"):
            # The sampler yields the prompts of a generation batch once for every time that the batch is used.
            rows, *_ = itertools.islice(endless, args.steps_per_generation * ours.num_iterations)
            parts = _completions(trainers, rows, spans)
        else:
            batches = list(itertools.islice(endless, args.gradient_accumulation_steps))
            parts = {who: copy.deepcopy(batches) for who in trainers}
        losses = {}
        for who, trainer in trainers.items():
            trainer.optimizer.zero_grad()
            start = ours.clock.now()
            with replaced(trainer, _prepare_inputs=lambda part: part):
                of_parts = [trainer.training_step(trainer.model_wrapped, part, None) for part in parts[who]]
            spans[who, "loss and backward"].append((start, ours.clock.now()))
            losses[who] = sum(of_parts).item()
        of_stock = _gradient(trainers[STOCK])
        gradient = _gradient(ours)
        loss_apart = abs(losses[OURS] - losses[STOCK]) / max(1.0, abs(losses[STOCK]))
        gradient_apart = ((gradient - of_stock).norm() / of_stock.norm().clamp(min=1e-30)).item()
        print(
            f"step {i}: losses {losses[STOCK]:.6e} and {losses[OURS]:.6e} ({loss_apart:.1e} apart), "
            f"gradient norms {of_stock.norm():.6e} and {gradient.norm():.6e} (difference {gradient_apart:.1e})",
            flush=True,
        )
        yield loss_apart, gradient_apart
        ours.optimizer.step()
        ours.lr_scheduler.step()
        trainers = dict(reversed(trainers.items()))  # what the first one pays for the second is paid by both


def _completions(trainers: dict[str, Any], rows: list, spans: Spans) -> dict[str, list]:
    """Each trainer's micro-batches of the same completions for the prompts of `rows`."""
    ours = trainers[OURS]
    generate = ours._generate
    generated = []
    parts = {}

    def generate_once(*args: object, **kwargs: object) -> Any:
        if not generated:
            generated.append(generate(*args, **kwargs))
        return copy.deepcopy(generated[0])

    with replaced(ours, _generate=generate_once):
        ours._generate_and_score_completions(copy.deepcopy(rows))
    for who, trainer in trainers.items():
        trainer.model.train()
        start = ours.clock.now()
        with replaced(trainer, _generate=generate_once):
            scored = trainer._generate_and_score_completions(copy.deepcopy(rows))
        spans[who, "scoring"].append((start, ours.clock.now()))
        if ROWS in scored:
            raise UserError("stock TRL trains no episodes of several rows: compare with history: append")
        torch.manual_seed(ours.args.seed)  # both slice in one order
        slices = micro_batches(scored, ours.num_generations, 0, ours.args.steps_per_generation)
        parts[who] = [joined_images(part) for part in slices[: ours.args.gradient_accumulation_steps]]
    return parts


def _trainable(trainer: "TrainerRun") -> list[torch.Tensor]:
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


def _gradient(trainer: "TrainerRun") -> torch.Tensor:
    """A trainer's gradient as one vector."""
    scale = 1.0 if trainer.accelerator.scaler is None else trainer.accelerator.scaler.get_scale()
    gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in _trainable(trainer))
    return torch.cat([gradient.flatten().cpu().double() for gradient in gradients]) / scale
