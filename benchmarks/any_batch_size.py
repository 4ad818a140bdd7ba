"""CPU seconds of a whole optimizer step with micro-batches smaller than a group: TRL's GRPOTrainer next to
EfficientGRPOTrainer.

    python benchmarks/any_batch_size.py            # the table of docs/prefix_sharing.md, one thread, some minutes

Both trainers have the same settings, model and completions, which are given, so that a step is what follows
generation: `training_step` of all micro-batches without the drawing of completions. Steps alternate, and medians of
the process's CPU time are compared, so that other work on the machine counts little. `alone` is ours with
tokens_per_pass=0: each micro-batch computes its own prompt, as before. `moved` is how far the weights of the two
trainers are apart after five steps of SGD, over how far they moved.

What flatters us: on a CPU stock TRL projects every position through the LM head, prompts included, but on CUDA it
projects completions only; so the vocabulary is small.
"""

import argparse
import copy
import statistics
import tempfile
import time
import zlib
from collections import Counter
from types import SimpleNamespace

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from synthetic import make_model, run_points, small_tokenizer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

# tokens of the prompt, of a completion, completions of a group, rows of a micro-batch
POINTS = [
    (512, 64, 8, 1),
    (512, 64, 8, 2),
    (512, 64, 8, 4),
    (512, 64, 8, 8),
    (1024, 64, 8, 1),
    (128, 256, 8, 1),
]


def on_given_completions(cls, completion: int, vocabulary: int):
    """A trainer of class `cls` whose completions depend on the prompt and their number in the group alone."""

    class Timed(cls):
        drawing = 0.0
        seconds = 0.0

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            repetitions = Counter()
            completions = []
            for key in map(tuple, prompt_ids):
                repetitions[key] += 1
                draw = torch.Generator().manual_seed(zlib.crc32(repr((key, repetitions[key])).encode()))
                completions.append(torch.randint(2, vocabulary, (completion,), generator=draw).tolist())
            return completions, None

        def _generate_and_score_completions(self, inputs):
            start = time.process_time()
            batch = super()._generate_and_score_completions(inputs)
            self.drawing += time.process_time() - start
            return batch

        def training_step(self, *args, **kwargs):
            start = time.process_time()
            drawn = self.drawing
            loss = super().training_step(*args, **kwargs)
            self.seconds += time.process_time() - start - (self.drawing - drawn)
            return loss

    return Timed


def reward(completion_ids, **columns) -> list[float]:
    return [zlib.crc32(str(ids).encode()) % 1000 / 1000 for ids in completion_ids]


def make_trainer(cls, config_class, model, point, vocabulary: int, **options):
    prompt, completion, group, rows = point
    draw = torch.Generator().manual_seed(2)
    words = torch.randint(2, vocabulary, (8, prompt), generator=draw)
    tokenizer = small_tokenizer()
    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": group // rows,
        "num_generations": group,
        "max_completion_length": completion,
        "max_steps": 1,
        "beta": 0.0,
        "optim": "sgd",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "shuffle_dataset": False,
    }
    trainer = on_given_completions(cls, completion, vocabulary)(
        model=copy.deepcopy(model),
        args=config_class(**{**common, **options}),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(8)]}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    torch.manual_seed(3)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:  # PEFT initialises these to zero, so that the adapter would change nothing
            parameter.data.normal_(std=0.02)
    # Prompts are token ids of the wanted length.
    trainer._tokenize_prompts = lambda prompts: ([words[int(text)].tolist() for text in prompts], None, {})
    return trainer


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])


def seconds_of_step(trainer) -> float:
    trainer.seconds = 0.0
    trainer.train()
    return trainer.seconds


def measure(point, args) -> dict:
    model = make_model(SimpleNamespace(device="cpu", vocabulary=args.vocabulary, shape=args.shape))
    ours = EfficientGRPOTrainer, EfficientGRPOConfig
    trainers = {
        "stock": make_trainer(trl.GRPOTrainer, trl.GRPOConfig, model, point, args.vocabulary),
        "ours": make_trainer(*ours, model, point, args.vocabulary, compact_generation=False),
        "alone": make_trainer(*ours, model, point, args.vocabulary, compact_generation=False, tokens_per_pass=0),
    }
    seconds: dict[str, list[float]] = {key: [] for key in trainers}
    start = weights(trainers["stock"])
    for run in range(args.runs + 1):  # the first one warms up
        for key, trainer in trainers.items():
            took = seconds_of_step(trainer)
            if run:
                seconds[key].append(took)
    end = {key: weights(trainer) for key, trainer in trainers.items()}
    moved = (end["stock"] - start).norm()
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    return {
        "point": point,
        "seconds": medians,
        "spread": {key: [min(values), max(values)] for key, values in seconds.items()},
        "speedup": {key: medians["stock"] / value for key, value in medians.items()},
        "moved": {key: ((value - end["stock"]).norm() / moved).item() for key, value in end.items()},
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| prompt/completion/group | rows | stock, s | ours, s | alone, s | speed-up | alone | moved |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        *sizes, count = row["point"]
        seconds = row["seconds"]
        speedup = row["speedup"]
        lines.append(
            f"| {'/'.join(map(str, sizes))} | {count} | {seconds['stock']:.2f} | {seconds['ours']:.2f} "
            f"| {seconds['alone']:.2f} | {speedup['ours']:.2f}× | {speedup['alone']:.2f}× | "
            f"{row['moved']['ours']:.0e} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="timed steps of each contestant")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--shape", default="cpu", help="of the model, see synthetic.py")
    parser.add_argument("--points", nargs="*", type=int, help="only these rows of the table, counted from 0")
    parser.add_argument("--output", default="any_batch_size", help="file stem under benchmarks/results")
    args = parser.parse_args()
    points = [point for number, point in enumerate(POINTS) if args.points is None or number in args.points]
    run_points(args, points, measure, table, f"Qwen3, {args.shape}, LoRA r=16, SGD")


if __name__ == "__main__":
    main()
