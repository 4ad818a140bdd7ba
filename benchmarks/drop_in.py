"""The drop-in against stock TRL on the same run: seconds of an optimizer step and peak memory.

    python benchmarks/drop_in.py [--prefix_sharing off|auto] [--rounds 7] [--out benchmarks/results/drop_in.json]

Both trainers live in one process, on copies of one model, with the same seed and data, and take turns of `--steps`
optimizer steps (A B B A ...), so that a drifting machine hits both alike. Printed: the ratio of every pair of turns, its
median and its range, and the peak resident set of each turn. With `--prefix_sharing off` nothing is switched on: what is
measured is what telemetry, guarded rewards and whole-group shuffling cost.
"""

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.checkpoints.disk import write_json
from trl_fsdp_qlora.publishing.card import hardware, software
from trl_fsdp_qlora.recipe.datasets import read_problems, to_prompts
from trl_fsdp_qlora.recipe.rewards import exact_answer_reward
from trl_fsdp_qlora.recipe.small_base import character_tokenizer, new_model
from trl_fsdp_qlora.telemetry.phases import MIB, PeakMemory


def build(cls, config_cls, model, folder: str, **extra):
    """A trainer of class `cls`: 8 prompts × 8 completions of 32 tokens per step, LoRA, fp32."""
    args = config_cls(
        output_dir=folder,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=32,
        max_steps=10**6,
        learning_rate=1e-6,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        num_train_epochs=1000,
        **extra,
    )
    problems = read_problems("addition")
    return cls(
        model,
        exact_answer_reward(),
        args,
        to_prompts(problems, template="add " * 24 + "{question}"),
        processing_class=character_tokenizer(),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )


def stepper(trainer):
    """A function that runs one turn of optimizer steps of `trainer` outside `train`, and returns its seconds."""
    trainer.remove_callback(PrinterCallback)
    trainer.create_optimizer_and_scheduler(10**6)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batches = iter(trainer.get_train_dataloader())
    handler, args, state, control = trainer.callback_handler, trainer.args, trainer.state, trainer.control

    def turn(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            handler.on_step_begin(args, state, control)
            trainer.training_step(trainer.model, next(batches), None)
            handler.on_pre_optimizer_step(args, state, control)
            trainer.optimizer.step()
            handler.on_optimizer_step(args, state, control)
            trainer.model.zero_grad()
            handler.on_step_end(args, state, control)
        seconds = time.perf_counter() - start
        trainer.log({})  # a trainer keeps its metrics until it logs them
        return seconds

    return turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix_sharing", default="off")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = new_model(character_tokenizer(), 0, hidden=128, layers=3)
    with tempfile.TemporaryDirectory() as folder:
        stock = build(GRPOTrainer, GRPOConfig, copy.deepcopy(model), folder)
        ours = build(EfficientGRPOTrainer, EfficientGRPOConfig, model, folder, prefix_sharing=options.prefix_sharing)
        turns = {"stock": stepper(stock), "drop_in": stepper(ours)}
        memory = PeakMemory(torch.device("cpu"))
        seconds = {name: [] for name in turns}
        peaks = {name: [] for name in turns}
        for turn in turns.values():
            turn(2)  # warm-up
        for i in range(options.rounds):
            for name in ("stock", "drop_in") if i % 2 == 0 else ("drop_in", "stock"):
                torch.manual_seed(i)
                memory.reset()
                ours.clock.peak.clear()
                seconds[name].append(turns[name](options.steps) / options.steps)
                # This package's clock resets the same peak between its phases, and keeps each.
                kept = ours.clock.peak.values() if name == "drop_in" else ()
                peaks[name].append(max([memory.read(), *kept]) / MIB)
    ratios = [ours / stock for ours, stock in zip(seconds["drop_in"], seconds["stock"], strict=True)]
    result = {
        "setting": "Qwen3-like hidden 128 x 3 layers, P about 104, C up to 32, G 8, 64 completions per step, LoRA, fp32",
        "prefix_sharing": options.prefix_sharing,
        "threads": options.threads,
        "hardware": hardware(),
        "software": software(),
        "seconds_per_step": seconds,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "peak_mib": {name: statistics.median(values) for name, values in peaks.items()},
    }
    print(json.dumps({k: v for k, v in result.items() if k != "seconds_per_step"}, indent=2))
    for name, values in seconds.items():
        print(f"{name:8} median {statistics.median(values):.4f} s per step")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, result)


if __name__ == "__main__":
    main()
