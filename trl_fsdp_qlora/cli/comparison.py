"""Stock TRL's trainer and this package's on the same completions: the measuring behind `trl-fsdp-qlora compare`."""

import contextlib
import copy
import ctypes
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig

from .. import EfficientGRPOTrainer
from ..grpo.groups import micro_batches
from ..prefix_sharing.dropout import draws
from ..recipe.arguments import ScriptArguments
from ..recipe.building import model_arguments, refusals_in_a_line
from ..recipe.runner import build_trainer, reward_functions
from ..telemetry.phases import PeakMemory
from ..telemetry.startup import StartupCallback

SEED_OF_ADVANTAGES = 0
STOCK, OURS = "stock TRL", "this package"
PHASES = ("scoring", "loss and backward")
_HALF = (torch.bfloat16, torch.float16)


class Turn(NamedTuple):
    """One trainer's part of a step."""

    loss: float
    gradient_norm: float
    seconds: dict[str, float]  # by phase
    peak_bytes: dict[str, int]  # by phase: above what lay in memory when it began


class Step(NamedTuple):
    """A step of both trainers."""

    turns: dict[str, Turn]
    gradient_difference: float  # norm of the difference of the gradients
    largest_difference: float  # of one entry of the gradients
    advantage_difference: float  # largest, of one completion
    advantage_size: float  # mean |advantage|
    completions: int
    dead: int  # completions with zero advantage
    drawn_advantages: bool  # drawn from a fixed seed, since every group was dead


class Result(NamedTuple):
    """All steps, and what they were measured on."""

    steps: list[Step]
    half: bool  # something was computed with fewer bits than float32 has
    cuda: bool
    bytes_known: bool
    sharing: str  # what prefix sharing says of itself


class _Ready(Exception):
    """A trainer is where its first step would begin."""


