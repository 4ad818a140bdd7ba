"""Optimizer steps of this package and of Unsloth, each in an environment of its own: seconds per step and peak bytes.

    python benchmarks/beside_unsloth.py --model FOLDER --unsloth VENV/bin/python [--four_bit] [--output FILE]

**Never run**: nothing of it has seen Unsloth or a GPU. Unsloth 2026.10.9 asks for TRL 1.15 or older, this package for
TRL 1.16, so one environment does not hold both and `--unsloth` names the other one's Python. Its side does what
Unsloth's GRPO notebooks do, without their vLLM: `FastLanguageModel.from_pretrained`, `get_peft_model` with its own
gradient checkpointing, TRL's trainer, which Unsloth patches.

Both sides get the same weights, LoRA, prompts and settings, a reward that differs for every completion, and a fixed
length of completions. The table has the number of tokens that each drew next to its seconds; if these numbers differ,
the seconds are not comparable. Each side generates for itself, with transformers' `generate` or its own code in its
place, and keeps activations in its own way (Unsloth's checkpointing moves them to the host). The sides run one after
the other. The row of a side that fails has the reason, and the file is written after each side. The first steps
compile and are left out.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

# Nothing else is imported here: Unsloth has to be imported before what it patches, and its environment has no package
# of ours.
SIDES = ("ours", "unsloth")
WARM_UP = 2
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 16, 32


def prompts(count: int, words: int) -> list[str]:
    """As many texts of about as many words, which differ from their first word on."""
    return [" ".join(f"{(7 * i + j) % 97} and" for j in range(words // 2)) + " is" for i in range(1, count + 1)]


def distinct_reward(completions, completion_ids, **columns) -> list[float]:
    """Another reward for every completion, so that none has zero advantage and is skipped."""
    return [
        int(hashlib.sha1(f"{i} {ids}".encode()).hexdigest()[:6], 16) / 16**6 for i, ids in enumerate(completion_ids)
    ]


def settings(args, folder: str) -> dict:
    """Returns the settings of both configs; it names whatever has another default in Unsloth."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "output_dir": folder,
        "per_device_train_batch_size": args.group,
        "num_generations": args.group,
        "gradient_accumulation_steps": 1,
        "max_completion_length": args.completion,
        "generation_kwargs": {"min_new_tokens": args.completion},
        "max_steps": args.steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused",
        "bf16": cuda,
        "use_cpu": not cuda,
        "gradient_checkpointing": True,
        "save_strategy": "no",
        "report_to": "none",
        "seed": 0,
    }


def unsloth_trainer(args, folder: str, reward):
    from unsloth import FastLanguageModel  # isort: skip  # before TRL, which it patches
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=args.model,
        max_seq_length=args.longest,
        load_in_4bit=args.four_bit,
        fast_inference=False,
        max_lora_rank=RANK,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=RANK,
        target_modules=LAYERS,
        lora_alpha=ALPHA,
        use_gradient_checkpointing="unsloth",
        random_state=0,
    )
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward],
        args=GRPOConfig(**settings(args, folder)),
        train_dataset=Dataset.from_dict({"prompt": prompts(args.steps, args.prompt)}),
    )


def our_trainer(args, folder: str, reward):
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

    quantized = {}
    cuda = torch.cuda.is_available()
    if args.four_bit:
        quantized["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.bfloat16 if cuda else torch.float32, device_map={"": 0} if cuda else None, **quantized
    )
    return EfficientGRPOTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        reward_funcs=[reward],
        args=EfficientGRPOConfig(**settings(args, folder)),
        train_dataset=Dataset.from_dict({"prompt": prompts(args.steps, args.prompt)}),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=LAYERS, task_type="CAUSAL_LM"),
    )


TRAINERS = {"ours": our_trainer, "unsloth": unsloth_trainer}


def measure(side: str, args) -> dict:
    """Train one side; returns its median seconds per step, peak bytes, tokens and versions."""
    drawn = []

    def reward(completions, completion_ids, **columns):
        drawn.extend(len(ids) for ids in completion_ids)
        return distinct_reward(completions, completion_ids)

    with tempfile.TemporaryDirectory() as folder:
        trainer = TRAINERS[side](args, folder, reward)
        clock = clocked(trainer)
        trainer.train()
    packages = ["torch", "transformers", "trl", *(["unsloth"] if side == "unsloth" else [])]
    return {
        "seconds": statistics.median(clock.seconds[WARM_UP:]),
        "all_seconds": clock.seconds,
        "peak_bytes": clock.peak,
        "completion_tokens": sum(drawn) / len(drawn),
        "device": clock.device,
        "versions": {package: version(package) for package in packages},
    }


