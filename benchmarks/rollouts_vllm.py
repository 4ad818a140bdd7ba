"""Rollouts with vLLM on SmolLM2-135M-Instruct and SVAMP: the whole step beside stock TRL, syncs, learning curves.

    VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 HF_HUB_OFFLINE=1 .venv-vllm/bin/python \
        benchmarks/rollouts_vllm.py --part steps --model DIR --data SVAMP.json [--rounds 5] [--out FOLDER]

LoRA r=16 on all linear layers, float32, `--prompts` prompts × 8 completions per step. Parts:

- `steps`: ours with vLLM and stock TRL with `generate` (stock's vLLM path does not run on a CPU), completions of up to
  `--completion` tokens, which end where they end. They take turns of one optimizer step, so that a drifting machine hits both alike. Then the engine's
  greedy tokens beside those of PEFT.
- `one_pass`: the same, ours with and without TRL's pass for old log-probabilities.
- `fsdp2`: two gloo ranks, the base sharded, an engine each: seconds and bytes of a sync. Wants two free cores.
- `curves`: `--steps` steps with vLLM and with `generate` for each of `--seeds`. A run that
  is in the file already is not made again.

Results go to `rollouts_vllm.json` in `--out` after every point, each part under its name, with a picture for `steps` and
`curves`. `--cpu_seconds` counts the seconds that this process computed, for a machine that is shared.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from drop_in import stepper
from peft import LoraConfig
from rollouts_vllm_pictures import draw_curves, draw_steps
from synthetic import logged
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.checkpoints.disk import write_json
from trl_fsdp_qlora.publishing.card import hardware, software
from trl_fsdp_qlora.recipe.datasets import read_problems, to_prompts
from trl_fsdp_qlora.recipe.rewards import exact_answer_reward
from trl_fsdp_qlora.rollout.completions import generate

TEMPLATE = "{question}\nThink step by step, then give the answer as a number after ####."
# What `accelerate launch` makes of accelerate_configs/fsdp2.yaml.
LAUNCH = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
# Seconds on the wall, or those that this process computed.
CLOCK = time.perf_counter


class Steps(TrainerCallback):
    """Counts steps outside `train`, too, because a new adapter is sent only when they do; keeps each step's metrics."""

    def __init__(self, trainer):
        self.trainer, self.metrics = trainer, []

    def on_step_end(self, args, state, control, **kwargs):
        state.global_step += 1
        self.metrics.append(logged(self.trainer))


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


def build(cls, config_cls, options, folder: str, seed: int = 0, **extra):
    torch.manual_seed(seed)
    vllm = extra.get("use_vllm", False)
    if vllm:
        extra |= {"vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_gpu_memory_utilization": 0.3}
        extra |= {"vllm_importance_sampling_mode": "token_truncate"}
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 8 * options.prompts,
        "num_generations": 8,
        "max_completion_length": options.completion,
        "max_steps": options.steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
        "model_init_kwargs": {"dtype": "float32"},
    }
    return cls(
        options.model,
        partial_credit,
        config_cls(**settings | extra),
        to_prompts(read_problems(options.data), template=TEMPLATE),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear"),
    )


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(over: list[float], under: list[float]) -> dict[str, float]:
    return spread([a / b for a, b in zip(over, under, strict=True)])


def share_one_engine() -> None:
    """Every trainer of this process gets the engine that the first one starts, and adapter ids that no other has used."""
    import vllm

    start, engines = vllm.LLM, []

    def shared(**settings):
        if not engines:
            engines.append(start(**settings))
        return engines[0]

    vllm.LLM = shared


class Results:
    """`rollouts_vllm.json`, written after every point; parts that are not run stay as they are."""

    def __init__(self, folder: Path | None, part: str, settings: dict):
        self.folder, self.part = folder, part
        self.all = {}
        if folder is not None and (path := folder / "rollouts_vllm.json").is_file():
            self.all = json.loads(path.read_text(encoding="utf-8"))
        settings |= {"hardware": hardware(), "software": software()}
        before = self.all.get(part, {})
        self.kept = before if before.get("settings") == settings else {}
        self.all[part] = {"settings": settings}

    def write(self, **figures) -> None:
        self.all[self.part] |= figures
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_json(self.folder / "rollouts_vllm.json", self.all)

    def draw(self, picture) -> None:
        if self.folder is not None:
            picture(self.all[self.part]).savefig(
                self.folder / f"rollouts_vllm_{self.part}.png", dpi=110, bbox_inches="tight"
            )


