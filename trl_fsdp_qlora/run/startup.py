"""The block that a run prints once, before its first step: what will happen, with what, and what fell back."""

import math
from typing import Any

import torch
from transformers import TrainerCallback

from ..fsdp2_qlora.prepare import dense_shapes
from .redaction import redact


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
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no mixed precision"
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters()})
    rows = [
        (
            "optimizer step",
            f"{completions} completions in the loss = {completions / group:g} prompts × {group} completions"
            + (f", each used {trainer.num_iterations} times" if trainer.num_iterations > 1 else ""),
        ),
        (
            "generation batch",
            f"{args.generation_batch_size} completions = {args.generation_batch_size // group} prompts × {group}, "
            f"every {args.steps_per_generation * trainer.num_iterations / args.gradient_accumulation_steps:g} "
            "optimizer steps",
        ),
        ("whole run", f"{steps} optimizer steps, {steps * new / group:,.0f} prompts, {steps * new:,.0f} completions"),
    ]
    for kind, (count, size) in parameters.items():
        rows.append((f"{kind} parameters", f"{count:,} ({size / 2**20:,.1f} MiB)"))
    rows += [
        (
            "hardware",
            f"{ranks} process{'es' if ranks > 1 else ''} on {args.device.type}, {args.distributed_state.distributed_type.value}",
        ),
        ("precision", f"{precision}; parameters in {', '.join(dtypes)}"),
        ("rollouts", "vLLM (" + trainer.vllm_mode + ")" if trainer.use_vllm else "transformers"),
    ]
    rows += [("", line) if i else ("switched on", line) for i, line in enumerate(features)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["trl-fsdp-qlora", *(f"  {name:<{width}}  {text}" for name, text in rows)])


class StartupCallback(TrainerCallback):
    """Prints the start-up block once, on the main rank."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            print(redact(startup_block(self.trainer, state.max_steps, self.trainer.features())), flush=True)