class _StopBeforeFirstStep(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        raise _Ready


def _prepared(trainer: Any) -> Any:
    """`trainer` as `train` makes it ready: on its device, under autocast, with checkpointing and optimizer."""
    trainer.remove_callback(StartupCallback)
    trainer.add_callback(_StopBeforeFirstStep)
    with contextlib.suppress(_Ready):
        trainer.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.train()
    return trainer


def switch_dropout_off(model: torch.nn.Module) -> int:
    """Switch dropout off in `model`, in place; returns in how many places it was on."""
    found = draws(model)
    for draw in found:
        setattr(draw.module, draw.attribute, 0.0)
    return len(found)


def _trainers(script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset) -> dict[str, Any]:
    """Both trainers with weights of their own, ready for a first step."""
    stock_config = copy.deepcopy(config)
    stock_config.__class__ = GRPOConfig  # what it holds beside TRL's fields is not read there
    ours = build_trainer(EfficientGRPOTrainer, script, config, model, train)
    with refusals_in_a_line():
        given = model_arguments(stock_config, model)
        stock = GRPOTrainer(model.model_name_or_path, reward_functions(script), stock_config, train, **given)
    trainers = {STOCK: _prepared(stock), OURS: _prepared(ours)}
    if sum(switch_dropout_off(trainer.model) for trainer in trainers.values()):
        print("the model's dropout is off in both: each would draw masks of its own", flush=True)
    return trainers


def _give_memory_back() -> None:
    """Hand what the process has freed to the system, so that a phase's peak is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


class _Meter:
    """Seconds, and bytes above what lay in memory, of what a trainer does."""

    def __init__(self, trainer: Any):
        self.memory = PeakMemory(trainer.accelerator.device)
        self.clock = getattr(trainer, "clock", None)
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def run(self, phase: str, work: Callable[[], Any]) -> Any:
        """`work()`, measured as `phase`."""
        _give_memory_back()
        self._wait()
        if self.clock is not None:
            self.clock.drain()
        self.memory.reset()
        before, start = self.memory.read(), time.perf_counter()
        done = work()
        self._wait()
        self.seconds[phase] = time.perf_counter() - start
        # This package's clock resets the same peak between its phases, and keeps each.
        kept = self.clock.peak.values() if self.clock is not None else ()
        self.peaks[phase] = max(self.memory.read(), *kept, before) - before
        return done

    def _wait(self) -> None:
        if self.memory.cuda:
            torch.cuda.synchronize(self.memory.device)


class _Completions:
    """Completions and rewards as the one trainer drew them, handed to whoever scores them."""

    def __init__(self, trainer: Any, rows: list[dict]):
        self.rows, self.turns, self.rewards = rows, [], []
        with self._instead(trainer, self._keeping(trainer)):
            trainer._generate_and_score_completions(copy.deepcopy(rows))

    def _keeping(self, trainer: Any) -> dict[str, Callable]:
        def keep(function: Callable, where: list) -> Callable:
            def run(*args, **kwargs):
                where.append(function(*args, **kwargs))
                return copy.deepcopy(where[-1])

            return run

        return {
            "_generate_single_turn": keep(trainer._generate_single_turn, self.turns),
            "_calculate_rewards": keep(trainer._calculate_rewards, self.rewards),
        }

    @staticmethod
    @contextlib.contextmanager
    def _instead(trainer: Any, functions: dict[str, Callable]) -> Iterator[None]:
        vars(trainer).update(functions)
        try:
            yield
        finally:
            for name in functions:
                delattr(trainer, name)

    def scored_by(self, trainer: Any) -> dict:
        """The generation batch that `trainer` makes of them: masks, advantages, old and reference log-probabilities."""
        turns, rewards = iter(copy.deepcopy(self.turns)), iter(copy.deepcopy(self.rewards))
        replay = {
            "_generate_single_turn": lambda *args, **kwargs: next(turns),
            "_calculate_rewards": lambda *args, **kwargs: next(rewards),
        }
        with self._instead(trainer, replay):
            return trainer._generate_and_score_completions(copy.deepcopy(self.rows))


def _one_step(trainer: Any, parts: list[dict]) -> float:
    """The loss of an optimizer step over micro-batches; leaves the gradients where they are."""
    trainer.optimizer.zero_grad()
    waiting = iter([copy.copy(part) for part in parts])
    trainer._prepare_inputs = lambda batch: next(waiting)
    try:
        return sum(trainer.training_step(trainer.model_wrapped, {}, None) for _ in parts).item()
    finally:
        del trainer._prepare_inputs


def _trainable(trainer: Any) -> dict[str, torch.nn.Parameter]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _same_weights(trainers: dict[str, Any]) -> None:
    ours, stock = _trainable(trainers[OURS]), _trainable(trainers[STOCK])
    if ours.keys() != stock.keys():
        raise RuntimeError(f"the two trainers train other weights: {sorted(ours.keys() ^ stock.keys())[:4]}")
    with torch.no_grad():
        for name, weight in stock.items():
            weight.copy_(ours[name])


def _gradients(trainers: dict[str, Any]) -> tuple[dict[str, float], float, float]:
    """(norm of each, norm of their difference, its largest entry), in float64."""
    squares = dict.fromkeys((STOCK, OURS, "difference"), 0.0)
    largest = 0.0
    scale = {name: trainer.accelerator.scaler for name, trainer in trainers.items()}
    scale = {name: 1.0 if scaler is None else scaler.get_scale() for name, scaler in scale.items()}
    ours = _trainable(trainers[OURS])
    for name, weight in _trainable(trainers[STOCK]).items():
        pair = {STOCK: weight, OURS: ours[name]}
        pair = {
            who: (torch.zeros_like(p) if p.grad is None else p.grad).double() / scale[who] for who, p in pair.items()
        }
        pair["difference"] = pair[OURS] - pair[STOCK]
        for who, gradient in pair.items():
            squares[who] += gradient.square().sum().item()
        entry = pair["difference"].abs().max().item()
        largest = entry if not entry <= largest else largest  # NaN stays
    norms = {who: square**0.5 for who, square in squares.items()}
    return norms, norms["difference"], largest


def _revived(batches: dict[str, dict]) -> bool:
    """Where no completion has an advantage, draw them from a fixed seed, the same for both; whether that was so."""
    if any(batch["advantages"].any() for batch in batches.values()):
        return False
    like = batches[STOCK]["advantages"]
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(SEED_OF_ADVANTAGES))
    for batch in batches.values():
        batch["advantages"] = drawn.to(like)
    return True


def _slices(trainer: Any, batch: dict) -> list[dict]:
    """The micro-batches of the first optimizer step on a generation batch, the same rows for both trainers."""
    torch.manual_seed(trainer.args.seed)
    parts = micro_batches(batch, trainer.num_generations, 0, trainer.args.steps_per_generation)
    return parts[: trainer.args.gradient_accumulation_steps]


def _step(trainers: dict[str, Any], order: list[str], rows: list[dict]) -> Step:
    """Both trainers' losses and gradients on completions that this package draws."""
    completions = _Completions(trainers[OURS], rows)
    meters = {name: _Meter(trainer) for name, trainer in trainers.items()}
    batches = {}
    for name in order:
        batches[name] = meters[name].run("scoring", lambda name=name: completions.scored_by(trainers[name]))
    advantages = {name: batch["advantages"] for name, batch in batches.items()}
    apart = (advantages[OURS] - advantages[STOCK]).abs().max().item()
    revived = _revived(batches)
    losses = {}
    for name in order:
        parts = _slices(trainers[name], batches[name])
        work = meters[name].run
        losses[name] = work("loss and backward", lambda name=name, parts=parts: _one_step(trainers[name], parts))
    norms, difference, largest = _gradients(trainers)
    learnt = batches[STOCK]["advantages"]
    turns = {name: Turn(losses[name], norms[name], meters[name].seconds, meters[name].peaks) for name in trainers}
    dead = int((learnt == 0).sum()) if not revived else len(learnt)
    size = learnt.abs().mean().item()
    return Step(turns, difference, largest, apart, size, len(learnt), dead, revived)


def _steps(trainers: dict[str, Any], steps: int) -> list[Step]:
    """`steps` steps after one that warms up."""
    args, loader = trainers[OURS].args, trainers[OURS].get_train_dataloader()
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    # The sampler gives the prompts of a generation batch once for every time that it is used.
    rows = itertools.islice(endless, 0, None, args.steps_per_generation * args.num_iterations)
    done = []
    for i in range(steps + 1):
        _same_weights(trainers)
        order = [STOCK, OURS] if i % 2 else [OURS, STOCK]
        step = _step(trainers, order, next(rows))
        for trainer in trainers.values():
            trainer._metrics["train"].clear()
        if i == 0:
            print("warmed up on one step, which does not count", flush=True)
            continue
        done.append(step)
        print(_progress(i, steps, step), flush=True)
        trainers[OURS].optimizer.step()
        trainers[OURS].lr_scheduler.step()
    return done


def compared(script: ScriptArguments, config: Any, model: ModelConfig, train: Dataset, steps: int) -> Result:
    """A few steps of a recipe by both trainers.

    Every step begins with the same weights: this package's optimizer makes the step, and stock is given what came of it.
    One step is taken before them and not counted: this package checks itself on its first pass.

    Args:
        script, config, model: of the recipe.
        train: prompts.
        steps: how many.

    Raises:
        ConfigError: one of the trainers refuses the recipe.
    """
    trainers = _trainers(script, config, model, train)
    gc.freeze()  # what is there now stays: collecting before every phase need not look through it
    try:
        done = _steps(trainers, steps)
    finally:
        gc.unfreeze()
    ours = trainers[OURS]
    halves = any(p.dtype in _HALF for p in ours.model.parameters()) or ours.accelerator.mixed_precision != "no"
    memory = PeakMemory(ours.accelerator.device)
    sharing = ours.prefix_sharing.describe()
    return Result(done, halves or bool(ours.args.tf32), memory.cuda, memory.available, sharing)


def _progress(i: int, steps: int, step: Step) -> str:
    seconds = {name: sum(turn.seconds.values()) for name, turn in step.turns.items()}
    losses = ", ".join(f"{turn.loss:.6g}" for turn in step.turns.values())
    return f"step {i}/{steps}: losses {losses}; {seconds[STOCK]:.3f} s and {seconds[OURS]:.3f} s (stock, this package)"