def turns(options, made: dict, results: Results, summarize) -> None:
    """Rounds of one optimizer step of each trainer in `made`, in alternating order, behind one that warms up."""
    counters, run, seconds, syncs = {}, {}, {name: [] for name in made}, []
    for i, (name, trainer) in enumerate(made.items()):
        counters[name] = Steps(trainer)
        trainer.add_callback(counters[name])
        run[name] = stepper(trainer)
        if trainer.use_vllm:
            trainer.vllm_generation.version = i * 10**6  # ids of its own in the engine
    for turn in run.values():
        turn(1)
    for i in range(options.rounds):
        for name in list(made) if i % 2 == 0 else list(made)[::-1]:
            torch.manual_seed(i)
            started = CLOCK()
            run[name](1)
            seconds[name].append(CLOCK() - started)
        syncs.append(dict(made["ours"].vllm_generation.last_sync))
        figures = {
            "seconds": seconds,
            "metrics": {name: counter.metrics[1:] for name, counter in counters.items()},
            "sync": syncs,
            "sync_seconds": spread([sync["seconds"] for sync in syncs]),
            "sync_share_of_a_step": ratios([sync["seconds"] for sync in syncs], seconds["ours"]),
        }
        results.write(**figures, **summarize(seconds))
        print(f"round {i}:", {name: round(values[-1], 2) for name, values in seconds.items()}, syncs[-1], flush=True)


def whole_steps(options, folder: str, results: Results) -> None:
    made = {
        "ours": build(EfficientGRPOTrainer, EfficientGRPOConfig, options, folder, use_vllm=True),
        "stock": build(TimedStock, GRPOConfig, options, folder),
    }

    def summarize(seconds):
        generating = made["stock"].seconds[1:]
        return {"stock_generate_seconds": generating, "stock_over_ours": ratios(seconds["stock"], seconds["ours"])}

    turns(options, made, results, summarize)
    results.write(greedy=greedy(made["ours"]))
    results.draw(draw_steps)


def one_pass(options, folder: str, results: Results) -> None:
    share_one_engine()
    made = {"ours": build(EfficientGRPOTrainer, EfficientGRPOConfig, options, folder, use_vllm=True)}
    made["with_the_pass"] = build(WithThePass, EfficientGRPOConfig, options, folder, use_vllm=True)
    turns(
        options,
        made,
        results,
        lambda seconds: {"with_the_pass_over_ours": ratios(seconds["with_the_pass"], seconds["ours"])},
    )


@torch.no_grad()
def greedy(trainer, prompts: int = 8, tokens: int = 64) -> dict:
    """Greedy completions of the engine and of PEFT under the adapter as it is now; where they part, how near a tie was."""
    tokenizer = trainer.processing_class
    policy = trainer.accelerator.unwrap_model(trainer.model).eval()
    rows = trainer.train_dataset.select(range(prompts))
    options = {"add_generation_prompt": True, "return_dict": False}
    ids = [tokenizer.apply_chat_template(row["prompt"], **options) for row in rows]
    ends = [tokenizer.eos_token_id]
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
    with trainer.generating() as (engine, _):
        drawn = generate(engine, ids, config)
    margins = []
    for prompt, mine, theirs in zip(ids, drawn, generate(policy, ids, config), strict=True):
        if list(mine) != list(theirs):
            first = next(i for i, pair in enumerate(itertools.zip_longest(mine, theirs)) if len(set(pair)) > 1)
            best = policy(torch.tensor([[*prompt, *mine[:first]]])).logits[0, -1].topk(2).values
            margins.append((best[0] - best[1]).item())
    figures = {"completions": prompts, "tokens": sum(map(len, drawn)), "parted": len(margins), "margins": margins}
    print("greedy:", figures)
    return figures


