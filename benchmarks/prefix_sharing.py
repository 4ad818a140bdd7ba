"""Time and saved bytes of `compute_loss` + backward: this package against stock TRL and against PrefixGrouper.

    python benchmarks/prefix_sharing.py                 # the table of the documentation, two CPU threads, minutes
    python benchmarks/prefix_sharing.py --device cuda   # bf16, 0.5B shape, longer prompts and completions

Everything runs through the real trainers on the same batch and in one process; runs of the contestants alternate and
medians are compared. Stock TRL on CPU projects every position through the LM head, prompts included, where on CUDA it
projects completions only: that flatters this package on CPU, so the vocabulary is small by default (`--vocabulary`).
Saved bytes are those of the distinct storages that autograd keeps for backward (parameters excluded).
"""

import argparse
import copy
import gc
import importlib.util
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

RESULTS = Path(__file__).parent / "results"
CPU_POINTS = [
    # name, P, C, G, kind, target for time, target for bytes
    ("512/64/8", 512, 64, 8, "equal", 4.4, 4.2),
    ("1024/64/8", 1024, 64, 8, "equal", 5.6, 5.3),
    ("128/256/8", 128, 256, 8, "equal", 1.35, 1.3),
    ("512/64/8 ragged", 512, 64, 8, "ragged", 5.7, None),
    ("512/64/1 x8 different", 512, 64, 8, "different", 0.97, None),
]
CUDA_POINTS = [
    ("512/512/8", 512, 512, 8, "equal", None, None),
    ("2048/512/16", 2048, 512, 16, "equal", None, None),
    ("4096/1024/16", 4096, 1024, 16, "equal", None, None),
    ("2048/1024/8 ragged", 2048, 1024, 8, "ragged", None, None),
]


def make_model(args) -> Qwen3ForCausalLM:
    """Random weights in the shape of Qwen3: hidden 256 x 4 layers, or of the 0.6B model on CUDA."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "head_dim": 64}
    if args.device == "cuda":
        shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
        shape |= {"num_key_value_heads": 8, "head_dim": 128}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=args.vocabulary, max_position_embeddings=8192, tie_word_embeddings=True, **shape)
    config.pad_token_id, config.eos_token_id = 0, 1
    return Qwen3ForCausalLM(config)


def make_batch(vocabulary: int, prompt: int, completion: int, group: int, kind: str, device: str, seed: int) -> dict:
    """One micro-batch as `_compute_loss` takes it; random advantages."""
    draw = torch.Generator().manual_seed(seed)

    def integers(low, high, *size):
        return torch.randint(low, high + 1, size, generator=draw)

    prompt_length = int(integers(prompt // 2, prompt, 1)) if kind == "ragged" else prompt
    lengths = integers(1, completion, group) if kind == "ragged" else torch.full((group,), completion)
    prompts = 1 if kind != "different" else group
    prompt_ids = integers(2, vocabulary - 1, prompts, prompt_length).expand(group, -1)
    completion_ids = integers(2, vocabulary - 1, group, int(lengths.max()))
    completion_mask = (torch.arange(completion_ids.shape[1]) < lengths.unsqueeze(1)).long()
    batch = {
        "prompt_ids": prompt_ids.contiguous(),
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.randn(group, generator=draw),
        "num_items_in_batch": completion_mask.sum(),
    }
    return {key: value.to(device) for key, value in batch.items()}


def make_trainer(cls, model, prefix_sharing: str, args, group: int, config_cls=EfficientGRPOConfig):
    """A trainer on a copy of `model`, in training mode, ready for `_compute_loss`."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = config_cls(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=group,
        num_generations=group,
        use_cpu=args.device == "cpu",
        bf16=args.device == "cuda",
        gradient_checkpointing=False,
        report_to=[],
        prefix_sharing=prefix_sharing,
    )
    trainer = cls(
        model=copy.deepcopy(model),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * group}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the distinct storages saved for backward, without the parameters of `model`."""

    def __init__(self, model):
        known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages = {}

        def pack(x):
            storage = x.untyped_storage()
            if storage.data_ptr() not in known:
                self.storages[storage.data_ptr()] = storage.nbytes()
            return x

        super().__init__(pack, lambda x: x)

    @property
    def total(self) -> int:
        return sum(self.storages.values())


def cpu_name() -> str:
    """The processor's model name where Linux tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step(trainer, batch, device) -> tuple[float, float]:
    """Seconds and loss of one `compute_loss` + backward."""
    trainer.model.zero_grad(set_to_none=True)
    synchronize(device)
    start = time.perf_counter()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    synchronize(device)
    return time.perf_counter() - start, loss.item()


def saved_bytes(trainer, batch) -> int:
    trainer.model.zero_grad(set_to_none=True)
    saved = SavedBytes(trainer.model)
    with saved:
        loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return saved.total


def gradient_difference(trainer, reference) -> float:
    """Largest gradient difference over the largest gradient, over all parameters."""
    if trainer is reference:
        return 0.0
    pairs = [(p.grad, r.grad) for p, r in zip(trainer.model.parameters(), reference.model.parameters(), strict=True)]
    largest = max(r.abs().max() for _, r in pairs)
    return max((p - r).abs().max() / largest for p, r in pairs).item()


