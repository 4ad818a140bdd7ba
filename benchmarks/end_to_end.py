"""Whole optimizer steps of stock TRL and of this package, side by side, and generation alone.

    python benchmarks/end_to_end.py --setting svamp --model DIR --data SVAMP.json
    python benchmarks/end_to_end.py --setting gsm8k --model DIR --data gsm8k/train.jsonl --gradient_checkpointing
        --rows 8
    python benchmarks/end_to_end.py --setting svamp --generation_only ...

Both trainers live in one process, on the same weights, with the same seed, prompts and LoRA, and take turns of one
optimizer step (A B B A ...), so that a drifting machine hits both alike; the ratio of every pair of turns is kept.
Each generates its own completions, and is timed doing so. Then both take the loss of the same ones, those of the first
one. It prints the losses and the norms of the gradients of both: a first step on new completions has a loss of
about zero, the mean advantage. The reward differs for every completion, so none is skipped. The rest of the difference
between the two ways of generating is chance: the lengths that were drawn.

Writes `<out>/end_to_end_<setting>.json` and a stacked bar of the phases after every pair of turns, so that what
was measured is there when the machine gives out. Both trainers' weights are in the memory of either's turn; what a
turn leaves free goes back to the system before the next, and the peak counts from there. On CPUs stock TRL's LM head
computes prompt positions too, which on GPUs it leaves out. On AMD's processors this package multiplies by oneDNN,
which stock could as well: `--torch_products` measures without it.
"""

import argparse
import contextlib
import copy
import ctypes
import gc
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.scoring import cpu_linear as cpu_linear
from trl_fsdp_qlora.tools.data.datasets import read_problems, to_prompts
from trl_fsdp_qlora.tools.data.rewards import completion_text
from trl_fsdp_qlora.trainers.reporting.card import hardware, software
from trl_fsdp_qlora.trainers.reporting.phases import MIB, PeakMemory
from trl_fsdp_qlora.utils.files import write_json

# Completions per step and per prompt, tokens of a completion, solved problems in front of the question.
SETTINGS = {
    "svamp": {"rows": 16, "group": 8, "tokens": 96, "shots": 0},
    "gsm8k": {"rows": 16, "group": 8, "tokens": 128, "shots": 8},
}
# Seconds on the wall; with --cpu_seconds those of this process's own work, for a shared machine and one thread.
CLOCK = time.perf_counter
PHASES = ("generation", "scoring", "forward_backward", "optimizer")


def distinct_reward(completions, **_columns) -> list[float]:
    """Another reward for every text."""
    texts = [completion_text(completion) for completion in completions]
    return [int(hashlib.sha1(f"{i} {t}".encode()).hexdigest()[:6], 16) / 16**6 for i, t in enumerate(texts)]


def problems_of(options, setting: dict):
    """Prompts of the setting, with its worked examples in front."""
    problems = read_problems(str(options.data))
    solved = problems[: setting["shots"]]
    asked = problems[setting["shots"] :]
    examples = "".join(
        f"Question: {p['question']}\nAnswer: {p['worked']}\n\n" for p in with_solutions(options, solved)
    )
    examples = examples.replace("{", "(")  # a brace of an example would be taken for a place to fill in
    template = f"{examples}Question: {{question}}\nAnswer:" if solved else "{question}"
    return to_prompts(asked[:256], template=template)


def with_solutions(options, problems: list[dict]) -> list[dict]:
    """`problems` with GSM8K's own worked answers."""
    if not problems:
        return []
    rows = [json.loads(line) for line in Path(options.data).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [{**problem, "worked": rows[problem["row"]]["answer"]} for problem in problems]


def build(cls, config_cls, options, model, folder: Path):
    setting = SETTINGS[options.setting]
    args = config_cls(
        output_dir=str(folder),
        per_device_train_batch_size=options.rows or setting["rows"],
        num_generations=setting["group"],
        max_completion_length=setting["tokens"],
        max_steps=10**6,
        num_train_epochs=1000,
        learning_rate=1e-6,
        gradient_checkpointing=options.gradient_checkpointing,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    problems = problems_of(options, setting)
    peft = LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0)
    return cls(model, distinct_reward, args, problems, processing_class=tokenizer, peft_config=peft)


def checkpoint_activations(trainer) -> None:
    """Enable checkpointing, as `Trainer.train` does first: single steps run without `train`."""
    trainer.model.activation_checkpointing_enable(
        activation_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs
    )
    if not trainer.model.is_gradient_checkpointing:
        raise RuntimeError(f"{type(trainer.model).__name__} did not switch gradient checkpointing on")


def give_memory_back() -> None:
    """Hand what the process has freed to the system, so that a turn's peak is its own."""
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)


