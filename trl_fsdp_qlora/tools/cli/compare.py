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
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

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
from ...utils.substitute import Substitute
from ...utils.threads import fit_threads
from ..recipe.arguments import parse_recipe
from ..recipe.checks import check_recipe
from ..recipe.pairs import read_pairs
from ..recipe.problems import load_data
from ..recipe.runner import model_arguments, trainer_arguments
from ..run.one_line import OneLineParser
from .scripts import config_of, method_of, script_of, with_recipe

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from ...trainers.trainer_run import TrainerRun

STOCK, OURS = "stock TRL", "this package"
Trainers = dict[str, "TrainerRun | GRPOTrainer"]  # the two; stock TRL's may be RLOO's or DPO's, too
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
    if not {"--help", "-h"}.isdisjoint(words):
        print(__doc__)
        return 0
    warnings.simplefilter("ignore")  # the libraries warn about each other
    no_bars_in_files()
    logging.set_verbosity_error()
    parser = OneLineParser("trl-fsdp-qlora compare")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trainer", choices=COMPARED)
    options, rest = parser.parse_known_args(words)
    steps = options.steps
    if steps < 1:
        parser.error(f"--steps {steps} is not a number of steps; try 3")
    rest = with_recipe(rest)
    methods = tuple(COMPARED.values())
    method = COMPARED[options.trainer] if options.trainer else method_of(rest, methods)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        words_of_recipe = [*rest, *_QUIET, f"--output_dir={folder}/run"]
        trainers = _trainers(method, words_of_recipe)
        ours = trainers[OURS]
        if draws(ours.model):
            print("dropout is off here: each trainer would draw masks of its own", flush=True)
        for trainer in trainers.values():
            stack.enter_context(without_dropout(trainer.model))
        spans: Spans = defaultdict(list)
        differences = list(_steps(trainers, steps, spans))
    phases = PHASES[1:] if method.is_paired else PHASES  # of pairs there is nothing to score
    for phase in phases:
        of_stock = _median_seconds(spans[STOCK, phase])
        of_ours = _median_seconds(spans[OURS, phase])
        print(f"{phase}: {of_stock:.4f} s and {of_ours:.4f} s ({of_stock / of_ours:.2f}×)")
    sharing = ours.sharing
    figures = sharing.figures  # of the last pass
    if figures.tokens:
        fraction = figures.tokens / figures.padded_tokens
        print(f"tokens computed by this package's passes: {fraction:.1%} of the padded ones")
    print(f"medians of {steps}, stock TRL first; {sharing.describe()}")
    with ours.accelerator.autocast():
        is_half = rounding_unit(sharing.base, ours.accelerator.device)
    precision = "half precision" if is_half else "float32"
    equal, line = verdict(differences, precision)
    print(line)
    return 0 if equal else 1


def _median_seconds(spans: list[tuple[Moment, Moment]]) -> float:
    """Median of the seconds of a phase, without its first step, which warms up."""
    _, *measured = spans
    durations = [seconds(start, end) for start, end in measured]
    return statistics.median(durations)


def verdict(apart: list[tuple[float, float]], precision: str) -> tuple[bool, str]:
    """(whether both are equal within rounding in all steps, a line with the result and the allowed difference)."""
    loss_limit, gradient_limit = LIMITS[precision]
    # NaN is not equal: every comparison with it is false.
    equal = all(loss <= loss_limit and gradient <= gradient_limit for loss, gradient in apart)
    result = "equal" if equal else "DIFFERENT"
    line = (
        f"{result} ({precision}): losses may be {loss_limit:.0e} apart (of the loss, if it is more than one), "
        f"gradients {gradient_limit:.0e} of their norm"
    )
    return equal, line


