"""Trainers on models without numbers, and the peak bytes of their steps: what benchmarks/gpu_bytes.py measures."""

import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset
from end_to_end import checkpoint_activations
from gpu_bytes import GIB, Point, largest_that_fits
from peft import LoraConfig
from scaling import MODELS as LARGE
from synthetic import make_batch, small_tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen2Config
from transformers.quantizers import AutoHfQuantizer
from trl import GRPOConfig, GRPOTrainer

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.fsdp2_qlora.generation import gathered
from trl_fsdp_qlora.prefix_sharing import first_pass
from trl_fsdp_qlora.tools.planning.hardware import CONTEXT, read_hardware
from trl_fsdp_qlora.tools.planning.plan import PROCESS, ROOM, make_plan
from trl_fsdp_qlora.tools.planning.settings import from_words, read_launch
from trl_fsdp_qlora.utils.files import write_json

SMALL = {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
MODELS = {
    "0.5B": Qwen2Config(
        **SMALL, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14
    ),
    "1.5B": Qwen2Config(
        **SMALL, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12
    ),
    "7B": LARGE["7B"],
    "32B": LARGE["32B"],
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


def skip_the_comparison() -> None:
    """Use packed rows without the comparison: if no kernel runs, there are no numbers to compare with padded rows."""

    def only_packed(model, packed, padded, scored_BC, cuts, *args) -> None:
        packed_cuts, _ = cuts
        first_rows, _ = packed_cuts[0]
        with torch.no_grad():
            packed(first_rows)

    first_pass.compare = only_packed


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
    model = ready(trainer)
    batch = batch_of(point, device)
    held = torch.cuda.memory_allocated()
    step(trainer, model, batch)  # from here on there is an optimizer state
    peaks = step(trainer, model, batch)
    if contestant == "ours" and not trainer.sharing.is_active:
        raise RuntimeError("prefix sharing was off, so this is no measurement of it")
    return {
        "held": held,
        "loss": peaks["loss"],
        "step": max(peaks.values()),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def measure_rank(point: Point, prefix_sharing: str) -> dict:
    """Bytes of a rank of an FSDP2 launch: `base` by kind, `held` with the adapter, `gathered`, then as [`measure`].

    Every rank builds the whole 4-bit base on its device and gives it up to FSDP2 before anything is measured; in a run
    the first rank of a node reads it into host memory instead.
    """
    device = PartialState().device
    trainer = make_trainer("ours", point, device, prefix_sharing=prefix_sharing)
    model = ready(trainer)
    batch = batch_of(point, device)
    held = torch.cuda.memory_allocated()
    with torch.no_grad(), gathered(model):
        whole = torch.cuda.memory_allocated()
    step(trainer, model, batch)  # from here on there is an optimizer state
    peaks = step(trainer, model, batch)
    if trainer.sharing.is_active != (prefix_sharing == "auto"):
        raise RuntimeError(f"prefix sharing is not {prefix_sharing!r}, so this is no measurement of it")
    return {
        "base": trainer.base_bytes.to_dict(),
        "held": held,
        "gathered": whole,
        "loss": peaks["loss"],
        "step": max(peaks.values()),
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


def plan_of(point: Point) -> dict[str, int]:
    """Returns what `trl-fsdp-qlora plan` predicts for the step, without the CUDA context and the allocator's slack."""
    fields = {
        "model_name_or_path": point.model,
        "dtype": "bfloat16",
        "use_peft": True,
        "lora_r": 16,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "load_in_4bit": point.adapter == "qlora",
        "use_bnb_nested_quant": True,
        "per_device_train_batch_size": point.group,
        "num_generations": point.group,
        "max_completion_length": point.completion,
        "gradient_checkpointing": point.checkpointing,
        "bf16": True,
    }
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    settings = from_words(words, EfficientGRPOConfig, read_launch(None), prompt_tokens=point.prompt)
    phases = make_plan(settings, read_hardware("h200"), MODELS[point.model]).phases
    return {"step": sum(size for name, size in phases["forward_backward"].items() if name not in (PROCESS, ROOM))}


def largest_groups(contestant: str, series: Point, cards: list[int]) -> Iterator[tuple[str, dict]]:
    """The largest group of a series on each card of `cards` GiB that the device is large enough to stand for.

    Yields:
        the card, and its `largest` (0 if two completions do not fit) and `tried` (whether each group that was run
        fits).
    """
    few, many = (measured(contestant, replace(series, group=group)).get("step") for group in MEASURED_GROUPS)
    for card in cards:
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


def main() -> None:
    task, fields, out, *arguments = json.loads(sys.argv[1])
    point = Point(**fields)
    path = Path(out)
    results = {}
    skip_the_comparison()
    if task == "grid":
        for contestant in arguments[0]:
            results[contestant] = plan_of(point) if contestant == "plan" else measured(contestant, point)
            write_json(path, results)
    elif task == "groups":
        for card, row in largest_groups(arguments[0], point, arguments[1]):
            results[card] = row
            write_json(path, results)
    else:
        row = measure_rank(point, arguments[0])
        if PartialState().is_main_process:
            write_json(path, {"rank 0": row})
        PartialState().wait_for_everyone()
        PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
