"""usage: trl-fsdp-qlora compare --config FILE.yaml [--trainer NAME] [--steps 3] [any field]

Runs a recipe's own script up to the trainer that it builds. In its place compare builds two with the same arguments,
stock TRL's and this package's, and takes a few steps with both, in one process, on the same prompts, completions,
rewards (or preference pairs) and weights. Rewards are drawn from a fixed seed. NAME is grpo, rloo or dpo; without
--trainer it is the shipped recipe's, or the first that has its fields.
Prints losses and gradients of both, seconds of scoring and of loss and backward, and how many of the padded tokens
this package computes. Stock TRL's passes are padded, and may need much more memory.
Nothing is saved of the training, and the recipe's output_dir is left alone.
The exit status is 0 if both are equal within rounding, 1 if they are not, and 2 for input that cannot be compared.
"""

import contextlib
import copy
import inspect
import itertools
import runpy
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import trl
from transformers import TrainerCallback, set_seed
from transformers.utils import logging

import trl_fsdp_qlora as this_package

from ...compat.trl import joined_images
from ...prefix_sharing.dropout import draws
from ...prefix_sharing.sharing import causal_language_model
from ...trainers.methods import METHODS, Method
from ...trainers.run.input_checks import language_model_only
from ...trainers.run.startup import StartupCallback
from ...trainers.step.groups import micro_batches
from ...utils.resources import resource_folder
from ...utils.threads import fit_threads
from ..recipe import script as script_frame
from ..run import terminal
from ..run.one_line import OneLineParser
from .scripts import method_of, with_recipe

STOCK, OURS = "stock TRL", "this package"
PHASES = ("scoring", "loss and backward")
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
# In float32 the two add the same numbers in another order. Losses are sums of advantages that cancel to about zero on
# new completions, so their difference is divided by the mean |advantage|; that of the gradients is divided by their
# norm, as in the trainer's tests. In half precision single tokens differ by hundredths of a nat from run to run.
LIMITS = {"float32": (1e-5, 1e-4), "half precision": (0.05, 0.25)}


def compare(words: list[str]) -> int:
    """Compare and print; returns the exit status."""
    if {"--help", "-h"} & set(words):
        print(__doc__)
        return 0
    warnings.simplefilter("ignore")  # the libraries warn about each other
    terminal.no_bars_in_files()
    logging.set_verbosity_error()
    parser = OneLineParser("trl-fsdp-qlora compare")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trainer", choices=COMPARED)
    options, rest = parser.parse_known_args(words)
    if options.steps < 1:
        parser.error(f"--steps {options.steps} is not a number of steps; try 3")
    rest = with_recipe(rest)
    method = COMPARED[options.trainer] if options.trainer else method_of(rest, tuple(COMPARED.values()))
    with tempfile.TemporaryDirectory() as folder:
        trainers = _trainers(method, [*rest, *_QUIET, f"--output_dir={folder}/run"])
        _, *done = _steps(trainers, options.steps)
    for phase in PHASES:
        if (OURS, phase) in done[0].seconds:
            stock, ours = (statistics.median(step.seconds[who, phase] for step in done) for who in (STOCK, OURS))
            print(f"{phase}: {stock:.4f} s and {ours:.4f} s ({stock / ours:.2f}×)")
    fractions = [step.tokens_fraction for step in done if step.tokens_fraction is not None]
    if fractions:
        print(f"tokens computed by this package's passes: {statistics.mean(fractions):.1%} of the padded ones")
    print(f"medians of {len(done)}, stock TRL first; {_sharing(trainers[OURS]).describe()}")
    equal, line = verdict(done, _precision(trainers[OURS]))
    print(line)
    return 0 if equal else 1


