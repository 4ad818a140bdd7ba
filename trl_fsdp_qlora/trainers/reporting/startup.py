"""The block that a run prints once, before its first step: settings, data, hardware and fallbacks."""

import math
import sys
from collections.abc import Callable

import torch
from datasets import IterableDataset
from torch.distributed.fsdp import FSDPModule
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainingArguments
from trl import GRPOConfig

from ...compat.older_gpus import lacks_bf16
from ...utils.nonfatal import nonfatal
from ...utils.plain import counted
from ..starting.input_checks import PICTURES, columns_of

_PROMPT_CHARACTERS = 800  # of a rendered prompt; the middle of a longer one is left out
_DEVICES = {"cpu": "the CPU", "cuda": "CUDA"}
_LAYOUTS = {
    "FSDP": "weights sharded over them by FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MULTI_GPU": "a copy of the model in each (DDP)",
    "MULTI_CPU": "a copy of the model in each (DDP)",
}


Row = tuple[str, str]  # heading and text of a line


def parameter_bytes(model: torch.nn.Module) -> dict[str, tuple[int, int]]:
    """`{"trainable": (parameters, bytes), "frozen": (parameters, bytes)}` of the whole model, over all ranks.

    A 4-bit weight counts as the parameters that it unpacks to.
    """
    packed = {}
    if isinstance(model, FSDPModule):
        from ...fsdp2_qlora.prepare import dense_shapes

        packed = dense_shapes(model)
    weights = {"trainable": 0, "frozen": 0}
    sizes = {"trainable": 0, "frozen": 0}
    for parameter in model.parameters():
        part = "trainable" if parameter.requires_grad else "frozen"
        state = getattr(parameter, "quant_state", None)
        stored_shape = parameter.shape if state is None else state.shape
        dense_shape = packed.get(id(parameter), stored_shape)
        weights[part] += math.prod(dense_shape)
        sizes[part] += parameter.numel() * parameter.element_size()
    return {part: (weights[part], sizes[part]) for part in weights}


