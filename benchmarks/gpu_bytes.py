"""Peak bytes of CUDA's allocator at real sizes: stock TRL's trainer compared with this package's, LoRA and QLoRA.

    python benchmarks/gpu_bytes.py [--parts grid groups] [--only 7B qlora ...] [--output FILE]

Runs on a GPU, or on an emulated one on which no kernel runs and memory is not touched: then bytes of large models are
counted in the memory of a small host, and the results are headed "emulated allocator, no kernel ran". Parts:

    grid     a step on one group: models, adapters, checkpointing, lengths
    groups   the largest group that a card of 16, 24, 80 or 141 GiB holds

Configs are built in code and weights are whatever the memory holds. A batch is made on the host as the trainer's
inputs; a step is `compute_loss`, the backward, clipping and the fused AdamW, without generation. The first step's
comparison of packed and padded rows is left out. Every completion has C tokens but the first, which has one less:
without any padding stock TRL would build no mask, which is rare in training.

The largest groups are guessed from the line through two measured sizes and then run with the allocator held to the
card: one group has to fit, and the next larger one has to run out of memory.

Each point, and each trainer's series of groups, has a process of its own with a time limit; the file is written after
each, and what it holds for the same versions is not measured again.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch
from datasets import Dataset
from end_to_end import checkpoint_activations
from gpu import REPOSITORY, end_group
from peft import LoraConfig
from synthetic import RESULTS, make_batch, small_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config
from transformers.quantizers import AutoHfQuantizer
from trl import GRPOConfig, GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.utils.files import write_json

GIB = 2**30
CONTEXT = 512 * 2**20  # bytes of a card that the CUDA context takes
CARDS = (16, 24, 80, 141)  # GiB
HEAD = "emulated allocator, no kernel ran"


@dataclass(frozen=True)
class Point:
    """One group of `group` completions; `prompt` and `completion` in tokens."""

    model: str
    adapter: str
    checkpointing: bool
    prompt: int
    completion: int
    group: int

    @property
    def name(self) -> str:
        checkpointing = "checkpointing" if self.checkpointing else "no checkpointing"
        return f"{self.model} {self.adapter} {checkpointing} {self.prompt}/{self.completion}/{self.group}"


CONTESTANTS = ("stock", "ours")
SHAPES = ((4096, 1024, 16), (2048, 512, 16), (512, 512, 8))
GRID = [
    Point(model, adapter, checkpointing, *shape)
    for shape in SHAPES
    for model, adapter, checkpointing in product(("7B", "1.5B", "0.5B"), ("qlora", "lora"), (True, False))
]

SERIES = [Point("7B", "qlora", True, 2048, 512, 0), Point("1.5B", "lora", True, 2048, 512, 0)]
PARTS = ("grid", "groups")

SMALL = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
MODELS = {
    "0.5B": Qwen2Config(
        **SMALL, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14
    ),
    "1.5B": Qwen2Config(
        **SMALL, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12
    ),
    "7B": Qwen2Config(
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
    ),
}
MEASURED_GROUPS = (4, 16)  # of the line from which the largest group is guessed
TRAINERS = {"stock": (GRPOTrainer, GRPOConfig), "ours": (EfficientGRPOTrainer, EfficientGRPOConfig)}


def empty_model(config, four_bit: bool, device: torch.device, auto=AutoModelForCausalLM):
    """A model in bfloat16 whose weights are not filled; in 4 bits by bitsandbytes' own quantization, layer by
    layer.
    """
    quantizer = None
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
        if four_bit:
            four_bits = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
            quantizer = AutoHfQuantizer.from_config(four_bits, pre_quantized=False)
            quantizer.preprocess_model(model=model, device_map={"": device}, dtype=torch.bfloat16)
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            # Experts in 4 bits are bytes before anything is read.
            dtype = torch.bfloat16 if old.is_floating_point() else old.dtype
            data = torch.empty(old.shape, dtype=dtype, device=device)
            settings = _settings(module, name, quantizer)
            new = type(old)(data, requires_grad=False, **settings)
            # A 4-bit parameter quantizes itself when it is moved.
            setattr(module, name, new.to(device) if settings else new)
        for name, old in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty_like(old, device=device), persistent=False)
    model.tie_weights()
    if quantizer is not None:
        model.hf_quantizer = quantizer
        model.hf_device_map = {"": device}
        quantizer.postprocess_model(model)
    return model


def _settings(module, name: str, quantizer) -> dict:
    """Returns the arguments of bitsandbytes' parameter; none for other parameters."""
    if quantizer is None or name != "weight" or type(module).__name__ != "Linear4bit":
        return {}
    return {"quant_type": "nf4", "compress_statistics": True, "module": module}


