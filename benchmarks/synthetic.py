"""Models, batches and trainers from a seed, and measurements of seconds and bytes, for all benchmarks."""

import copy
import gc
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.profiler import ProfilerActivity, profile
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trl_fsdp_qlora import EfficientGRPOConfig

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"
# Qwen3's hidden size, MLP, layers, heads, key-value heads and head size; "tiny" is for rehearsals on CUDA,
# "wide" has two layers of the 0.6B model.
SHAPES = {
    "cpu": (256, 768, 4, 4, 2, 64),
    "tiny": (64, 128, 1, 4, 2, 16),
    "wide": (1024, 3072, 2, 16, 8, 128),
    "0.6B": (1024, 3072, 28, 16, 8, 128),
    "1.7B": (2048, 6144, 28, 16, 8, 128),
    "smollm2": (576, 1536, 30, 9, 3, 64),  # SmolLM2-135M, whose vocabulary is 49,152
    "hybrid": (256, 768, 4, 4, 2, 64),
}
# Qwen3.5 has three recurrent layers to one of attention, and values twice as wide as keys.
RECURRENT = {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}


def make_model(args) -> PreTrainedModel:
    """Random weights in a shape of Qwen3: `args.shape`, else hidden 256 x 4 layers, or that of the 0.6B model on CUDA.

    "hybrid" is one of Qwen3.5.
    """
    default = "0.6B" if args.device == "cuda" else "cpu"
    hidden, mlp, layers, heads, kv_heads, head = SHAPES[getattr(args, "shape", None) or default]
    shape = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": args.vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    hybrid = getattr(args, "shape", None) == "hybrid"
    config = Qwen3_5TextConfig(**shape, **RECURRENT) if hybrid else Qwen3Config(**shape)
    config.pad_token_id = 0
    config.eos_token_id = 1
    return Qwen3_5ForCausalLM(config) if hybrid else Qwen3ForCausalLM(config)


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


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with padding, an end and one word: enough for a trainer whose batches are passed in."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_trainer(cls, model, prefix_sharing: str, args, group: int, config_cls=EfficientGRPOConfig):
    """A trainer on a copy of `model`, in training mode, ready for `_compute_loss`."""
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
        processing_class=small_tokenizer(),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def logged(trainer) -> dict[str, float]:
    """The trainer's metrics since the last call, averaged, as it would log them now."""
    logs = {}
    trainer.log(logs)
    return logs


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
    """Returns the processor's model name, on Linux."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def step(trainer, batch, device, clock: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
    """Seconds and loss of one `compute_loss` + backward."""
    trainer.model.zero_grad(set_to_none=True)
    synchronize(device)
    start = clock()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    synchronize(device)
    return clock() - start, loss.item()


def unless_out_of_memory(name: str, run: Callable[[], T]) -> T | None:
    """Returns `run()`, or `None` if the GPU's memory is not enough.

    In that case it prints `name` and the reason, and frees the memory that `run` had taken.
    """
    try:
        return run()
    except torch.OutOfMemoryError as error:
        print(f"{name}: out of memory: {str(error).splitlines()[0][:120]}", flush=True)
    # Behind the handler: inside of it the frames of what failed, and their tensors, are still held.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def saved_bytes(trainer, batch) -> int:
    trainer.model.zero_grad(set_to_none=True)
    saved = SavedBytes(trainer.model)
    with saved:
        loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return saved.total


def peak_bytes(run, device: str) -> int:
    """Highest sum of live allocations during `run()`, above the level at its start."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak


def gradient_difference(trainer, reference) -> float:
    """Largest difference of the models' gradients over the largest gradient of `reference`."""
    pairs = zip(trainer.model.parameters(), reference.model.parameters(), strict=True)
    pairs = [(p.grad, r.grad) for p, r in pairs if r.grad is not None]
    largest = max(r.abs().max() for _, r in pairs)
    return max((p - r).abs().max() / largest for p, r in pairs).item()


def run_points(args, points: Iterable, measure: Callable, table: Callable[[list[dict]], str], model: str) -> None:
    """Measure each point on one thread, and write all with their setting to `RESULTS`; prints lines of `table`.

    Args:
        args: of the command line, with `runs`, `vocabulary` and `output`, a file stem.
        points: first arguments of `measure`, whose second one is `args`.
        measure: returns a row.
        table: returns rows as a table.
        model: what the model is, in words.
    """
    torch.set_num_threads(1)
    rows = []
    for point in points:
        rows.append(measure(point, args))
        print(table(rows[-1:]).splitlines()[-1], rows[-1].get("gradient_difference", ""), flush=True)
    setting = {
        "device": cpu_name(),
        "threads": 1,
        "runs": args.runs,
        "vocabulary": args.vocabulary,
        "torch": torch.__version__,
        "trl": trl.__version__,
        "model": model,
    }
    path = RESULTS / f"{args.output}.json"
    path.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    print(table(rows))
