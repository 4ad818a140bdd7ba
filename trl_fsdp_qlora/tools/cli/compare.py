"""usage: trl-fsdp-qlora compare --config FILE.yaml [--trainer NAME] [--steps 3] [any field]

Takes a few steps of a recipe with stock TRL's trainer and with this package's, in one process, on the same prompts,
completions, rewards (or preference pairs) and weights. NAME is grpo, rloo or dpo; or kto, reward, cpo, orpo, tpo,
sdft, sdpo, distillation, online_dpo, gkd, gold or iw_opd, for which this package's is TRL's own after `share_prompts`.
Prints losses and gradients of both, seconds of scoring and of loss and backward, and how many of the padded tokens
this package computes. Without --trainer it is the one whose fields the recipe has, and GRPO if several would do.
Nothing is saved of the training, and the recipe's output_dir is left alone.
The exit status is 0 if both are equal within rounding, 1 if they are not, and 2 for input that cannot be compared.
"""

import contextlib
import copy
import inspect
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import trl
from datasets import Dataset
from transformers import TrainerCallback, set_seed
from transformers.utils import logging
from trl import ModelConfig

import trl_fsdp_qlora

from ...compat.trl import joined_images
from ...errors import UserError
from ...prefix_sharing.dropout import draws
from ...prefix_sharing.share import models_of, share_prompts
from ...prefix_sharing.sharing import PromptSharing, causal_language_model
from ...trainers.methods import METHODS
from ...trainers.run import terminal
from ...trainers.run.input_checks import language_model_only
from ...trainers.run.startup import StartupCallback
from ...trainers.step.groups import micro_batches
from ...utils.nonfatal import nonfatal
from ..planning.plan import changed, format_bytes, make_plan
from ..planning.plan_vs_actual import longest_prompt
from ..planning.settings import from_config
from ..recipe.arguments import ScriptArguments, parse_recipe
from ..recipe.checks import check_recipe, check_teacher
from ..recipe.episodes import agent_of
from ..recipe.pairs import DPOScriptArguments, PairScriptArguments, must_be_made, read_pairs
from ..recipe.privileged import SDFTScriptArguments, privileged_prompts
from ..recipe.problems import load_data
from ..recipe.runner import (
    accepted_arguments,
    agent_arguments,
    build_trainer,
    model_arguments,
    reward_functions,
)
from ..recipe.threads import fit_threads
from .one_line import pop_options
from .recipes import all_recipes
from .scripts import LAUNCHER, config_of, have_all_fields, script_of, with_recipe

STOCK, OURS = "stock TRL", "this package"
_PLANNED_PROMPTS = 64  # number of training prompts whose lengths are read
PHASES = ("scoring", "loss and backward")
WITH_DRAWS = "drawing, loss and backward"  # of a trainer whose `training_step` draws
IN_STEP = "training_step"


def _pairs(script: PairScriptArguments) -> Dataset:
    """Preference pairs."""
    if must_be_made(script.pairs):
        raise UserError(f"pairs={script.pairs}: no such file; `trl-fsdp-qlora dpo` with this recipe writes it")
    return read_pairs(script.pairs, script.dataset_split)


def _triples(script: PairScriptArguments) -> Dataset:
    """Preference pairs with a third answer."""
    pairs = _pairs(script)
    if "reference" not in pairs.column_names:
        raise UserError(f"pairs={script.pairs}: TPO trains on a third answer, too; add the column `reference`")
    return pairs


def _prompts(script: ScriptArguments) -> Dataset:
    return load_data(script)[0]


def _dialogues(script: ScriptArguments) -> Dataset:
    """`messages` that end in a problem's answer."""
    problems = _prompts(script).filter(lambda row: row.get("answer") is not None)
    if not len(problems):
        raise UserError(f"dataset={script.dataset}: no problem has an answer, with which a conversation would end")

    def dialogue(row: dict) -> dict:
        prompt = row["prompt"]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": [*asked, {"role": "assistant", "content": str(row["answer"])}]}

    return problems.map(dialogue, remove_columns=problems.column_names)


@dataclass(frozen=True)
class Compared:
    """Stock TRL's trainer and this package's, their configs, and the arguments of its recipes.

    If both are one class, this package's is that class after `share_prompts`. `data` reads the rows of a recipe.
    `makes_batch` is the method that draws completions and returns the batch of a step; it is empty for a trainer that
    takes its rows from the data alone, and `IN_STEP` for one that draws while it trains.
    """

    stock: type
    ours: type
    stock_config: type
    config: type
    script: type
    data: Callable[[Any], Dataset]
    makes_batch: str = ""


