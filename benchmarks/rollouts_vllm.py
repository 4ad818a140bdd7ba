"""Rollouts with vLLM on SmolLM2-135M-Instruct and SVAMP: what a sync costs, what the pass that is not made saves, and the
whole step beside stock TRL with transformers' `generate`.

    VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 .venv-vllm/bin/python benchmarks/rollouts_vllm.py \
        --model DIR --data SVAMP.json [--part steps|curves] [--rounds 5] [--out FILE.json]

`steps`: three trainers in one process, LoRA r=16 on all linear layers, float32, `--prompts` prompts × 8 completions of
exactly `--completion` tokens: ours with vLLM, the same with TRL's pass for old log-probabilities, and stock TRL with `generate`
(stock's vLLM path does not run on a CPU). They take turns of one optimizer step, so that a drifting machine hits all alike;
printed are the ratios of every round. `curves`: `--steps` steps of a run with vLLM and of one with `generate` for each of
`--seeds`.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from drop_in import stepper
from peft import LoraConfig
from synthetic import logged
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.publishing.card import hardware, software
from trl_fsdp_qlora.recipe.datasets import read_problems, to_prompts
from trl_fsdp_qlora.recipe.rewards import exact_answer_reward
from trl_fsdp_qlora.run.manifest import write_json

TEMPLATE = "{question}\nThink step by step, then give the answer as a number after ####."


class CountSteps(TrainerCallback):
    """Steps outside `train` count too: a new adapter is sent only when they do. Keeps the seconds of each phase."""

    def __init__(self, trainer):
        self.trainer, self.phases = trainer, []

    def on_step_end(self, args, state, control, **kwargs):
        state.global_step += 1
        self.phases.append({name: value for name, value in logged(self.trainer).items() if name.startswith("time/")})


class TimedStock(GRPOTrainer):
    """Stock TRL with the seconds of each generation."""

    def __init__(self, *args, **kwargs):
        self.seconds = []
        super().__init__(*args, **kwargs)

    def _generate(self, prompts):
        started = time.perf_counter()
        try:
            return super()._generate(prompts)
        finally:
            self.seconds.append(time.perf_counter() - started)


class WithThePass(EfficientGRPOTrainer):
    """Ours, with the pass for old log-probabilities that TRL makes."""

    _weighs_in_loss = False


def partial_credit(completions, answer, **columns) -> list[float]:
    """1 for the right answer, else a little less for every character: groups differ, so that there is something to learn."""
    right = exact_answer_reward()(completions=completions, answer=answer, **columns)
    return [float(hit) - 1e-3 * len(text[0]["content"]) for hit, text in zip(right, completions, strict=True)]


def build(cls, config_cls, options, folder: str, seed: int = 0, exact_length: bool = True, **extra):
    torch.manual_seed(seed)
    vllm = extra.get("use_vllm", False)
    if exact_length:
        extra["generation_kwargs"] = {("min_tokens" if vllm else "min_new_tokens"): options.completion}
    if vllm:
        extra |= {"vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_gpu_memory_utilization": 0.3}
        extra |= {"vllm_importance_sampling_mode": "token_truncate"}
    return cls(
        AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        partial_credit,
        config_cls(
            output_dir=folder,
            per_device_train_batch_size=8 * options.prompts,
            num_generations=8,
            max_completion_length=options.completion,
            max_steps=options.steps,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            **extra,
        ),
        to_prompts(read_problems(options.data), template=TEMPLATE),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"),
    )


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def the_same(make):
    """`make`, which answers every call with what it made in the first."""
    made = []

    def once(**options):
        if not made:
            made.append(make(**options))
        return made[0]

    return once


def turns(options, folder: str) -> dict:
    # One engine serves both of ours: they differ in a pass, not in rollouts.
    import vllm

    vllm.LLM = the_same(vllm.LLM)
    made = {
        "ours": build(EfficientGRPOTrainer, EfficientGRPOConfig, options, folder, use_vllm=True),
        "stock_generate": build(TimedStock, GRPOConfig, options, folder),
    }
    made["with_the_pass"] = build(WithThePass, EfficientGRPOConfig, options, folder, use_vllm=True)
    made["with_the_pass"].vllm_generation.version = 10**6  # ids of its own in that engine
    stock_seconds = made["stock_generate"].seconds
    seconds, syncs, counters, run = {name: [] for name in made}, [], {}, {}
    for name, trainer in made.items():
        counters[name] = CountSteps(trainer)
        trainer.add_callback(counters[name])
        run[name] = stepper(trainer)
    for turn in run.values():
        turn(1)
    for i in range(options.rounds):
        names = list(made)[i % 3 :] + list(made)[: i % 3]
        for name in names:
            torch.manual_seed(i)
            seconds[name].append(run[name](1))
        syncs.append(dict(made["ours"].vllm_generation.last_sync))
    ours = seconds["ours"]
    return {
        "seconds_per_step": seconds,
        "stock_generate_seconds": stock_seconds[1:],
        "phases": {name: counter.phases[1:] for name, counter in counters.items() if name != "stock_generate"},
        "sync": syncs,
        "sync_seconds": spread([sync["seconds"] for sync in syncs]),
        "sync_share_of_a_step": spread([s["seconds"] / step for s, step in zip(syncs, ours, strict=True)]),
        "stock_over_ours": spread([a / b for a, b in zip(seconds["stock_generate"], ours, strict=True)]),
        "with_the_pass_over_ours": spread([a / b for a, b in zip(seconds["with_the_pass"], ours, strict=True)]),
    }


def curves(options, folder: str) -> dict:
    result = {}
    for seed in options.seeds:
        for name, use_vllm in (("vllm", True), ("generate", False)):
            trainer = build(
                EfficientGRPOTrainer, EfficientGRPOConfig, options, folder, seed, exact_length=False, use_vllm=use_vllm
            )
            trainer.train()
            history = [entry for entry in trainer.state.log_history if "loss" in entry]
            keys = ("loss", "reward", "rollout/logp_difference/mean", "rollout/staleness", "time/generate_s")
            result[f"{name}, seed {seed}"] = {key: [entry.get(key) for entry in history] for key in keys}
            del trainer
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--part", choices=["steps", "curves"], default="steps")
    parser.add_argument("--completion", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=2, help="per step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    with tempfile.TemporaryDirectory() as folder:
        measured = turns(options, folder) if options.part == "steps" else curves(options, folder)
    result = {
        "part": options.part,
        "prompts": options.prompts,
        "completion": options.completion,
        "threads": torch.get_num_threads(),
    }
    result |= {"hardware": hardware(), "software": software(), **measured}
    print(json.dumps({key: value for key, value in measured.items() if key != "phases"}, indent=2))
    if options.out:
        write_json(options.out, result)


if __name__ == "__main__":
    main()
