"""The block that a run prints once, before its first step: what will happen, with what, and what fell back."""

import math
from typing import Any

import torch
from transformers import TrainerCallback

from ..fsdp2_qlora.prepare import dense_shapes
from .redaction import redact

_PROMPT_CHARACTERS = 800  # of a rendered prompt; the middle of a longer one is left out


def parameter_bytes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """`{"trainable": (parameters, bytes), "frozen": (parameters, bytes)}` of the whole model, over all ranks.

    A 4-bit weight counts as what it unpacks to.
    """
    packed = dense_shapes(model)
    counts = {"trainable": [0, 0], "frozen": [0, 0]}
    for parameter in model.parameters():
        entry = counts["trainable" if parameter.requires_grad else "frozen"]
        state = getattr(parameter, "quant_state", None)
        entry[0] += math.prod(packed.get(id(parameter), parameter.shape if state is None else state.shape))
        entry[1] += parameter.numel() * parameter.element_size()
    return {kind: (n, size) for kind, (n, size) in counts.items()}


def startup_block(trainer: Any, steps: int, features: list[str]) -> str:
    """The start-up text of `trainer`.

    Args:
        trainer: an `EfficientGRPOTrainer`.
        steps: optimizer steps of the whole run.
        features: lines on what is switched on and what fell back, with the reason.
    """
    args = trainer.args
    ranks = args.world_size
    group = trainer.num_generations
    completions = args.per_device_train_batch_size * args.gradient_accumulation_steps * ranks
    new = completions / trainer.num_iterations
    parameters = parameter_bytes(trainer.model)
    dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters()}))
    mixed = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    precision = dtypes if mixed is None else f"{mixed} mixed precision, parameters in {dtypes}"
    every = args.steps_per_generation * trainer.num_iterations / args.gradient_accumulation_steps
    rows = [
        (
            "optimizer step",
            f"{completions} completions in the loss = {completions / group:g} prompts × {group} completions"
            + (f", each used {trainer.num_iterations} times" if trainer.num_iterations > 1 else ""),
        ),
        (
            "generation batch",
            f"{args.generation_batch_size} completions = {args.generation_batch_size // group} prompts × {group}, "
            + ("every optimizer step" if every == 1 else f"every {every:g} optimizer steps"),
        ),
        ("whole run", f"{steps} optimizer steps, {steps * new / group:,.0f} prompts, {steps * new:,.0f} completions"),
    ]
    for kind, (count, size) in parameters.items():
        rows.append((f"{kind} parameters", f"{count:,} ({size / 2**20:,.1f} MiB)"))
    rows += [
        ("hardware", _hardware(args)),
        ("precision", precision),
        ("rollouts", "vLLM (" + trainer.vllm_mode + ")" if trainer.use_vllm else "transformers"),
    ]
    rows += [("", line) if i else ("switched on", line) for i, line in enumerate(features)]
    width = max(len(name) for name, _ in rows) + 1
    return "\n".join(["trl-fsdp-qlora", *(f"  {name + ':' if name else '':<{width}} {text}" for name, text in rows)])


def _hardware(args: Any) -> str:
    ranks = args.world_size
    layouts = {
        "FSDP": "weights sharded over them by FSDP",
        "DEEPSPEED": "DeepSpeed",
        "MULTI_GPU": "a copy of the model in each (DDP)",
        "MULTI_CPU": "a copy of the model in each (DDP)",
    }
    kind = args.distributed_state.distributed_type.value
    layout = layouts.get(kind, kind) if ranks > 1 or kind in ("FSDP", "DEEPSPEED") else None
    where = {"cpu": "the CPU", "cuda": "CUDA"}.get(args.device.type, args.device.type)
    return f"{ranks} process{'es' if ranks > 1 else ''} on {where}" + (f", {layout}" if layout else "")


def first_prompt(trainer: Any) -> str | None:
    """The first training prompt as the model reads it, special tokens and all, with its length.

    `None` where that cannot be said before training: prompts with images or environments, and streamed data.
    """
    data = trainer.train_dataset
    columns = set(getattr(data, "column_names", None) or ())
    plain = not trainer._is_vlm and trainer.environment_factories is None and not columns & {"image", "images"}
    if not plain or "prompt" not in columns or not hasattr(data, "__getitem__"):
        return None
    ids = trainer._tokenize_prompts([data[0]["prompt"]])[0][0]
    text = trainer.processing_class.decode(ids)
    if len(text) > _PROMPT_CHARACTERS:
        half = _PROMPT_CHARACTERS // 2
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    return f"the first training prompt, {len(ids)} tokens:\n{lines}"


class StartupCallback(TrainerCallback):
    """Prints the start-up block and the first prompt once, on the main rank."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            block = startup_block(self.trainer, state.max_steps, self.trainer.features())
            print(redact("\n".join(filter(None, (block, first_prompt(self.trainer))))), flush=True)