def make_trainer(contestant: str, point: Point, device: torch.device, lora_dropout: float = 0.0, **settings):
    """A trainer on an empty model, before its first step."""
    cls, config_cls = TRAINERS[contestant]
    of_point = {
        "per_device_train_batch_size": point.group,
        "num_generations": point.group,
        "max_completion_length": point.completion,
        "gradient_checkpointing": point.checkpointing,
    }
    args = config_cls(output_dir=tempfile.mkdtemp(), bf16=True, report_to=[], **(of_point | settings))
    return cls(
        empty_model(MODELS[point.model], point.adapter == "qlora", device),
        lambda completions, **kwargs: [0.0] * len(completions),
        args,
        Dataset.from_dict({"prompt": ["a"] * point.group}),
        processing_class=small_tokenizer(),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=lora_dropout
        ),
    )


def ready(trainer):
    """Prepare the trainer as `Trainer.train` does before its first step; returns the model to call."""
    if trainer.args.gradient_checkpointing:
        checkpoint_activations(trainer)
    trainer.create_optimizer()
    model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = model
    if trainer.accelerator.is_fsdp2:
        trainer.model = model
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    return model


def batch_of(point: Point, device) -> dict:
    """The trainer's inputs: made on the host, so that masks and advantages have numbers."""
    vocabulary = MODELS[point.model].vocab_size
    batch = make_batch(vocabulary, point.prompt, point.completion, point.group, "equal", "cpu", seed=1)
    batch["completion_mask"][0, -1] = 0
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    return {key: value.to(device) for key, value in batch.items()}


def peak_of(run) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def step(trainer, model, batch) -> dict[str, int]:
    """Peak bytes of the loss with its backward, and of the rest of an optimizer step."""

    def loss():
        trainer.accelerator.backward(trainer.compute_loss(model, dict(batch)))

    def update():
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        model.zero_grad()

    return {"loss": peak_of(loss), "update": peak_of(update)}


def measure(contestant: str, point: Point, limit: int | None = None) -> dict[str, int]:
    """Bytes of a contestant: weights, adapter and batch, the second step, and what the allocator held of the card.

    Args:
        contestant: a key of `TRAINERS`.
        point: what is measured.
        limit: bytes that the allocator may take of the card.
    """
    device = torch.device("cuda", 0)
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (limit or whole) / whole), device)
    trainer = make_trainer(contestant, point, device)
    if contestant == "ours":
        trainer.sharing.compares = False  # if no kernel runs, there are no numbers to compare with padded rows
    model = ready(trainer)
    batch = batch_of(point, device)
    held = torch.cuda.memory_allocated()
    step(trainer, model, batch)  # from here on there is an optimizer state
    peaks = step(trainer, model, batch)
    if contestant == "ours" and not trainer.sharing.status.packs:
        raise RuntimeError("prefix sharing was off, so this is no measurement of it")
    return {
        "held": held,
        "loss": peaks["loss"],
        "step": max(peaks.values()),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def measured(contestant: str, point: Point, limit: int | None = None) -> dict:
    """[`measure`], or the allocator's message if memory was not enough. Afterwards nothing is left on the device."""
    try:
        return measure(contestant, point, limit)
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).splitlines()[0][:200]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def largest_that_fits(guess: int, fits: Callable[[int], bool]) -> int:
    """The largest group that fits: strides from `guess` that double until they pass it, then halves.

    Returns 0 if two completions, the smallest group, do not fit.
    """
    low = max(guess, 2)
    stride = 1
    if fits(low):
        while fits(low + stride):
            low += stride
            stride *= 2
        high = low + stride
    else:
        high = low
        low = max(high - stride, 1)
        while low > 1 and not fits(low):
            high = low
            stride *= 2
            low = max(high - stride, 1)
    # `high` does not fit, and `low` does or is 1.
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low if low > 1 else 0