def _online_rows(args: GRPOConfig, steps: int) -> list[Row]:
    """Rows on an optimizer step and on the run, for a trainer that draws completions."""
    group = args.num_generations
    uses = args.num_iterations
    rows_of_rank = args.per_device_train_batch_size * args.gradient_accumulation_steps
    completions = rows_of_rank * args.world_size
    prompts = counted(completions / group, "prompt")
    step = f"{counted(completions, 'completion')} in the loss = {prompts} × {counted(group, 'completion')}"
    if uses > 1:
        step += f", each used {uses} times"

    batch = args.generation_batch_size
    prompts = counted(batch // group, "prompt")
    when = "every optimizer step"
    steps_per_batch = args.steps_per_generation * uses / args.gradient_accumulation_steps
    if steps_per_batch != 1:
        when = f"every {steps_per_batch:g} optimizer steps"
    generation = f"{counted(batch, 'completion')} = {prompts} × {group}, {when}"

    drawn = steps * completions / uses
    prompts = counted(round(drawn / group), "prompt")
    drawn_completions = counted(round(drawn), "completion")
    whole = f"{counted(steps, 'optimizer step')}, {prompts}, {drawn_completions}"
    return [
        ("optimizer step", step),
        ("generation batch", generation),
        ("whole run", whole),
    ]


def _pair_rows(args: TrainingArguments, steps: int) -> list[Row]:
    """Rows on an optimizer step and on the run, for preference pairs."""
    pairs_of_rank = args.per_device_train_batch_size * args.gradient_accumulation_steps
    pairs = pairs_of_rank * args.world_size
    step = f"{counted(pairs, 'preference pair')} in the loss"
    all_pairs = counted(steps * pairs, "preference pair")
    whole = f"{counted(steps, 'optimizer step')}, {all_pairs}"
    return [("optimizer step", step), ("whole run", whole)]


def startup_block(args: TrainingArguments, model: torch.nn.Module, steps: int, features: list[Row]) -> str:
    """The start-up text of a run of `steps` optimizer steps.

    Args:
        args: the run's config.
        model: the model that is trained, with its part on this rank.
        features: `(heading, line)`; the headings are `"on"`, `"off"` and `"as stock TRL"`.
    """
    draws = "num_generations" in vars(args)
    rows = _online_rows(args, steps) if draws else _pair_rows(args, steps)
    for part, (count, size) in parameter_bytes(model).items():
        mebibytes = size / 2**20
        rows.append((f"{part} parameters", f"{count:,} ({mebibytes:,.1f} MiB)"))
    rows.append(("hardware", _hardware(args)))
    rows.append(("precision", _precision(args, model)))
    if draws:
        engine = f"vLLM ({args.vllm_mode})" if args.use_vllm else "transformers"
        rows.append(("rollouts", engine))
    rows += _grouped(features)

    width = 1 + max(len(heading) for heading, _ in rows)
    lines = ["trl-fsdp-qlora"]
    for heading, text in rows:
        label = f"{heading}:" if heading else ""
        lines.append(f"  {label:<{width}} {text}")
    return "\n".join(lines)


def _grouped(features: list[Row]) -> list[Row]:
    """Features in the order of the headings, each of which is written before its first line only."""
    rows = []
    for heading in ("on", "off", "as stock TRL"):
        label = heading
        for heading_of_line, line in features:
            if heading_of_line == heading:
                rows.append((label, line))
                label = ""
    return rows


def _hardware(args: TrainingArguments) -> str:
    """The number of processes, their device, and how they share the model."""
    ranks = args.world_size
    device = args.device.type
    layout = args.distributed_state.distributed_type.value
    processes = "1 process" if ranks == 1 else f"{ranks} processes"
    text = f"{processes} on {_DEVICES.get(device, device)}"
    if ranks > 1 or layout in ("FSDP", "DEEPSPEED"):
        text += f", {_LAYOUTS.get(layout, layout)}"
    return text


def _precision(args: TrainingArguments, model: torch.nn.Module) -> str:
    """The dtypes of the parameters, and mixed precision if it is on."""
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    text = ", ".join(sorted(dtypes))
    if args.bf16 or args.fp16:
        computed = "bfloat16" if args.bf16 else "float16"
        text = f"{computed} mixed precision, parameters in {text}"
    if "bfloat16" in text and lacks_bf16(args.device):
        text += "; this GPU has no bfloat16 and emulates it: fp16: true is faster"
    return text


def first_prompt(
    data: object, tokenize: Callable[[list], tuple] | None, decode: Callable[[list[int]], str]
) -> str | None:
    """The first training prompt as the model reads it, special tokens and all, with its length.

    It is `None` if it cannot be known before training: no `tokenize` (with environments), images, streamed data.
    """
    columns = columns_of(data)
    is_streamed = isinstance(data, IterableDataset)
    if tokenize is None or is_streamed or PICTURES & columns or "prompt" not in columns:
        return None
    prompts = [data[0]["prompt"]]
    ids_of_prompts, *_ = tokenize(prompts)
    ids = ids_of_prompts[0]
    text = decode(ids)
    omitted = len(text) - _PROMPT_CHARACTERS
    if omitted > 0:
        half = _PROMPT_CHARACTERS // 2
        text = f"{text[:half]} … {omitted} characters … {text[-half:]}"
    lines = [f"the first training prompt, {counted(len(ids), 'token')}:"]
    lines += [f"    {line}" for line in text.splitlines()]
    return "\n".join(lines)


class StartupCallback(TrainerCallback):
    """Prints the start-up block, for which `features` returns lines, and the first prompt, once, on the main rank."""

    def __init__(self, features: Callable[[], list[Row]], tokenize: Callable[[list], tuple] | None):
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