class Contender:
    """A trainer that takes single optimizer steps, with the seconds of each phase."""

    def __init__(self, trainer, shared: dict[int, list]):
        self.trainer = trainer
        self.shared = shared
        self.seconds: dict[str, float] = defaultdict(float)
        self.turn = 0
        self.drawn = []
        trainer.create_optimizer_and_scheduler(10**6)
        trainer.model.train()
        if trainer.args.gradient_checkpointing:
            checkpoint_activations(trainer)
        trainer.current_gradient_accumulation_steps = 1
        self.batches = iter(trainer.get_train_dataloader())
        self._generate = trainer._generate_single_turn
        trainer._generate_single_turn = self._timed_generation
        trainer._generate_and_score_completions = self._timed("prepare", trainer._generate_and_score_completions)

    def _timed(self, name, function):
        def run(*args, **kwargs):
            start = CLOCK()
            result = function(*args, **kwargs)
            self.seconds[name] += CLOCK() - start
            return result

        return run

    def _timed_generation(self, *args, **kwargs):
        completions, logprobs = self._timed("generation", self._generate)(*args, **kwargs)
        self.drawn = [len(row) for row in completions]
        return self.shared.setdefault(self.turn, completions), logprobs

    def step(self, generation_only: bool) -> dict:
        """Seconds by phase, the loss and the peak memory of one step."""
        trainer = self.trainer
        self.seconds = defaultdict(float)
        batch = next(self.batches)
        give_memory_back()
        memory = PeakMemory(torch.device("cpu"))
        memory.reset()
        clock = getattr(trainer, "clock", None)
        if clock is not None:
            clock.peak.clear()
        start = CLOCK()
        loss = gradient = None
        if generation_only:
            prompt_ids = trainer._tokenize_prompts([row["prompt"] for row in batch])[0]
            with trainer.sharing.original_attention() if hasattr(trainer, "sharing") else contextlib.nullcontext():
                trainer._generate_single_turn(prompt_ids, None, {}, trainer.num_generations)
        else:
            loss = self._timed("training_step", trainer.training_step)(trainer.model, batch, None).item()
            gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
            gradient = torch.nn.utils.get_total_norm(gradients).item()
            trainer.optimizer.step()
            trainer.model.zero_grad()
        total = CLOCK() - start
        seconds = self.seconds
        self.turn += 1
        # This package's clock resets the same peak between its phases, and keeps each.
        peak = max([memory.read(), *(clock.peak.values() if clock is not None else ())])
        work = {k: v[-1] for k, v in trainer._metrics["train"].items() if k.startswith("generation/") and v}
        trainer._metrics["train"].clear()
        return {
            "total": total,
            "generation": seconds["generation"],
            "scoring": seconds["prepare"] - seconds["generation"] if loss is not None else 0.0,
            "forward_backward": seconds["training_step"] - seconds["prepare"],
            "optimizer": total - seconds["training_step"] if loss is not None else 0.0,
            "loss": loss,
            "gradient_norm": gradient,
            "peak_mib": peak / MIB,
            "mean_length": statistics.mean(self.drawn),
            "longest": max(self.drawn),
            "work": work,
        }


