"""CPU seconds of a recipe's rollouts: stock TRL's trainer and this package's, on the same prompts, by turns.

    python benchmarks/recipe_rollout.py --config recipes/SmolLM2-135M-Instruct/grpo/config_calculator.yaml \
        --model_name_or_path DIR_OR_HUB_ID

Every further option is a field of the recipe. Tools and environments are the recipe's, on both sides. Decoding is
greedy, so both draw the same completions, which is checked. Process CPU seconds of `GRPOTrainer._generate`, tools
included, are compared, so that other work on the machine counts little. With `--sampled` the completions are drawn as
in training. The two trainers then draw different ones, and the seconds are those of each trainer's own completions;
tokens are printed next to them.

What flatters us: greedy completions of one prompt are equal, so a later turn of a group is prefilled once. `--sampled`
has no such help.
"""

import argparse
import copy
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from synthetic import RESULTS, cpu_name
from trl import GRPOConfig, GRPOTrainer, ModelConfig

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments, parse_recipe
from trl_fsdp_qlora.tools.recipe.checks import check_recipe
from trl_fsdp_qlora.tools.recipe.problems import load_data
from trl_fsdp_qlora.tools.recipe.runner import (
    agent_arguments,
    build_trainer,
    model_arguments,
    reward_functions,
)

STOCK, OURS = "stock", "ours"


def make_trainers(words: list[str], sampled: bool) -> dict[str, GRPOTrainer]:
    """Stock TRL's trainer and this package's for the recipe that `words` name."""
    quiet = ["--skip_accuracy", "true", "--report_to", "none", "--output_dir", tempfile.mkdtemp()]
    script, config, model = parse_recipe((ScriptArguments, EfficientGRPOConfig, ModelConfig), [*words, *quiet])
    check_recipe(script, config, model)
    if not sampled:
        config.generation_kwargs = {**(config.generation_kwargs or {}), "do_sample": False}
    stock_config = copy.deepcopy(config)
    stock_config.__class__ = GRPOConfig  # stock TRL reads its own fields alone
    prompts, _ = load_data(script)
    ours = build_trainer(EfficientGRPOTrainer, script, config, model, prompts)
    arguments = model_arguments(stock_config, model)
    arguments.update(agent_arguments(GRPOTrainer, script, arguments["processing_class"]))
    stock = GRPOTrainer(model.model_name_or_path, reward_functions(script), stock_config, prompts, **arguments)
    for trainer in (stock, ours):
        trainer.model.train()
    return {STOCK: stock, OURS: ours}


@dataclass
class Drawn:
    """One rollout: its CPU seconds, prompts, completions, and which of the completions' tokens the model drew."""

    seconds: float
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None

    @property
    def tokens(self) -> int:
        """Number of tokens that the model drew, without the results of tools."""
        return sum(map(sum, self.tool_mask)) if self.tool_mask else sum(map(len, self.completion_ids))


def rollout(trainer: GRPOTrainer, rows: list[dict]) -> Drawn:
    """Draw and score completions of `rows`; only the drawing is measured."""
    generate = trainer._generate
    rollouts = []

    def measured(prompts):
        started = time.process_time()
        result = generate(prompts)
        rollouts.append(Drawn(time.process_time() - started, result[0], result[1], result[2]))
        return result

    trainer._generate = measured
    try:
        trainer._generate_and_score_completions(copy.deepcopy(rows))
    finally:
        trainer._generate = generate
    return rollouts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of rollouts, after one group that warms up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sampled", action="store_true", help="draw as in training, not greedily")
    parser.add_argument("--output", type=Path, default=RESULTS / "recipe_rollout.json")
    args, words = parser.parse_known_args()
    trainers = make_trainers(words, args.sampled)
    torch.set_num_threads(args.threads)
    endless = itertools.chain.from_iterable(itertools.repeat(trainers[OURS].get_train_dataloader()))
    each_batch = trainers[OURS].args.steps_per_generation * trainers[OURS].num_iterations
    seconds = {name: [] for name in trainers}
    tokens = {name: [] for name in trainers}
    for number in range(args.rounds + 1):
        # The sampler yields the prompts of a generation batch once for every time that the batch is used.
        rows, *_ = itertools.islice(endless, each_batch)
        rows = rows if number else rows[: trainers[OURS].num_generations]
        order = [STOCK, OURS] if number % 2 else [OURS, STOCK]
        drawn = {name: rollout(trainers[name], rows) for name in order}
        if not args.sampled and drawn[STOCK].completion_ids != drawn[OURS].completion_ids:
            pairs = list(zip(drawn[STOCK].completion_ids, drawn[OURS].completion_ids, strict=True))
            raise SystemExit(f"{sum(a != b for a, b in pairs)} of {len(pairs)} completions differ")
        if not number:
            continue
        for name in (STOCK, OURS):
            seconds[name].append(drawn[name].seconds)
            tokens[name].append(drawn[name].tokens)
        values = [f"{name} {drawn[name].seconds:.2f} s ({drawn[name].tokens} tokens)" for name in (STOCK, OURS)]
        print(f"round {number}: {', '.join(values)}", flush=True)
    ratios = [stock / ours for stock, ours in zip(seconds[STOCK], seconds[OURS], strict=True)]
    metrics = trainers[OURS]._metrics["train"]
    prefill = {name: metrics[f"generation/{name}"][-1] for name in ("prefill_tokens", "prefill_tokens_stock")}
    steps = {name: metrics[f"generation/{name}"][-1] for name in ("row_steps", "row_steps_stock")}
    longest = max(map(len, drawn[OURS].prompt_ids))
    print(
        f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) in CPU seconds; last rollout: "
        f"{len(drawn[OURS].prompt_ids)} rows, prompts of up to {longest} tokens, prefilled "
        f"{prefill['prefill_tokens']:.0f} of {prefill['prefill_tokens_stock']:.0f} tokens, "
        f"{steps['row_steps']:.0f} of {steps['row_steps_stock']:.0f} rows of decoding forwards"
    )
    folders = [word for word in words if os.path.isdir(word)]  # of one machine
    result = {
        "words": [os.path.basename(word) if word in folders else word for word in words],
        "sampled": args.sampled,
        "rounds": args.rounds,
        "threads": args.threads,
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "cpu_seconds": seconds,
        "drawn_tokens": tokens,
        **prefill,
        **steps,
        "speedup": statistics.median(ratios),
        "speedup_per_token": statistics.median(
            stock / ours * our_tokens / stock_tokens
            for stock, ours, stock_tokens, our_tokens in zip(
                seconds[STOCK], seconds[OURS], tokens[STOCK], tokens[OURS], strict=True
            )
        ),
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