@dataclass
class Step:
    """A step of both trainers: by trainer, and by trainer and phase."""

    losses: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)  # of the gradients, and of their difference
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    advantage: float = 0.0  # mean |advantage|
    advantages_apart: float = 0.0  # largest difference of one completion's advantage
    tokens_fraction: float | None = None  # tokens of our passes over padded tokens

    @property
    def apart(self) -> tuple[float, float]:
        """(difference of the losses over the mean |advantage| or stock's loss, of the gradients over stock's norm)."""
        scale = max(abs(self.losses[STOCK]), self.advantage, 1e-30)
        loss = abs(self.losses[OURS] - self.losses[STOCK]) / scale
        return loss, self.norms["difference"] / max(self.norms[STOCK], 1e-30)

    def line(self, number: int) -> str:
        loss, gradient = self.apart
        return (
            f"step {number}: losses {self.losses[STOCK]:.6e} and {self.losses[OURS]:.6e} ({loss:.1e} apart), "
            f"gradient norms {self.norms[STOCK]:.6e} and {self.norms[OURS]:.6e} (difference {gradient:.1e})"
        )


def verdict(steps: list[Step], precision: str) -> tuple[bool, str]:
    """(whether both are equal within rounding, a line with the result and the allowed difference)."""
    loss_limit, gradient_limit = LIMITS[precision]

    def is_equal(step: Step) -> bool:
        loss, gradient = step.apart
        # NaN is not equal: every comparison with it is false.
        return loss <= loss_limit and gradient <= gradient_limit and step.advantages_apart <= loss_limit

    equal = all(map(is_equal, steps))
    result = "equal" if equal else "DIFFERENT"
    return equal, (
        f"{result} ({precision}): losses may be {loss_limit:.0e} of the mean |advantage| or of the loss apart, "
        f"gradients {gradient_limit:.0e} of their norm"
    )


def _precision(ours: Any) -> str:
    """The name in [`LIMITS`] of the precision in which a trainer's model computes."""
    has_half_weights = any(p.dtype in (torch.bfloat16, torch.float16) for p in ours.model.parameters())
    computes_in_half = ours.args.tf32 or ours.accelerator.mixed_precision != "no"
    return "half precision" if computes_in_half or has_half_weights else "float32"


def _sharing(trainer: Any) -> Any:
    """The prompt sharing of a trainer's model."""
    return causal_language_model(trainer.model).prompt_sharing


class _Built(BaseException):
    """Ends a recipe's script when it builds its trainer; no `except Exception` on the way stops it."""


def drawn_rewards(completions: list, **_columns: Any) -> list[float]:
    """The same rewards in every call, so that no group is without a difference to learn from."""
    return torch.randn(len(completions), generator=torch.Generator().manual_seed(0)).tolist()