class TrlsOwn(NamedTuple):
    """A trainer that this package has no class for: where TRL has it, and what [`Compared`] needs."""

    module: str
    prefix: str
    script: type
    data: Callable[[Any], Dataset]
    makes_batch: str = ""


TRLS_OWN = {
    "kto": TrlsOwn("trl", "KTO", DPOScriptArguments, _pairs),
    "reward": TrlsOwn("trl", "Reward", DPOScriptArguments, _pairs),
    "cpo": TrlsOwn("trl.experimental.cpo", "CPO", PairScriptArguments, _pairs),
    "orpo": TrlsOwn("trl.experimental.orpo", "ORPO", PairScriptArguments, _pairs),
    "tpo": TrlsOwn("trl.experimental.tpo", "TPO", DPOScriptArguments, _triples),
    "sdft": TrlsOwn(
        "trl.experimental.sdft", "SDFT", SDFTScriptArguments, privileged_prompts, "_prepare_training_batch"
    ),
    "sdpo": TrlsOwn("trl.experimental.sdpo", "SDPO", ScriptArguments, _prompts, "_prepare_training_batch"),
    "distillation": TrlsOwn("trl", "Distillation", ScriptArguments, _prompts, "_generate_and_score_completions"),
    "online_dpo": TrlsOwn("trl.experimental.online_dpo", "OnlineDPO", ScriptArguments, _prompts, IN_STEP),
    "gkd": TrlsOwn("trl.experimental.gkd", "GKD", ScriptArguments, _dialogues, IN_STEP),
    "gold": TrlsOwn("trl.experimental.gold", "GOLD", ScriptArguments, _dialogues, IN_STEP),
    "iw_opd": TrlsOwn("trl.experimental.iw_opd", "IWOPD", ScriptArguments, _dialogues, IN_STEP),
}
LEFT_OUT = {"a2po": "before its first step it draws num_value_samples completions for each training prompt"}
COMPARED = (*(method.command for method in METHODS if method.stock), *TRLS_OWN)


def compared(name: str) -> Compared:
    """What is compared for a name in `COMPARED`; TRL's experimental trainers are imported only if they are named."""
    if name in TRLS_OWN:
        own = TRLS_OWN[name]
        trainer, config = attrgetter(f"{own.prefix}Trainer", f"{own.prefix}Config")(import_module(own.module))
        return Compared(trainer, trainer, config, config, *own[2:])
    method = next(method for method in METHODS if method.command == name)
    return Compared(
        getattr(trl, f"{method.stock}Trainer"),
        getattr(trl_fsdp_qlora, method.trainer),
        getattr(trl, f"{method.stock}Config"),
        config_of(method),
        script_of(method),
        _pairs if method.is_paired else _prompts,
        "" if method.is_paired else "_generate_and_score_completions",
    )


# Side effects of a run that a comparison does not need.
_QUIET = {
    "skip_accuracy": "true",
    "report_to": "none",
    "save_strategy": "no",
    "eval_strategy": "no",
    "load_best_model_at_end": "false",
    "push_to_hub": "false",
    "log_completions": "false",
    "disable_tqdm": "true",
}
# Settings that would make the two trainers differ by design: (field, value, why).
_LEVELLED = (
    ("token_selection", "all", "a subset of tokens is another objective, which stock TRL does not have"),
    ("dynamic_sampling", False, "it changes which prompts are trained on, which stock TRL cannot"),
    ("rollouts_ahead", 0, "stock TRL waits for its completions"),
    ("use_vllm", False, "completions come from transformers, and what is compared is the loss"),
    ("precompute_ref_log_probs", False, "both compute the reference in their steps, so that it is compared, too"),
    ("lora_dropout", 0.0, "each trainer would draw masks of its own"),
)
# In float32 the two add the same numbers in another order. Losses are sums of advantages that cancel to about zero on
# new completions, so their difference is divided by the mean |advantage|; that of divergences, which are about zero as
# long as a model is its own teacher, by at least [`SMALLEST_DIVERGENCE`]. That of the gradients is divided by their
# norm, as in the trainer's tests. In half precision single tokens differ by hundredths of a nat from run to run.
# A divergence is a difference of such numbers: with one thread and with two, stock TRL's first loss of SDFT was 0.099
# and 0.134 in bfloat16, where float32 has 0.116 (SmolLM2-135M).
LIMITS = {"float32": (1e-5, 1e-4), "half precision": (0.05, 0.25), "half precision, a divergence": (0.1, 0.5)}
SMALLEST_DIVERGENCE = {"float32": 0.1, "half precision, a divergence": 0.4}  # nats


