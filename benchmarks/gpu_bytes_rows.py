"""Peak bytes of CUDA's allocator by the length of one completion: checkpointing, offloaded activations, tiles.

    python benchmarks/gpu_bytes_rows.py [--only "Qwen3-8B QLoRA, offload"] [--card 24] [--layers 2 4 | --layers 36]
    [--output benchmarks/results/gpu_bytes_rows.json]

Each point is an optimizer step of `EfficientGRPOTrainer` on one group of 8, row by row, behind a prompt of 1,024
tokens that is computed once: losses, backwards, clipping and the fused AdamW, with an optimizer state. Its completions
are the longest that `plan` expects to fit the card (docs/longest_rows.json). Next to the counted bytes stand those of
the plan, without the CUDA context and the allocator's slack, and the pinned host memory of offloaded activations.

As in benchmarks/gpu_bytes.py no weight is read, the first step's comparison is left out, and on an emulated device no
kernel runs: what a kernel allocates inside is not counted there. An emulated device takes a minute for a layer or two
at these lengths. So the model has as few layers as `--layers` has, and the bytes of the whole one lie on the line
through the two; with one number nothing is extrapolated.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu_bytes import GIB, HEAD, REPOSITORY, RESULTS, Point, Results
from gpu_bytes_trainers import MODELS, batch_of, make_trainer, peak_of, ready, skip_the_comparison

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.tools.planning.hardware import read_hardware
from trl_fsdp_qlora.tools.planning.known_models import known_config
from trl_fsdp_qlora.tools.planning.plan import PROCESS, ROOM, make_plan
from trl_fsdp_qlora.tools.planning.settings import from_words, read_launch

PROMPT, GROUP = 1024, 8
DROPOUT = 0.05  # of LoRA, TRL's default; it keeps a mask and an input of each projection
CARDS = (16, 24, 48, 80)  # the columns of docs/longest_rows.json
OPTIONS = {
    "checkpointing alone": {"mlp_tokens_per_tile": "off", "gradient_checkpointing_kwargs": {}},
    "offload": {"mlp_tokens_per_tile": "off", "gradient_checkpointing_kwargs": {"offload": True}},
    "offload and tiles": {"mlp_tokens_per_tile": "auto", "gradient_checkpointing_kwargs": {"offload": True}},
}


def point_of(name: str, completion: int) -> Point:
    model, adapter = name.split()
    return Point(model, adapter.lower(), True, PROMPT, completion, GROUP)


def config_of(name: str, layers: int | None):
    config = known_config(name.split()[0])
    config.max_position_embeddings = 2**18  # nobody asks for longer rows
    if layers is not None:
        config.num_hidden_layers = layers
        if hasattr(config, "layer_types"):
            config.layer_types = config.layer_types[:layers]
    return config


def counted(name: str, option: str, completion: int, layers: int | None) -> dict:
    """Peak bytes of a step, and the most pinned host memory that was in use."""
    device = torch.device("cuda", 0)
    point = point_of(name, completion)
    MODELS[point.model] = config_of(name, layers)
    trainer = make_trainer(
        "ours",
        point,
        device,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=GROUP,
        lora_dropout=DROPOUT,
        **OPTIONS[option],
    )
    model = ready(trainer)
    batch = batch_of(point, device)
    rows = []
    for row in range(GROUP):
        rows.append({key: x if x.ndim == 0 else x[row : row + 1] for key, x in batch.items()})
    trainer._buffered_inputs = rows
    trainer._prepare_inputs = lambda _: rows[trainer._step % GROUP]
    trainer.current_gradient_accumulation_steps = GROUP
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    trainer.optimizer.step()  # from here on there is an optimizer state
    model.zero_grad()

    def step():
        for row in range(GROUP):
            trainer.accelerator.gradient_state._set_sync_gradients(row == GROUP - 1)
            trainer.training_step(model, rows[row], None)
        trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        model.zero_grad()

    started = time.perf_counter()
    peak = peak_of(step)
    if not trainer.sharing.is_active:
        raise RuntimeError(f"prefix sharing was off, so this is no measurement of it: {trainer.sharing.describe()}")
    host = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
    return {"step": peak, "host": host, "seconds": time.perf_counter() - started}


def planned(name: str, option: str, completion: int) -> dict:
    """The bytes of the same step by `plan`, and those of pinned host memory."""
    fields = {
        "model_name_or_path": name.split()[0],
        "dtype": "bfloat16",
        "bf16": True,
        "use_peft": True,
        "lora_r": 16,
        "lora_dropout": DROPOUT,
        "lora_target_modules": "all-linear",
        "load_in_4bit": name.endswith("QLoRA"),
        "use_bnb_nested_quant": True,
        "use_vllm": True,
        "vllm_mode": "server",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": GROUP,
        "num_generations": GROUP,
        "max_completion_length": completion,
        "mlp_tokens_per_tile": OPTIONS[option]["mlp_tokens_per_tile"],
        "gradient_checkpointing_kwargs": json.dumps(OPTIONS[option]["gradient_checkpointing_kwargs"]),
    }
    words = [word for field, value in fields.items() for word in (f"--{field}", str(value))]
    settings = from_words(words, EfficientGRPOConfig, read_launch(None), prompt_tokens=PROMPT)
    plan = make_plan(settings, read_hardware("h200"), config_of(name, None))
    phase = plan.phases["forward_backward"]
    return {"step": sum(size for part, size in phase.items() if part not in (PROCESS, ROOM)), "host": plan.host_bytes}


def on_the_line(values: list[float], layers: list[int], whole: int) -> int:
    """The bytes of `whole` layers from those of one or two numbers of layers."""
    if len(layers) == 1:
        return round(values[0])
    each = (values[1] - values[0]) / (layers[1] - layers[0])
    return round(values[0] + (whole - layers[0]) * each)


def in_own_process(*task) -> dict:
    command = [sys.executable, __file__, "--task", json.dumps(task)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def row(name: str, option: str, completion: int, layers: list[int] | None) -> dict:
    """The counted and the planned bytes of a step of the whole model."""
    whole = config_of(name, None).num_hidden_layers
    layers = layers or [whole]
    points = [in_own_process("count", name, option, completion, few) for few in layers]
    both = {"completion": completion, "layers": layers, "points": points}
    both["counted"] = {key: on_the_line([point[key] for point in points], layers, whole) for key in ("step", "host")}
    both["planned"] = in_own_process("plan", name, option, completion)
    return both


def table(rows: dict[str, dict]) -> str:
    lines = ["| | completion | counted GiB | planned | counted host GiB | planned |", "| --- |" + " ---: |" * 5]
    for name, row in rows.items():
        sizes = [row[by][of] / GIB for of in ("step", "host") for by in ("counted", "planned")]
        lines.append(f"| {name} | {row['completion']:,} | " + " | ".join(f"{size:.2f}" for size in sizes) + " |")
    return "\n".join(lines)


def run_task(task: str, *arguments) -> None:
    skip_the_comparison()
    if "no kernels run" in torch.cuda.get_device_name():
        from triton.runtime.interpreter import InterpretedFunction

        InterpretedFunction.run = lambda *args, **kwargs: None  # there are no numbers
    print(json.dumps({"count": counted, "plan": planned}[task](*arguments)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name begins with one of these")
    parser.add_argument("--card", type=int, default=24, choices=CARDS, help="GB, of docs/longest_rows.json")
    parser.add_argument(
        "--layers", type=int, nargs="+", help="one or two numbers of layers; the whole model if absent"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu_bytes_rows.json")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        run_task(*json.loads(args.task))
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device, emulated or not")
    name = torch.cuda.get_device_name()
    results = Results(args.output, {"device": HEAD if "no kernels run" in name else name, "torch": torch.__version__})
    longest = json.loads((REPOSITORY / "docs" / "longest_rows.json").read_text(encoding="utf-8"))
    for model, cells in longest.items():
        for option, of_cards in cells.items():
            label = f"{model}, {option}"
            completion, _ = of_cards[CARDS.index(args.card)]
            if completion and (not args.only or label in args.only):
                results.once(
                    f"{args.card} GB", label, lambda c=completion, m=model, o=option: row(m, o, c, args.layers)
                )
    print(table(results.content.get(f"{args.card} GB", {})))


if __name__ == "__main__":
    main()