def largest_groups(contestant: str, series: Point) -> Iterator[tuple[str, dict]]:
    """The largest group of a series on each card of `CARDS` that the device is large enough to replace.

    Yields:
        the card, and its `largest` (0 if two completions do not fit) and `tried` (whether each group that was run
        fits).
    """
    few, many = (measured(contestant, replace(series, group=group)).get("step") for group in MEASURED_GROUPS)
    for card in CARDS:
        limit = card * GIB - CONTEXT
        if limit > torch.cuda.get_device_properties(0).total_memory:
            continue
        guess = MEASURED_GROUPS[0]
        tried = {}
        if few and many:
            each = (many - few) / (MEASURED_GROUPS[1] - MEASURED_GROUPS[0])
            guess += int((limit - few) / each)

        def fits(group: int, limit=limit, tried=tried) -> bool:
            if group not in tried:
                tried[group] = "step" in measured(contestant, replace(series, group=group), limit)
            return tried[group]

        yield f"{card} GiB", {"largest": largest_that_fits(guess, fits), "tried": tried}


def in_own_process(part: str, point: Point, contestants: list[str], seconds: float) -> dict:
    """Returns the result of a part for a point, measured in a process of its own.

    If the process died or took too long, returns what it had written, with the reason as `error`.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        message = json.dumps([part, vars(point), contestants, str(out)])
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", message], cwd=REPOSITORY, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
            ended = None if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"out of time after {seconds:.0f} s"
        finally:
            end_group(process)
        result = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    return result if ended is None else {**result, "error": ended}


def work(part: str, point: Point, contestants: list[str], out: Path) -> None:
    """Measure a point, in the process that [`in_own_process`] starts; the file is written after each figure."""
    results = {}
    for contestant in contestants:
        rows = largest_groups(contestant, point) if part == "groups" else [(contestant, measured(contestant, point))]
        for name, row in rows:
            results[name] = row
            write_json(out, results)


class Results:
    """Rows by part and name, written after each change; those of the same versions and device are taken over.

    Args:
        path: of the JSON file.
        setting: what rows have in common; a file with another setting is begun again.
    """

    def __init__(self, path: Path, setting: dict):
        self.path = path
        self.content = {"setting": setting}
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before.get("setting") == setting:
                self.content = before

    def once(self, part: str, name: str, run: Callable[[], dict]) -> None:
        """Take the row that is there, or `run()`; a failure that is none of memory is tried again the next time."""
        rows = self.content.setdefault(part, {})
        if name not in rows or "error" in rows[name]:
            rows[name] = run()
            write_json(self.path, self.content)
            print(f"{part} | {name} | {rows[name]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--only", nargs="+", default=[], help="points whose name has all of these words")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a point of the grid; a series has five")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_bytes.json")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        part, fields, contestants, out = json.loads(args.worker)
        work(part, Point(**fields), contestants, Path(out))
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, emulated or not")
    device = torch.cuda.get_device_name()
    setting = {package: version(package) for package in ("torch", "transformers", "trl", "peft", "bitsandbytes")}
    results = Results(args.output, {"device": HEAD if "no kernels run" in device else device, **setting})

    def chosen(point: Point) -> bool:
        return all(word in point.name.split() for word in args.only)

    if "grid" in args.parts:
        for point in filter(chosen, GRID):
            run = partial(in_own_process, "grid", point, CONTESTANTS, args.seconds)
            results.once("grid", point.name, run)
    if "groups" in args.parts:
        for series, contestant in product(filter(chosen, SERIES), CONTESTANTS):
            name = f"{series.name.rpartition('/')[0]} {contestant}"
            run = partial(in_own_process, "groups", series, [contestant], 5 * args.seconds)
            results.once("groups", name, run)


if __name__ == "__main__":
    main()
