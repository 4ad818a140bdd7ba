"""The block that a run prints once, before its first step: settings, data, hardware and fallbacks."""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from datasets import IterableDataset
from torch.distributed.fsdp import FSDPModule
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ...compat.older_gpus import lacks_bf16
from ...utils.nonfatal import nonfatal
from ...utils.plain import counted
from ..starting.input_checks import columns_of

_PROMPT_CHARACTERS = 800  # of a rendered prompt; the middle of a longer one is left out
_DEVICES = {"cpu": "the CPU", "cuda": "CUDA"}
_LAYOUTS = {
    "FSDP": "weights sharded over them by FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MULTI_GPU": "a copy of the model in each (DDP)",
    "MULTI_CPU": "a copy of the model in each (DDP)",
}


def parameter_bytes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """`{"trainable": (parameters, bytes), "frozen": (parameters, bytes)}` of the whole model, over all ranks.

    A 4-bit weight counts as the parameters that it unpacks to.
    """
    packed = {}
    if isinstance(model, FSDPModule):
        from ...fsdp2_qlora.prepare import dense_shapes

        packed = dense_shapes(model)
    counts = {"trainable": (0, 0), "frozen": (0, 0)}
    for parameter in model.parameters():
        kind = "trainable" if parameter.requires_grad else "frozen"
        state = getattr(parameter, "quant_state", None)
        weights = math.prod(packed.get(id(parameter), parameter.shape if state is None else state.shape))
        counts[kind] = counts[kind][0] + weights, counts[kind][1] + parameter.numel() * parameter.element_size()
    return counts


def _online_rows(args: Any, steps: int) -> list[tuple[str, str]]:
    """Rows on an optimizer step and on the run, for a trainer that draws completions."""
    group = args.num_generations
    uses = args.num_iterations
    completions = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    new = completions / uses  # completions drawn for each optimizer step, on average
    batch = args.generation_batch_size
    every = args.steps_per_generation * uses / args.gradient_accumulation_steps
    again = f", each used {uses} times" if uses > 1 else ""
    when = "every optimizer step" if every == 1 else f"every {every:g} optimizer steps"
    step = f"{counted(completions, 'completion')} in the loss"
    step += f" = {counted(completions / group, 'prompt')} × {counted(group, 'completion')}{again}"
    whole = (
        counted(steps, "optimizer step"),
        counted(round(steps * new / group), "prompt"),
        counted(round(steps * new), "completion"),
    )
    drawn = f"{counted(batch, 'completion')} = {counted(batch // group, 'prompt')} × {group}, {when}"
    return [("optimizer step", step), ("generation batch", drawn), ("whole run", ", ".join(whole))]


def _pair_rows(args: Any, steps: int) -> list[tuple[str, str]]:
    """Rows on an optimizer step and on the run, for preference pairs."""
    pairs = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    whole = f"{counted(steps, 'optimizer step')}, {counted(steps * pairs, 'preference pair')}"
    return [("optimizer step", f"{counted(pairs, 'preference pair')} in the loss"), ("whole run", whole)]


def startup_block(args: Any, model: torch.nn.Module, steps: int, features: list[tuple[str, str]]) -> str:
    """The start-up text of a run of `steps` optimizer steps.

    Args:
        args: the run's config.
        model: the model that is trained, with its part on this rank.
        features: `(heading, line)`; the headings are `"on"`, `"off"` and `"as stock TRL"`.
    """
    rows = _online_rows(args, steps) if "num_generations" in vars(args) else _pair_rows(args, steps)
    for kind, (count, size) in parameter_bytes(model).items():
        rows.append((f"{kind} parameters", f"{count:,} ({size / 2**20:,.1f} MiB)"))
    rows += [("hardware", _hardware(args)), ("precision", _precision(args, model))]
    if "use_vllm" in vars(args):
        rows.append(("rollouts", f"vLLM ({args.vllm_mode})" if args.use_vllm else "transformers"))
    for heading in ("on", "off", "as stock TRL"):
        lines = [line for heading_of, line in features if heading_of == heading]
        rows += [(heading if i == 0 else "", line) for i, line in enumerate(lines)]
    width = max(len(name) for name, _ in rows) + 1
    lines = ["trl-fsdp-qlora"]
    for name, text in rows:
        label = f"{name}:" if name else ""
        lines.append(f"  {label:<{width}} {text}")
    return "\n".join(lines)


def _hardware(args: Any) -> str:
    """The number of processes, their device, and how they share the model."""
    ranks = args.world_size
    device = args.device.type
    layout = args.distributed_state.distributed_type.value
    text = f"{ranks} process{'es' if ranks > 1 else ''} on {_DEVICES.get(device, device)}"
    if ranks > 1 or layout in ("FSDP", "DEEPSPEED"):
        text += f", {_LAYOUTS.get(layout, layout)}"
    return text


def _precision(args: Any, model: torch.nn.Module) -> str:
    """The dtypes of the parameters, and mixed precision if it is on."""
    text = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}))
    if args.bf16 or args.fp16:
        text = f"{'bfloat16' if args.bf16 else 'float16'} mixed precision, parameters in {text}"
    if "bfloat16" in text and lacks_bf16(args.device):
        text += "; this GPU has no bfloat16 and emulates it: fp16: true is faster"
    return text


def first_prompt(
    data: Any, tokenize: Callable[[list], tuple] | None, decode: Callable[[list[int]], str]
) -> str | None:
    """The first training prompt as the model reads it, special tokens and all, with its length.

    It is `None` if it cannot be known before training: no `tokenize` (with environments), images, streamed data.
    """
    columns = columns_of(data)
    pictures = columns & {"image", "images"}
    if tokenize is None or pictures or "prompt" not in columns or isinstance(data, IterableDataset):
        return None
    ids = tokenize([data[0]["prompt"]])[0][0]
    text = decode(ids)
    half = _PROMPT_CHARACTERS // 2
    if len(text) > 2 * half:
        text = f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    return f"the first training prompt, {counted(len(ids), 'token')}:\n{lines}"


class StartupCallback(TrainerCallback):
    """Prints the start-up block, for which `features` returns lines, and the first prompt, once, on the main rank."""

    def __init__(self, features: Callable[[], list[tuple[str, str]]], tokenize: Callable[[list], tuple] | None):
        self._features = features
        self._tokenize = tokenize
        self.block = ""  # the start-up block, once it was printed

    @nonfatal("the start-up block")
    def on_train_begin(self, args, state, control, model=None, processing_class=None, train_dataloader=None, **kwargs):
        if not state.is_world_process_zero:
            return
        self.block = startup_block(args, model, state.max_steps, self._features())
        prompt = first_prompt(train_dataloader.dataset, self._tokenize, processing_class.decode)
        # Not `print`: transformers' progress bar is there by now, and the text's first line would follow the bar.
        tqdm.write("\n".join(filter(None, (self.block, prompt))))
        sys.stdout.flush()