def compare(words: list[str]) -> int:
    """Compare and print; returns the exit status."""
    if {"--help", "-h"} & set(words):
        print(__doc__)
        return 0
    warnings.simplefilter("ignore")  # the libraries warn about each other
    terminal.no_bars_in_files()
    logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        method, script, config, model, count = _parsed(words, folder)
        train = method.data(script)
        trainers = _trainers(method, script, config, model, train)
        if method.makes_batch and method.ours is not method.stock:
            _warn_of_padded_bytes(script, config, model, train, trainers[OURS].processing_class)
        done = []
        for number, step in enumerate(_steps(method, trainers, count)):
            print(step.line(number) if number else "warmed up on one step, which does not count", flush=True)
            if number:
                done.append(step)
    ours = trainers[OURS]
    for phase in (*PHASES, WITH_DRAWS):
        if (OURS, phase) not in done[0].seconds:
            continue
        stock_seconds = statistics.median(step.seconds[STOCK, phase] for step in done)
        our_seconds = statistics.median(step.seconds[OURS, phase] for step in done)
        print(f"{phase}: {stock_seconds:.4f} s and {our_seconds:.4f} s ({stock_seconds / our_seconds:.2f}×)")
    fractions = [step.tokens_fraction for step in done if step.tokens_fraction is not None]
    if fractions:
        which = "packed passes" if method.ours is method.stock else "policy passes"
        print(f"tokens computed by this package's {which}: {statistics.mean(fractions):.1%} of the padded ones")
    print(f"medians of {len(done)}, stock TRL first; {ours.sharing.describe()}")
    equal, line = verdict(done, _precision(ours))
    print(line)
    return 0 if equal else 1


def _parsed(words: list[str], folder: str) -> tuple[Compared, ScriptArguments, Any, ModelConfig, int]:
    """(method, script, config, model, steps) of a recipe that can be compared; prints what is levelled."""
    launcher, rest = pop_options(words, LAUNCHER)
    if launcher or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"compare runs in one process: leave {', '.join(launcher) or 'the launcher'} out. (Under FSDP2 stock "
            "TRL trains no 4-bit base: there is nothing to compare with.)"
        )
    options, rest = pop_options(rest, ("--steps", "--trainer"))
    steps = options.get("--steps", "3")
    if not steps.isdigit() or not int(steps):
        raise UserError(f"--steps {steps} is not a number of steps; try 3")
    rest = with_recipe(rest)
    if not rest:
        raise UserError("compare needs a recipe: --config FILE.yaml")
    name = trainer_of_recipe(rest, options.get("--trainer"))
    method = compared(name)
    known = {item.name for kind in (method.script, method.config) for item in fields(kind)}
    quiet = [f"--{name}={value}" for name, value in _QUIET.items() if name in known]
    words = [*rest, *quiet, "--output_dir", f"{folder}/run"]
    script, config, model = parse_recipe((method.script, method.config, ModelConfig), words)
    check_recipe(script, config, model)
    if name == "reward":
        model.lora_task_type = "SEQ_CLS"  # PEFT then trains the new head, too
    if "teacher_model" in inspect.signature(method.stock.__init__).parameters:
        check_teacher(config.teacher_model_name_or_path, config.teacher_model_init_kwargs)
    for name, value, why in _LEVELLED:
        holder = model if name == "lora_dropout" else config
        value_in_recipe = vars(holder).get(name, value)
        if value_in_recipe != value:
            setattr(holder, name, value)
            print(f"{name}: {value_in_recipe} is taken as {value} here: {why}", flush=True)
    return method, script, config, model, int(steps)


