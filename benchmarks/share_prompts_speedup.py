"""CPU seconds of a loss with its backward: TRL's own DPO, RLOO and GRPO trainers, as they are and after
`share_prompts`.

    python benchmarks/share_prompts_speedup.py   # the table of docs/share_prompts.md; one thread, some minutes

Both contestants are the same trainer class of TRL on the same batch in one process; runs alternate and medians of the
process's CPU time are compared, so that other work on the machine counts little. `one level` is the same with at most
one shared segment per row, the one that saves most, for the batches whose groups have a beginning in common. (Before,
this package shared whole prompts within their groups, which computes more.)

What flatters us: on a CPU stock TRL projects every position through the LM head, prompts included, but on CUDA it
projects completions only; so the vocabulary is small.
"""

import argparse
import copy
import statistics
import tempfile
import time
from types import SimpleNamespace

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from synthetic import gradient_difference, make_model, run_points, small_tokenizer

from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing import forest
from trl_fsdp_qlora.prefix_sharing.sharing import causal_language_model

# name: trainer, tokens that all groups have in common, tokens of each prompt's own, of a completion, groups, rows of a
# group
POINTS = {
    "DPO 512/256": ("dpo", 0, 512, 256, 2, 2),
    "RLOO 512/256/8": ("rloo", 0, 512, 256, 1, 8),
    "RLOO 512/64/8": ("rloo", 0, 512, 64, 1, 8),
    "GRPO 512/64/8": ("grpo", 0, 512, 64, 1, 8),
    "GRPO 768+64/64, 8 groups of 4": ("grpo", 768, 64, 64, 8, 4),
    "GRPO 1300+100/128, 16 groups of 8": ("grpo", 1300, 100, 128, 16, 8),
}
# Stock computes a larger batch one group at a time, because the batch would not fit into memory. Its gradients add up
# to the same.
STOCK_TOKENS = 50_000


def make_trainer(kind: str, model, rows: int, group: int):
    """TRL's own trainer with a LoRA adapter, ready for `compute_loss`."""
    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": rows,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
    }
    lora = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    options = {"model": copy.deepcopy(model), "processing_class": small_tokenizer(), "peft_config": lora}
    if kind == "dpo":
        pairs = Dataset.from_dict({"prompt": ["a"], "chosen": ["a"], "rejected": ["a"]})
        config = trl.DPOConfig(**common, precompute_ref_log_probs=False)
        trainer = trl.DPOTrainer(args=config, train_dataset=pairs, **options)
    else:
        config_class, trainer_class = {
            "rloo": (trl.RLOOConfig, trl.RLOOTrainer),
            "grpo": (trl.GRPOConfig, trl.GRPOTrainer),
        }[kind]
        trainer = trainer_class(
            args=config_class(num_generations=group, beta=0.0, **common),
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            train_dataset=Dataset.from_dict({"prompt": ["a"] * rows}),
            **options,
        )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def make_batch(kind: str, common: int, own: int, completion: int, groups: int, group: int, vocabulary: int) -> dict:
    """A batch as the trainer's loss takes it, from a seed."""
    draw = torch.Generator().manual_seed(1)

    def tokens(*size):
        return torch.randint(2, vocabulary, size, generator=draw)

    beginning = tokens(1, common).expand(groups, -1)
    prompts = torch.cat([beginning, tokens(groups, own)], dim=1).repeat_interleave(group, 0)
    completions = tokens(groups * group, completion)
    if kind == "dpo":
        ids = torch.cat([prompts, completions], dim=1)
        ids = torch.cat([ids[0::2], ids[1::2]])  # all chosen, all rejected
        mask = torch.ones_like(ids)
        completion_mask = mask.clone()
        completion_mask[:, : common + own] = 0
        return {"input_ids": ids, "attention_mask": mask, "completion_mask": completion_mask}
    mask = torch.ones_like(completions)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": torch.randn(groups * group, generator=draw),
        "num_items_in_batch": mask.sum(),
    }


def logps_of(trainer, batch: dict) -> torch.Tensor:
    """Summed log-probabilities of the completions, which RLOO's ratio is taken against."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.ones_like(ids)
    count = batch["completion_ids"].shape[1]
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, count)[0].sum(1)


def cpu_seconds(trainer, batch: dict, rows: int) -> float:
    """CPU seconds of a loss and its backward, in micro-batches of `rows`."""
    trainer.model.zero_grad(set_to_none=True)
    start = time.process_time()
    for first in range(0, len(next(iter(batch.values()))), rows):
        part = {name: x[first : first + rows] if x.ndim else x for name, x in batch.items()}
        trainer.compute_loss(trainer.model, part).backward()
    return time.process_time() - start


def measure(name: str, args) -> dict:
    kind, common, own, completion, groups, group = POINTS[name]
    model = make_model(SimpleNamespace(device="cpu", vocabulary=args.vocabulary, shape="cpu"))
    batch = make_batch(kind, common, own, completion, groups, group, args.vocabulary)
    trainers = {key: make_trainer(kind, model, groups * group, group) for key in ("stock", "shared")}
    share_prompts(trainers["shared"].model)
    if kind == "rloo":
        batch["old_logps"] = logps_of(trainers["stock"], batch)
    contestants = {"stock": trainers["stock"], "shared": trainers["shared"]}
    if common:
        contestants["one level"] = trainers["shared"]
    seconds: dict[str, list[float]] = {key: [] for key in contestants}
    gradients = {}
    tokens = {}
    for run in range(args.runs + 1):  # the first one warms up
        for key, trainer in contestants.items():
            forest.MIN_SAVED_TOKENS = 10**9 if key == "one level" else 8
            rows = groups * group
            if key == "stock" and rows * (common + own + completion) > STOCK_TOKENS:
                rows = group
            took = cpu_seconds(trainer, batch, rows)
            if run:
                seconds[key].append(took)
            if key != "stock":
                figures = causal_language_model(trainer.model).prompt_sharing.figures
                tokens[key] = figures.tokens
                gradients[key] = gradient_difference(trainer, trainers["stock"])
    padded = causal_language_model(trainers["shared"].model).prompt_sharing.figures.padded_tokens
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    return {
        "point": name,
        "padded_tokens": padded,
        "tokens": tokens,
        "seconds": medians,
        "spread": {key: [min(values), max(values)] for key, values in seconds.items()},
        "speedup": {key: medians["stock"] / value for key, value in medians.items()},
        "gradient_difference": gradients,
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| batch | tokens, padded | computed | fewer | stock, s | shared, s | speed-up | of one level |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        computed = row["tokens"]["shared"]
        seconds = row["seconds"]
        one_level = f"{seconds['one level'] / seconds['shared']:.2f}×" if "one level" in seconds else ""
        lines.append(
            f"| {row['point']} | {row['padded_tokens']:,} | {computed:,} | {row['padded_tokens'] / computed:.2f}× "
            f"| {seconds['stock']:.2f} | {seconds['shared']:.2f} | {row['speedup']['shared']:.2f}× | {one_level} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each contestant")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--points", nargs="*", help="only points whose name contains one of these")
    parser.add_argument("--output", default="share_prompts_speedup", help="file stem under benchmarks/results")
    args = parser.parse_args()
    names = [name for name in POINTS if args.points is None or any(part in name for part in args.points)]
    run_points(args, names, measure, table, "Qwen3, hidden 256, 4 layers, LoRA r=16")


if __name__ == "__main__":
    main()