def _arguments(method: Method, words: list[str]) -> dict[str, Any]:
    """The arguments, by name, with which the script of `method` builds its trainer for the recipe in `words`."""
    signature = inspect.signature(getattr(trl, f"{method.stock}Trainer"))
    script = str(resource_folder("recipes") / f"{method.room}.py")

    def stop(_self: Any, *args: Any, **kwargs: Any) -> None:
        raise _Built(signature.bind(*args, **kwargs).arguments)

    with (
        patch.object(sys, "argv", [script, *words]),
        patch.object(script_frame, "run_main", lambda main, *args, **kwargs: main(*args, **kwargs)),
        patch.object(getattr(this_package, method.trainer), "__init__", stop),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except _Built as built:
            arguments = built.args[0]
    if "reward_funcs" in arguments:
        arguments["reward_funcs"] = drawn_rewards
    config = arguments["args"]
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
    # Stock TRL's `all-linear` adapts a vision tower, too; here both train the same weights.
    revision = (arguments["args"].model_init_kwargs or {}).get("revision")
    of_stock = {
        "args": copy.deepcopy(arguments["args"]),
        "processing_class": copy.deepcopy(arguments.get("processing_class")),
        "peft_config": language_model_only(arguments.get("peft_config"), arguments["model"], revision),
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
        trainer.model.train()
        dropouts = draws(trainer.model)
        for _, module, attribute, _ in dropouts:
            setattr(module, attribute, 0.0)
    if dropouts:
        print("dropout is off here: each trainer would draw masks of its own", flush=True)
    fit_threads(trainers[OURS].model)
    return trainers


def _steps(trainers: dict[str, Any], steps: int) -> Iterator[Step]:
    """A step that warms up, then `steps` more. Both trainers begin each step with the same weights; ours updates."""
    ours = trainers[OURS]
    args = ours.args
    endless = itertools.chain.from_iterable(itertools.repeat(ours.get_train_dataloader()))
    for i in range(steps + 1):
        step = Step()
        weights = _trainable(ours)
        with torch.no_grad():
            for name, weight in _trainable(trainers[STOCK]).items():
                weight.copy_(weights[name])
        order = [STOCK, OURS] if i % 2 else [OURS, STOCK]
        if hasattr(ours, "num_generations"):
            # The sampler yields the prompts of a generation batch once for every time that the batch is used.
            rows, *_ = itertools.islice(endless, args.steps_per_generation * ours.num_iterations)
            parts = _completions(trainers, rows, step, order)
        else:
            batches = list(itertools.islice(endless, args.gradient_accumulation_steps))
            parts = {who: copy.deepcopy(batches) for who in order}
        for who in order:
            trainer = trainers[who]
            set_seed(args.seed)
            trainer.optimizer.zero_grad()
            with (
                patch.object(trainer, "_prepare_inputs", lambda part: part),
                _measured(trainer, step, who, "loss and backward"),
            ):
                losses = [trainer.training_step(trainer.model_wrapped, part, None) for part in parts[who]]
            step.losses[who] = sum(losses).item()
        figures = _sharing(ours).figures
        if figures.tokens:  # of the last pass
            step.tokens_fraction = figures.tokens / figures.padded_tokens
        step.norms = _gradient_norms(trainers)
        print(step.line(i) if i else "warmed up on one step, which does not count", flush=True)
        if i:
            ours.optimizer.step()
            ours.lr_scheduler.step()
        yield step


def _completions(trainers: dict[str, Any], rows: list, step: Step, order: list[str]) -> dict[str, list]:
    """Each trainer's micro-batches of the same completions for the prompts of `rows`."""
    ours = trainers[OURS]
    generate = ours._generate
    generated = []
    scored = {}

    def generate_once(*args: Any, **kwargs: Any) -> Any:
        if not generated:
            generated.append(generate(*args, **kwargs))
        return copy.deepcopy(generated[0])

    with patch.object(ours, "_generate", generate_once):
        ours._generate_and_score_completions(copy.deepcopy(rows))
    for who in order:
        with patch.object(trainers[who], "_generate", generate_once), _measured(trainers[who], step, who, "scoring"):
            scored[who] = trainers[who]._generate_and_score_completions(copy.deepcopy(rows))
    advantages = {who: batch["advantages"] for who, batch in scored.items()}
    step.advantages_apart = (advantages[OURS] - advantages[STOCK]).abs().max().item()
    step.advantage = advantages[STOCK].abs().mean().item()
    parts = {}
    for who in order:
        torch.manual_seed(ours.args.seed)
        slices = micro_batches(scored[who], ours.num_generations, 0, ours.args.steps_per_generation)
        parts[who] = [joined_images(copy.copy(part)) for part in slices[: ours.args.gradient_accumulation_steps]]
    return parts


@contextlib.contextmanager
def _measured(trainer: Any, step: Step, who: str, phase: str) -> Iterator[None]:
    """Add the seconds of `trainer` inside the block to `step`."""
    on_gpu = trainer.accelerator.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    yield
    if on_gpu:
        torch.cuda.synchronize()
    step.seconds[who, phase] = time.perf_counter() - start


def _trainable(trainer: Any) -> dict[str, Any]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _gradient_norms(trainers: dict[str, Any]) -> dict[str, float]:
    """The norm of each trainer's gradient and of their difference."""
    gradients = {}
    for who, trainer in trainers.items():
        scale = 1.0 if trainer.accelerator.scaler is None else trainer.accelerator.scaler.get_scale()
        parameters = (parameter for _, parameter in sorted(_trainable(trainer).items()))
        scaled = (torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
        gradients[who] = [gradient.cpu().double() / scale for gradient in scaled]
    gradients["difference"] = [a - b for a, b in zip(gradients[OURS], gradients[STOCK], strict=True)]
    return {who: sum(x.square().sum().item() for x in tensors) ** 0.5 for who, tensors in gradients.items()}
