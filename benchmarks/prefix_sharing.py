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
import json
import platform
import statistics
import time
from pathlib import Path

import torch
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


def make_batch(vocabulary: int, prompt: int, completion: int, group: int, kind: str, device: str) -> dict:
    """One micro-batch as `_compute_loss` takes it; random advantages."""
    draw = torch.Generator().manual_seed(1)

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


def make_trainer(cls, model, prefix_sharing: str, args, group: int):
    """A trainer on a copy of `model`, in training mode, ready for `_compute_loss`."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = EfficientGRPOConfig(
        output_dir=str(RESULTS / "unused"),
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
    pairs = [(p.grad, r.grad) for p, r in zip(trainer.model.parameters(), reference.model.parameters(), strict=True)]
    largest = max(r.abs().max() for _, r in pairs)
    return max((p - r).abs().max() / largest for p, r in pairs).item()


def measure(point, args, contestants) -> dict:
    name, prompt, completion, group, kind, *targets = point
    batch = make_batch(args.vocabulary, prompt, completion, group, kind, args.device)
    trainers = contestants(group)
    seconds = {key: [] for key in trainers}
    for trainer in trainers.values():  # warm up: self-check, allocator, thread pool
        step(trainer, batch, args.device)
        step(trainer, batch, args.device)
    for _ in range(args.runs):
        for key, trainer in trainers.items():
            seconds[key].append(step(trainer, batch, args.device)[0])
    stock = trainers["stock"]
    row = {"point": name, "prompt": prompt, "completion": completion, "group": group, "kind": kind}
    row["target_time"], row["target_bytes"] = targets
    share = trainers["auto"]._metrics["train"]["prefix_sharing/policy/tokens_share"][-1]
    row["token_ratio"] = 1 / share
    row["seconds"] = {key: statistics.median(times) for key, times in seconds.items()}
    row["speedup"] = {key: row["seconds"]["stock"] / value for key, value in row["seconds"].items()}
    row["saved_bytes"] = {key: saved_bytes(trainer, batch) for key, trainer in trainers.items()}
    row["bytes_ratio"] = {key: row["saved_bytes"]["stock"] / value for key, value in row["saved_bytes"].items()}
    row["gradient_difference"] = {
        key: gradient_difference(trainer, stock) for key, trainer in trainers.items() if key != "stock"
    }
    return row


def print_table(rows: list[dict]) -> None:
    print(f"{'P/C/G':24}{'tokens':>8}  " + "".join(f"{'time ' + k:>18}{'bytes':>8}" for k in rows[0]["seconds"]))
    for row in rows:
        line = f"{row['point']:24}{row['token_ratio']:7.2f}x  "
        for key in row["seconds"]:
            line += f"{row['seconds'][key] * 1e3:8.0f} ms {row['speedup'][key]:5.2f}x{row['bytes_ratio'][key]:7.2f}x"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
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
        return trainers

    points = CPU_POINTS if args.device == "cpu" else CUDA_POINTS
    rows = []
    for point in points:
        if args.points and not any(wanted in point[0] for wanted in args.points):
            continue
        rows.append(measure(point, args, contestants))
        gc.collect()
    print_table(rows)
    if args.output:
        RESULTS.mkdir(exist_ok=True)
        setting = {"torch": torch.__version__, "machine": platform.processor() or platform.machine(), **vars(args)}
        (RESULTS / f"{args.output}.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