def draw_bars(result: dict, path: Path) -> None:
    """Median seconds of each phase, stacked; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    for y, name in enumerate(("this package", "stock TRL")):
        left = 0.0
        for i, phase in enumerate(PHASES):
            width = statistics.median(turn[phase] for turn in result["turns"][name])
            axes.barh(y, width, left=left, color=f"C{i}", label=phase.replace("_", " + ") if y == 0 else None)
            left += width
        axes.text(left, y, f" {left:.1f} s", va="center")
    axes.set_yticks([0, 1], ["this package", "stock TRL"])
    axes.set_xlabel(f"seconds of an optimizer step, {result['setting']}: {result['ratio']['median']:.2f}×")
    axes.margins(x=0.12)
    axes.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.3))
    figure.savefig(path, dpi=110)


def compare(options) -> None:
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    shared: dict[int, list] = {}
    contenders = {
        "stock TRL": Contender(build(GRPOTrainer, GRPOConfig, options, copy.deepcopy(model), options.folder), shared),
        "this package": Contender(
            build(EfficientGRPOTrainer, EfficientGRPOConfig, options, model, options.folder), shared
        ),
    }
    turns: dict[str, list[dict]] = {name: [] for name in contenders}
    for i in range(-options.warm_up, options.rounds):
        order = list(contenders) if i % 2 == 0 else list(contenders)[::-1]
        for name in order:
            torch.manual_seed(i)
            figures = contenders[name].step(options.generation_only)
            if i >= 0:
                turns[name].append(figures)
        if i >= 0:
            print(f"turn {i}: {pair_line([turns[name][-1] for name in turns])}", flush=True)
            write(options, result_of(options, turns))
    for name in ("ratio", "generation_ratio", "peak_gib"):
        print(name, {key: round(value, 3) for key, value in result_of(options, turns)[name].items()})


def pair_line(pair: list[dict]) -> str:
    """Returns a line with the seconds, peaks, lengths and losses of stock TRL and of this package."""
    line = "stock {:.2f} s, ours {:.2f} s, {:.2f}×".format(
        *(p["total"] for p in pair), pair[0]["total"] / pair[1]["total"]
    )
    line += ", peaks {:.2f} {:.2f} GiB".format(*(p["peak_mib"] / 1024 for p in pair))
    line += ", mean lengths {:.0f} {:.0f}".format(*(p["mean_length"] for p in pair))
    if pair[0]["loss"] is not None:
        line += ", losses {:.7f} {:.7f}".format(*(p["loss"] for p in pair))
        line += ", gradients {:.6f} {:.6f}".format(*(p["gradient_norm"] for p in pair))
    return line


def result_of(options, turns: dict[str, list[dict]]) -> dict:
    """Returns the result of the turns so far."""
    setting = SETTINGS[options.setting]

    def ratios(key: str) -> dict[str, float]:
        values = [a[key] / b[key] for a, b in zip(turns["stock TRL"], turns["this package"], strict=True) if b[key]]
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    return {
        "setting": f"{options.setting}: {setting | {'rows': options.rows or setting['rows']}}",
        "gradient_checkpointing": options.gradient_checkpointing,
        "generation_only": options.generation_only,
        "products": "torch's" if options.torch_products or not cpu_linear.beats_mkl() else "oneDNN's",
        "threads": options.threads,
        "seconds": "CPU" if options.cpu_seconds else "wall",
        "hardware": hardware(),
        "software": software(),
        "ratio": ratios("total"),
        "generation_ratio": ratios("generation"),
        "peak_gib": {name: max(turn["peak_mib"] for turn in turns[name]) / 1024 for name in turns},
        "turns": turns,
    }


def write(options, result: dict) -> None:
    """Write the result's JSON, and a picture if there are phases."""
    if not options.out:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"end_to_end_{options.setting}"
    name += "_torch_products" if options.torch_products else ""
    name += "_generation" if options.generation_only else ""
    write_json(options.out / f"{name}.json", result)
    if not options.generation_only:
        draw_bars(result, options.out / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, required=True)
    parser.add_argument("--model", required=True, help="folder of the model, with its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="the setting's problems")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm_up", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu_seconds", action="store_true", help="of the process, with one thread: on a busy machine"
    )
    parser.add_argument("--rows", type=int, help="completions per step, in place of the setting's")
    parser.add_argument("--generation_only", action="store_true")
    parser.add_argument("--torch_products", action="store_true", help="here too, on AMD processors as well")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("end_to_end_run"), help="for the trainers' files")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the picture; none is written without")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.cpu_seconds:
        global CLOCK
        CLOCK = time.process_time
    if options.torch_products:
        cpu_linear.beats_mkl = lambda: False
    compare(options)


if __name__ == "__main__":
    main()