def clocked(trainer):
    """A callback of `trainer` with the `seconds` of every step and, on CUDA, the `peak` bytes after the warm-up."""
    import torch
    from transformers import TrainerCallback

    cuda = torch.cuda.is_available()

    class Clock(TrainerCallback):
        def __init__(self):
            self.seconds = []
            self.peak = None
            self.device = torch.cuda.get_device_name() if cuda else "cpu"

        def on_step_begin(self, args, state, control, **kwargs):
            if cuda:
                torch.cuda.synchronize()
                if state.global_step == WARM_UP:
                    torch.cuda.reset_peak_memory_stats()
            self._began = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            if cuda:
                torch.cuda.synchronize()
                self.peak = torch.cuda.max_memory_allocated()
            self.seconds.append(time.perf_counter() - self._began)

    clock = Clock()
    trainer.add_callback(clock)
    return clock


def run_side(side: str, args) -> dict:
    """The result of [`measure`] by the side's own Python, or the reason why there is none."""
    python = args.unsloth if side == "unsloth" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "row.json")
        arguments = json.dumps({**vars(args), "output": str(out)})
        process = subprocess.run([python, __file__, "--side", side, "--given", arguments], check=False)
        if out.is_file():
            return json.loads(out.read_text(encoding="utf-8"))
    return {"error": f"exit code {process.returncode}"}


def one_side(side: str, args) -> None:
    """Run one side in the process that [`run_side`] starts.

    The row goes into a file, because a side may print anything.
    """
    try:
        row = measure(side, args)
    except Exception as error:
        import torch

        if not isinstance(error, torch.OutOfMemoryError):
            raise
        row = {"out_of_memory": str(error).splitlines()[0][:200]}
    Path(args.output).write_text(json.dumps(row), encoding="utf-8")


def table(rows: dict[str, dict]) -> str:
    """Returns a line for each side, and the ratio if both drew equally many tokens."""
    lines = []
    for side, row in rows.items():
        if "seconds" not in row:
            lines.append(f"{side}: {'out of memory' if 'out_of_memory' in row else row['error']}")
            continue
        peak = "" if row["peak_bytes"] is None else f", peak {row['peak_bytes'] / 2**30:.2f} GiB"
        lines.append(
            f"{side}: {row['seconds']:.3f} s per step{peak}, {row['completion_tokens']:.1f} tokens per completion"
        )
    if all("seconds" in rows.get(side, {}) for side in SIDES):
        ours, theirs = (rows[side] for side in SIDES)
        if ours["completion_tokens"] == theirs["completion_tokens"]:
            lines.append(f"Unsloth's seconds over ours: {theirs['seconds'] / ours['seconds']:.2f}")
        else:
            lines.append("not comparable: they drew completions of different lengths")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a checkpoint")
    parser.add_argument("--unsloth", default=sys.executable, help="Python of an environment with Unsloth; this one's")
    parser.add_argument("--four_bit", action="store_true")
    parser.add_argument("--group", type=int, default=16, help="completions of a step, of one prompt")
    parser.add_argument("--prompt", type=int, default=512, help="words of a prompt")
    parser.add_argument("--completion", type=int, default=256, help="tokens of each completion")
    parser.add_argument(
        "--longest", type=int, default=4096, help="tokens of prompt and completion that Unsloth makes room for"
    )
    parser.add_argument("--steps", type=int, default=WARM_UP + 5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "beside_unsloth.json")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--given", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        one_side(args.side, argparse.Namespace(**json.loads(args.given)))
        return
    if args.model is None or args.steps <= WARM_UP:
        parser.error(f"--model is needed, and more than {WARM_UP} --steps")
    find_unsloth = "import importlib.util, sys; sys.exit(importlib.util.find_spec('unsloth') is None)"
    if subprocess.run([args.unsloth, "-c", find_unsloth], check=False).returncode != 0:
        parser.error(f"{args.unsloth} has no unsloth; --unsloth names the Python of an environment that has it")
    rows = {}
    for side in SIDES:
        rows[side] = run_side(side, args)
        setting = {key: getattr(args, key) for key in ("model", "four_bit", "group", "prompt", "completion", "steps")}
        args.output.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