def trainer_of_recipe(words: list[str], trainer: str | None) -> str:
    """The name in `COMPARED` of the recipe in `words`.

    It is `trainer` if the user named one, and otherwise the one whose fields the recipe has.
    """
    path = pop_options(words, ("--config",))[0].get("--config")
    command = trainer or next((recipe.command for recipe in all_recipes() if path and recipe.path == Path(path)), None)
    if command is None:
        ours = (method.command for method in METHODS if have_all_fields(words, config_of(method), script_of(method)))
        # Their modules are imported only if no trainer of ours has the fields.
        trls = (name for name, own in TRLS_OWN.items() if have_all_fields(words, compared(name).config, own.script))
        command = next(itertools.chain(ours, trls), "grpo")
    if command not in COMPARED:
        why = f" ({LEFT_OUT[command]})" if command in LEFT_OUT else ""
        raise UserError(f"a recipe of {command} cannot be compared{why}: compare takes those of {', '.join(COMPARED)}")
    return command


@dataclass
class Step:
    """A step of both trainers: by trainer, and by trainer and phase."""

    losses: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)  # of the gradients, and of their difference
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    advantage: float = 0.0  # mean |advantage|
    advantages_apart: float = 0.0  # largest difference of one completion's advantage
    tokens_fraction: float | None = None  # tokens of our policy passes over padded tokens
    smallest_loss: float = 1e-30  # a smaller loss is a difference of larger numbers
    drawn: bool = False  # advantages are from a fixed seed, because the rewards of every group were all equal

    @property
    def apart(self) -> tuple[float, float]:
        """(difference of the losses over the mean |advantage| or stock's loss, of the gradients over stock's norm)."""
        loss = abs(self.losses[OURS] - self.losses[STOCK]) / max(
            abs(self.losses[STOCK]), self.advantage, self.smallest_loss
        )
        return loss, self.norms["difference"] / max(self.norms[STOCK], 1e-30)

    def line(self, number: int) -> str:
        loss, gradient = self.apart
        drawn = "; all rewards of every group are equal: advantages from a fixed seed" if self.drawn else ""
        return (
            f"step {number}: losses {self.losses[STOCK]:.6e} and {self.losses[OURS]:.6e} ({loss:.1e} apart), "
            f"gradient norms {self.norms[STOCK]:.6e} and {self.norms[OURS]:.6e} (difference {gradient:.1e}){drawn}"
        )


def _precision(ours: Any) -> str:
    """The name in [`LIMITS`] of the precision in which a trainer's models compute."""
    computes_in_half = ours.args.tf32 or ours.accelerator.mixed_precision != "no"
    parameters = (p for each in models_of(ours) for p in each.parameters())
    has_half_weights = any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters)
    # bitsandbytes computes 4-bit products without a gradient in bfloat16 on CPUs that have it, whatever is asked for.
    has_4_bit_teacher = any(vars(each).get("is_loaded_in_4bit") for each in models_of(ours)[1:])
    if not (computes_in_half or has_half_weights or has_4_bit_teacher):
        return "float32"
    return "half precision, a divergence" if "teacher_model" in vars(ours) else "half precision"


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