def measure(point, args, contestants) -> dict:
    """Medians of alternating runs, summed over the batches of a point (several draws where lengths are random)."""
    name, prompt, completion, group, kind, *targets = point
    seeds = range(1, args.draws + 1) if kind == "ragged" else [1]
    batches = [make_batch(args.vocabulary, prompt, completion, group, kind, args.device, seed) for seed in seeds]
    trainers = contestants(group)
    totals = {key: {"seconds": 0.0, "bytes": 0, "difference": 0.0} for key in trainers}
    tokens = stock_tokens = 0
    for batch in batches:
        for trainer in trainers.values():  # warm up: self-check, allocator, thread pool
            step(trainer, batch, args.device)
        seconds = {key: [] for key in trainers}
        for _ in range(args.runs):
            for key, trainer in trainers.items():
                seconds[key].append(step(trainer, batch, args.device)[0])
        for key, trainer in trainers.items():
            totals[key]["seconds"] += statistics.median(seconds[key])
            totals[key]["bytes"] += saved_bytes(trainer, batch)
            difference = gradient_difference(trainer, trainers["stock"])
            totals[key]["difference"] = max(totals[key]["difference"], difference)
        size = batch["prompt_ids"].numel() + batch["completion_ids"].numel()
        stock_tokens += size
        tokens += size * trainers[args.backends[0]]._metrics["train"]["prefix_sharing/policy/tokens_share"][-1]
    stock = totals["stock"]
    return {
        "point": name,
        "prompt": prompt,
        "completion": completion,
        "group": group,
        "kind": kind,
        "batches": len(batches),
        "target_time": targets[0],
        "target_bytes": targets[1],
        "token_ratio": stock_tokens / tokens,
        "seconds": {key: total["seconds"] for key, total in totals.items()},
        "speedup": {key: stock["seconds"] / total["seconds"] for key, total in totals.items()},
        "saved_bytes": {key: total["bytes"] for key, total in totals.items()},
        "bytes_ratio": {key: stock["bytes"] / total["bytes"] for key, total in totals.items()},
        "gradient_difference": {key: total["difference"] for key, total in totals.items()},
    }


def table(rows: list[dict]) -> str:
    """Markdown: speed-up and saved-bytes ratio against stock TRL, the token ratio beside them."""
    names = [key for key in rows[0]["seconds"] if key != "stock"]
    lines = ["| P/C/G | token ratio | stock | " + " | ".join(f"{n} | bytes" for n in names) + " | target |"]
    lines.append("|---" * (len(names) * 2 + 4) + "|")
    for row in rows:
        cells = [row["point"], f"{row['token_ratio']:.2f}", f"{row['seconds']['stock'] * 1e3:.0f} ms"]
        for key in names:
            cells += [f"{row['speedup'][key]:.2f}×", f"{row['bytes_ratio'][key]:.2f}×"]
        wanted = [f"≥ {x}× {what}" for x, what in ((row["target_time"], "time"), (row["target_bytes"], "bytes")) if x]
        lines.append("| " + " | ".join([*cells, ", ".join(wanted)]) + " |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """Speed-up of each contestant beside the token ratio."""
    import matplotlib.pyplot as plt

    names = [key for key in rows[0]["seconds"] if key != "stock"]
    width = 0.8 / (len(names) + 1)
    figure, axes = plt.subplots(figsize=(9, 4))
    for i, name in enumerate(["token ratio", *names]):
        heights = [row["token_ratio"] if name == "token ratio" else row["speedup"][name] for row in rows]
        color = "lightgray" if name == "token ratio" else None
        axes.bar([x + i * width for x in range(len(rows))], heights, width, label=name, color=color)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(rows))], [row["point"] for row in rows], fontsize=8)
    axes.set_ylabel("times faster than stock TRL\n(compute_loss + backward)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9, help="timed runs of each contestant a batch")
    parser.add_argument("--draws", type=int, default=4, help="batches of a point with random lengths")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--points", nargs="*", help="only points whose name contains one of these")
    parser.add_argument("--backends", nargs="*", default=["auto", "two_part"])
    parser.add_argument("--output", help="file stem under benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = make_model(args).to(args.device)

    def contestants(group):
        trainers = {"stock": make_trainer(GRPOTrainer, model, "off", args, group)}
        for backend in args.backends:
            trainers[backend] = make_trainer(EfficientGRPOTrainer, model, backend, args, group)
        if importlib.util.find_spec("prefix_grouper") is None:
            print("prefix-grouper is not installed and left out: pip install prefix-grouper")
        else:
            from prefix_grouper_trainer import PrefixGrouperTrainer

            trainers["prefix_grouper"] = make_trainer(PrefixGrouperTrainer, model, "off", args, group)
        return trainers

    points = CPU_POINTS if args.device == "cpu" else CUDA_POINTS
    rows = []
    for point in points:
        if args.points and not any(wanted in point[0] for wanted in args.points):
            continue
        rows.append(measure(point, args, contestants))
        gc.collect()
    print(table(rows))
    if args.output:
        RESULTS.mkdir(exist_ok=True)
        machine = torch.cuda.get_device_name() if args.device == "cuda" else cpu_name()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
        setting = {"machine": machine, **versions, **vars(args)}
        (RESULTS / f"{args.output}.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
        (RESULTS / f"{args.output}.md").write_text(table(rows) + "\n")
        plot(rows, RESULTS / f"{args.output}.png")


if __name__ == "__main__":
    main()