def drawn_rewards(completions: list, **_columns: object) -> list[float]:
    """The same rewards in every call, so that no group is without a difference to learn from."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(len(completions), generator=generator)
    return rewards.tolist()


def _arguments(method: Method, words: list[str]) -> dict[str, object]:
    """The arguments, by name, with which the script of `method` builds its trainer for the recipe in `words`.

    Raises:
        UserError: the script would refuse the recipe.
    """
    types = (script_of(method), config_of(method), ModelConfig)
    script, config, model = parse_recipe(types, words)
    recipe = check_recipe(script, config, model)
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
        arguments = trainer_arguments(trainer_class, recipe, prompts)
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


def _trainers(method: Method, words: list[str]) -> Trainers:
    """Both trainers with weights of their own, prepared by `train` for a first step."""
    arguments = _arguments(method, words)
    args = arguments["args"]
    revision = (args.model_init_kwargs or {}).get("revision")
    adapter = arguments.get("peft_config")
    args_of_stock = copy.deepcopy(args)
    args_of_stock.__class__ = getattr(trl, f"{method.stock}Config")  # stock TRL reads its own fields alone
    of_stock = {
        "args": args_of_stock,
        "processing_class": copy.deepcopy(arguments.get("processing_class")),
        # In a text run stock TRL's `all-linear` adapts a vision tower, too; here both train the same weights.
        "peft_config": language_model_only(adapter, arguments["model"], revision, arguments["train_dataset"]),
    }
    stock_class = getattr(trl, f"{method.stock}Trainer")
    our_class = getattr(this_package, method.trainer)
    trainers = {STOCK: stock_class(**arguments | of_stock), OURS: our_class(**arguments)}
    for trainer in trainers.values():
        trainer.remove_callback(StartupCallback)
        trainer.add_callback(_Ready())
        with contextlib.suppress(_Ready):
            trainer.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    fit_threads(trainers[OURS].model)
    return trainers


def _steps(trainers: Trainers, steps: int, spans: Spans) -> Iterator[tuple[float, float]]:
    """Step 0, which warms up, and `steps` more. Both begin each with the same weights, which ours updates.

    Yields for each step the difference of the losses (over stock's, if that is more than one) and of the gradients
    (over the norm of stock's).
    """
    stock = trainers[STOCK]
    ours = trainers[OURS]
    accumulation = ours.args.gradient_accumulation_steps
    epochs = itertools.repeat(ours.get_train_dataloader())
    batches = itertools.chain.from_iterable(epochs)
    for i in range(steps + 1):
        with torch.no_grad():
            for weight, our_weight in zip(_trainable(stock), _trainable(ours), strict=True):
                weight.copy_(our_weight)
        if hasattr(ours, "num_generations"):
            # The sampler yields the prompts of a generation batch once for every time that the batch is used.
            uses = ours.args.steps_per_generation * ours.num_iterations
            rows, *_ = itertools.islice(batches, uses)
            parts = _completions(trainers, rows, spans)
        else:
            of_step = list(itertools.islice(batches, accumulation))
            parts = {who: copy.deepcopy(of_step) for who in trainers}
        losses = {}
        for who, trainer in trainers.items():
            trainer.optimizer.zero_grad()
            start = ours.clock.now()
            loss = _loss_and_backward(trainer, parts[who])
            span = (start, ours.clock.now())
            spans[who, "loss and backward"].append(span)
            losses[who] = loss.item()  # the host waits for the device here, behind the span
        loss_apart, gradient_apart = _apart(i, losses, _gradient(stock), _gradient(ours))
        yield loss_apart, gradient_apart
        ours.optimizer.step()
        ours.lr_scheduler.step()
        trainers = dict(reversed(trainers.items()))  # what the first one pays for the second is paid by both


def _loss_and_backward(trainer: "TrainerRun | GRPOTrainer", parts: list[dict]) -> torch.Tensor:
    """The loss of a step's micro-batches, whose gradients are summed."""
    losses = []
    # TRL's method draws completions; these micro-batches have theirs, and TRL has no argument for it.
    with_completions = Substitute(trainer, _prepare_inputs=lambda part: part)
    for part in parts:
        loss = type(trainer).training_step(with_completions, trainer.model_wrapped, part, None)
        losses.append(loss)
    return sum(losses)


def _apart(step: int, losses: dict[str, float], of_stock: torch.Tensor, of_ours: torch.Tensor) -> tuple[float, float]:
    """The differences of losses and gradients, as [`_steps`] yields them; a line has them, too."""
    stock_loss = losses[STOCK]
    our_loss = losses[OURS]
    scale = max(1.0, abs(stock_loss))
    loss_apart = abs(our_loss - stock_loss) / scale
    stock_norm = of_stock.norm()
    our_norm = of_ours.norm()
    difference = (of_ours - of_stock).norm()
    fraction = difference / stock_norm.clamp(min=1e-30)
    gradient_apart = fraction.item()
    of_losses = f"losses {stock_loss:.6e} and {our_loss:.6e} ({loss_apart:.1e} apart)"
    of_gradients = f"gradient norms {stock_norm:.6e} and {our_norm:.6e} (difference {gradient_apart:.1e})"
    print(f"step {step}: {of_losses}, {of_gradients}", flush=True)
    return loss_apart, gradient_apart


def _completions(trainers: Trainers, rows: list[dict], spans: Spans) -> dict[str, list[dict]]:
    """Each trainer's micro-batches of the same completions for the prompts of `rows`."""
    ours = trainers[OURS]
    args = ours.args
    drawn = []
    generate = ours._generate

    def generate_once(*arguments: object, **options: object) -> tuple:
        if not drawn:
            drawn.append(generate(*arguments, **options))
        return copy.deepcopy(drawn[0])

    _scored(ours, rows, generate_once)  # so that no trainer's seconds are those of drawing
    parts = {}
    for who, trainer in trainers.items():
        trainer.model.train()
        start = ours.clock.now()
        scored = _scored(trainer, rows, generate_once)
        span = (start, ours.clock.now())
        spans[who, "scoring"].append(span)
        if ROWS in scored:
            raise UserError("stock TRL trains no episodes of several rows: compare with history: append")
        torch.manual_seed(args.seed)  # both slice in one order
        slices = micro_batches(scored, ours.num_generations, 0, args.steps_per_generation)
        of_step = slices[: args.gradient_accumulation_steps]
        parts[who] = list(map(joined_images, of_step))
    return parts


def _scored(trainer: "TrainerRun | GRPOTrainer", rows: list[dict], generate: Callable[..., tuple]) -> dict:
    """The generation batch of `trainer` for the prompts of `rows`, whose completions `generate` returns."""
    # TRL has no argument for completions that were drawn before: `rollout_func` replaces less of its method, and
    # neither RLOO nor runs with tools have one.
    its_rows = copy.deepcopy(rows)
    with_completions = Substitute(trainer, _generate=generate)
    return type(trainer)._generate_and_score_completions(with_completions, its_rows)


def _trainable(trainer: "TrainerRun | GRPOTrainer") -> list[torch.Tensor]:
    return [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]


def _gradient(trainer: "TrainerRun | GRPOTrainer") -> torch.Tensor:
    """A trainer's gradient as one vector."""
    scaler = trainer.accelerator.scaler
    scale = 1.0 if scaler is None else scaler.get_scale()
    gradients = []
    for parameter in _trainable(trainer):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.append(gradient.flatten().cpu().double())
    return torch.cat(gradients) / scale