@nonfatal("the memory of stock TRL's passes")
def _warn_of_padded_bytes(script: Any, config: Any, model: ModelConfig, train: Any, tokenizer: Any) -> None:
    """Print a line if stock TRL's padded passes are planned to need more memory than there is.

    A recipe's micro-batch may be chosen for packed rows. Padded, it may need many times as much, and the system would
    then end the process without a word.
    """
    sample = train.select(range(min(_PLANNED_PROMPTS, len(train))))
    agent = agent_of(script, config.chat_template_kwargs)
    settings = from_config(config, model, prompt_tokens=longest_prompt(tokenizer, sample, model, agent))
    plan = make_plan(replace(settings, values=settings.values | {"prefix_sharing": "off"}))
    loss = "forward_backward"
    if plan.total(loss) <= plan.capacity:
        return
    rows = config.per_device_train_batch_size
    passes = config.gradient_accumulation_steps
    advice = "--gradient_checkpointing true needs less"
    for parts in range(2, rows + 1):
        if rows % parts:
            continue
        smaller = {"per_device_train_batch_size": rows // parts, "gradient_accumulation_steps": passes * parts}
        if changed(plan, **smaller).total(loss) <= plan.capacity:
            advice = " ".join(f"--{name} {value}" for name, value in smaller.items()) + " compares the same rows"
            break
    print(
        f"warning: stock TRL's padded passes of {rows} rows are planned to need {format_bytes(plan.total(loss))}, and "
        f"there are {format_bytes(plan.capacity)}: {advice}",
        flush=True,
    )


class _Ready(TrainerCallback, Exception):
    """Raises itself when a trainer's first step would begin."""

    def on_train_begin(self, args, state, control, **kwargs):
        raise self


def _trainers(method: Compared, script: Any, config: Any, model: Any, train: Any) -> dict[str, Any]:
    """Both trainers with weights of their own, prepared by `train` for a first step."""
    stock_config = copy.deepcopy(config)
    stock_config.__class__ = method.stock_config  # stock TRL reads its own fields alone
    if method.ours is method.stock:
        stock, ours = (_trls_own(method.stock, script, each, model, train) for each in (stock_config, config))
        share_prompts(ours)
        ours.sharing = causal_language_model(ours.model).prompt_sharing
    else:
        if method.makes_batch:
            ours = build_trainer(method.ours, script, config, model, train)
        else:
            arguments = model_arguments(config, model)
            ours = method.ours(model.model_name_or_path, args=config, train_dataset=train, **arguments)
            fit_threads(ours.model)
        arguments = model_arguments(stock_config, model, "images" in train.column_names)
        # Stock TRL's `all-linear` adapts a vision tower, too; here both train the same weights.
        peft_config = arguments["peft_config"]
        arguments["peft_config"] = language_model_only(peft_config, model.model_name_or_path, model.model_revision)
        if method.makes_batch:
            arguments["reward_funcs"] = reward_functions(script)
            arguments.update(agent_arguments(method.stock, script, arguments["processing_class"]))
        stock = method.stock(model.model_name_or_path, args=stock_config, train_dataset=train, **arguments)
    for trainer in (stock, ours):
        trainer.remove_callback(StartupCallback)
        trainer.add_callback(_Ready())
        with contextlib.suppress(_Ready):
            trainer.train()
        trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        trainer.model.train()
        for _, module, attribute, _ in draws(trainer.model):
            setattr(module, attribute, 0.0)  # each trainer would draw masks of its own
    return {STOCK: stock, OURS: ours}


def _trls_own(cls: type, script: Any, config: Any, model: ModelConfig, train: Any) -> Any:
    """A trainer of a class of `TRLS_OWN` for a recipe."""
    arguments = accepted_arguments(cls, config, model)
    accepted = inspect.signature(cls.__init__).parameters
    if "reward_funcs" in accepted:
        arguments["reward_funcs"] = reward_functions(script)
    if "teacher_model" in accepted:
        arguments["teacher_model"] = config.teacher_model_name_or_path
    trainer = cls(model.model_name_or_path, args=config, train_dataset=train, **arguments)
    fit_threads(trainer.model)
    return trainer


def _count_tokens(sharing: PromptSharing, tokens: Counter) -> None:
    """Let every call that `sharing` answers add its tokens to `tokens`, those that are computed and those padded."""

    def counting(answer: Callable) -> Callable:
        def count(*args, **kwargs):
            output = answer(*args, **kwargs)
            tokens.update(computed=sharing.figures.tokens, padded=sharing.figures.padded_tokens)
            return output

        return count

    sharing.score = counting(sharing.score)
    sharing.last_hidden_states = counting(sharing.last_hidden_states)


def _once(function: Callable) -> Callable:
    """Call `function` once; every further call returns a copy of the first result."""
    results = []

    def call(*args, **kwargs):
        if not results:
            results.append(function(*args, **kwargs))
        return copy.deepcopy(results[0])

    return call


def _steps(method: Compared, trainers: dict[str, Any], steps: int) -> Iterator[Step]:
    """A step that warms up, then `steps` more. Both trainers begin each step with the same weights; ours updates."""
    ours = trainers[OURS]
    args = ours.args
    endless = itertools.chain.from_iterable(itertools.repeat(ours.get_train_dataloader()))
    tokens = Counter()
    if method.ours is method.stock:
        for each in models_of(ours):
            _count_tokens(causal_language_model(each).prompt_sharing, tokens)
    for i in range(steps + 1):
        step = Step()
        if "teacher_model" in vars(ours):  # a divergence of two models that are alike cancels
            step.smallest_loss = SMALLEST_DIVERGENCE[_precision(ours)]
        weights = _trainable(ours)
        with torch.no_grad():
            for name, weight in _trainable(trainers[STOCK]).items():
                weight.copy_(weights[name])
        order = [STOCK, OURS] if i % 2 else [OURS, STOCK]
        if method.makes_batch not in ("", IN_STEP):
            # The sampler yields the prompts of a generation batch once for every time that the batch is used.
            uses = _slices(ours) * vars(ours).get("num_iterations", 1)
            rows, *_ = itertools.islice(endless, uses)
            parts = _completions(method.makes_batch, trainers, rows, step, order)
        else:
            batches = list(itertools.islice(endless, args.gradient_accumulation_steps))
            parts = {who: copy.deepcopy(batches) for who in order}
        tokens.clear()
        draws_in_step = method.makes_batch == IN_STEP
        for who in order:
            trainer = trainers[who]
            set_seed(args.seed)  # what a step draws is the same for both
            trainer.optimizer.zero_grad()
            prepare = trainer._prepare_inputs if draws_in_step else lambda part: part
            with (
                patch.object(trainer, "_prepare_inputs", prepare),
                _timed(trainer, step, who, WITH_DRAWS if draws_in_step else "loss and backward"),
            ):
                losses = [trainer.training_step(trainer.model_wrapped, part, None) for part in parts[who]]
            step.losses[who] = sum(losses).item()
            metrics = trainer._metrics["train"] if "_metrics" in vars(trainer) else {}
            fractions = metrics.get("prefix_sharing/policy/tokens_fraction")
            if fractions:
                step.tokens_fraction = statistics.mean(fractions)
            elif who == OURS and tokens["padded"]:
                step.tokens_fraction = tokens["computed"] / tokens["padded"]
            elif who == OURS and ours.sharing.figures.tokens:  # the reference's, of the same rows as the policy's
                step.tokens_fraction = ours.sharing.figures.tokens / ours.sharing.figures.padded_tokens
            metrics.clear()
        step.norms = _gradient_norms(trainers)
        if i:
            ours.optimizer.step()
            ours.lr_scheduler.step()
        yield step


def _slices(trainer: Any) -> int:
    """Micro-batches that a batch of completions is cut into."""
    return vars(trainer.args).get("steps_per_generation") or trainer.args.gradient_accumulation_steps


def _completions(
    makes_batch: str, trainers: dict[str, Any], rows: list, step: Step, order: list[str]
) -> dict[str, list]:
    """Each trainer's micro-batches of the same completions and rewards for the prompts of `rows`."""
    ours = trainers[OURS]
    scored = {}
    parts = {}
    names = (name for name in ("_generate", "_calculate_rewards") if hasattr(ours, name))
    drawn = {name: _once(getattr(ours, name)) for name in names}
    with patch.multiple(ours, **drawn):
        methodcaller(makes_batch, copy.deepcopy(rows))(ours)
    for who in order:
        with patch.multiple(trainers[who], **drawn), _timed(trainers[who], step, who, "scoring"):
            scored[who] = methodcaller(makes_batch, copy.deepcopy(rows))(trainers[who])
    if "advantages" in scored[OURS]:
        _compare_advantages(scored, step)
    for who in order:
        torch.manual_seed(ours.args.seed)
        slices = micro_batches(scored[who], vars(ours).get("num_generations", 1), 0, _slices(ours))
        parts[who] = [joined_images(copy.copy(part)) for part in slices[: ours.args.gradient_accumulation_steps]]
    return parts


def _compare_advantages(scored: dict[str, dict], step: Step) -> None:
    """Write the difference of both advantages into `step`; if all are zero, both get others, from a fixed seed."""
    advantages = {who: batch["advantages"] for who, batch in scored.items()}
    step.advantages_apart = (advantages[OURS] - advantages[STOCK]).abs().max().item()
    if not any(values.any() for values in advantages.values()):  # otherwise both policy gradients would be zero
        step.drawn = True
        fixed = torch.randn(advantages[STOCK].shape, generator=torch.Generator().manual_seed(0))
        for who, values in advantages.items():
            scored[who]["advantages"] = fixed.to(values)
    step.advantage = scored[STOCK]["advantages"].abs().mean().item()


@contextlib.contextmanager
def _timed(trainer: Any, step: Step, who: str, phase: str) -> Iterator[None]:
    """Add the seconds of `trainer` inside the block to `step`."""
    wait = torch.cuda.synchronize if trainer.accelerator.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    yield
    wait()
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