def curves(options, folder: str, results: Results) -> None:
    share_one_engine()
    runs = results.kept.get("runs", {})
    for i, seed in enumerate(options.seeds):
        for name, use_vllm in (("vllm", True), ("generate", False)):
            label = f"{name}, seed {seed}"
            if label in runs:
                continue
            trainer = build(EfficientGRPOTrainer, EfficientGRPOConfig, options, folder, seed, use_vllm=use_vllm)
            if use_vllm:
                trainer.vllm_generation.version = i * 10**6
            trainer.train()
            history = [entry for entry in trainer.state.log_history if "loss" in entry]
            keys = ("loss", "reward", "sampling/sampling_logp_difference/mean", "completions/mean_length")
            runs[label] = {key: [entry.get(key) for entry in history] for key in keys}
            results.write(runs=runs)
            print(label, [round(reward, 3) for reward in runs[label]["reward"]], flush=True)
            del trainer
    results.write(runs=runs, compared={key: compared(runs, key) for key in ("loss", "reward")})
    results.draw(draw_curves)


def compared(runs: dict, key: str) -> dict:
    """Means of each run over its steps, and how often a split of the runs by chance has means as far apart."""
    means = {name: statistics.mean(run[key]) for name, run in runs.items()}
    values, ours = list(means.values()), [value for name, value in means.items() if name.startswith("vllm")]

    def apart(chosen) -> float:
        rest = (sum(values) - sum(chosen)) / (len(values) - len(chosen))
        return abs(statistics.mean(chosen) - rest)

    splits = [apart(chosen) for chosen in itertools.combinations(values, len(ours))]
    return {"means": means, "p": sum(split >= apart(ours) - 1e-12 for split in splits) / len(splits)}


def fsdp2(options, folder: str, results: Results) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*torchrun, *sys.argv, "--worker", folder], env={**os.environ, **LAUNCH}, check=True)
    figures = json.loads(Path(folder, "rank0.json").read_text(encoding="utf-8"))
    results.write(**figures)
    print(json.dumps({name: figures[name] for name in ("sync_seconds", "sync_share_of_a_step", "sync_bytes")}))


def rank(options, folder: str) -> None:
    """One of two ranks: a short run with the base sharded and an engine of its own."""
    stock = AcceleratorState.__init__

    def sharding(self, *args, fsdp_plugin=None, **kwargs):  # on CPUs accelerate would make plain DDP of it
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = sharding
    options.steps = options.rounds + 1
    trainer = build(EfficientGRPOTrainer, EfficientGRPOConfig, options, folder, use_vllm=True)
    adapter = sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry][1:]
    syncs = [entry["time/weight_sync_s"] for entry in history]
    steps = [entry["step_time"] for entry in history]
    if trainer.accelerator.is_main_process:
        figures = {
            "sync_bytes": trainer.vllm_generation.last_sync["bytes"],
            "adapter_bytes": adapter,
            "sharded": all(hasattr(p, "placements") for p in trainer.model.parameters()),
            "sync_seconds": spread(syncs),
            "sync_share_of_a_step": ratios(syncs, steps),
            "metrics": history,
        }
        write_json(Path(folder, "rank0.json"), figures)
    trainer.accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


PARTS = {"steps": whole_steps, "one_pass": one_pass, "fsdp2": fsdp2, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--part", choices=PARTS, default="steps")
    parser.add_argument("--completion", type=int, default=96)
    parser.add_argument("--prompts", type=int, default=2, help="per step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument(
        "--cpu_seconds", action="store_true", help="of this process, with one thread: on a busy machine"
    )
    parser.add_argument("--out", type=Path, help="folder of the results; none are kept without")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    torch.set_num_threads(options.threads)
    if options.cpu_seconds:
        global CLOCK
        CLOCK = time.process_time
    if options.worker:
        rank(options, options.worker)
        return
    settings = {"prompts": options.prompts, "completion": options.completion, "threads": options.threads}
    if options.part == "curves":
        settings["steps"] = options.steps
    settings["seconds"] = "CPU" if options.cpu_seconds else "wall"
    with tempfile.TemporaryDirectory() as folder:
        PARTS[options.part](options, folder, Results(options.out, options.part, settings))


if __name__ == "__main__":
    main()
