"""Speed-up of A*-PO over processes: the report's own table, seconds per phase, effective batch held equal.

    python benchmarks/a_star_po_speedup.py --processes 1 2 --out benchmarks/results/a_star_po_speedup -- \
        --config recipes/small-base/a_star_po/config_quick.yaml --use_cpu true --max_steps 30
    python benchmarks/a_star_po_speedup.py --processes 1 2 4 8 --price 2.50 --out scaling -- \
        --config recipes/Qwen2.5-3B/a_star_po/config_report_1gpu.yaml

What follows `--` are arguments of `recipes/a_star_po.py`, for one process; with N processes the accumulation steps, then
the batch of each, are divided by N. Every run starts with an empty cache. Phases are wall seconds of rank 0:

- `V* sampling`: stage 1, all of it, the wait for the slowest rank included;
- `rollout`, `reference`, `forward`, `backward`, `optimizer`, `other`: of all steps together; `backward` includes
- `all-reduce`: from the moment a gradient bucket is handed over until it is summed (it may overlap with the backward);
- `evaluation`: of one measurement on the held-out problems.

Prints a table and writes JSON. On a machine whose processes share cores, caches and memory bandwidth the speed-up says
what the division of work costs, not what more hardware would gain.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PHASES = [
    "V* sampling",
    "rollout",
    "reference",
    "forward",
    "backward",
    "all-reduce",
    "optimizer",
    "other",
    "evaluation",
]


def timed_trainer(seconds: dict[str, float]) -> tuple[type, Any]:
    """A trainer class whose phases are added to `seconds`, and the callback that reads them and times training."""
    from transformers import TrainerCallback

    from trl_fsdp_qlora import AStarPOTrainer

    class Timed(AStarPOTrainer):
        def _compute_loss(self, model, inputs):
            with self.clock.phase("forward"):
                return super()._compute_loss(model, inputs)

    class Watch(TrainerCallback):
        def watch(self, trainer):
            self.trainer = trainer

        def on_train_begin(self, args, state, control, **kwargs):
            self.began = time.perf_counter()
            accelerator, wrapped = self.trainer.accelerator, self.trainer.model_wrapped
            accelerator.backward = self.trainer.clock.timed("backward", accelerator.backward)
            if hasattr(wrapped, "register_comm_hook"):
                wrapped.register_comm_hook(None, timed_all_reduce)

        def on_train_end(self, args, state, control, **kwargs):
            self.seconds = time.perf_counter() - self.began

        def on_log(self, args, state, control, logs=None, **kwargs):
            names = {"generate": "rollout", "reference_pass": "reference"}
            for name, value in (logs or {}).items():
                if name.startswith("time/"):
                    phase = name.removeprefix("time/").removesuffix("_s")
                    phase = names.get(phase, phase)
                    if phase != "value_sampling":
                        seconds[phase if phase in PHASES else "other"] += value

    def timed_all_reduce(_, bucket):
        from torch import distributed

        started = time.perf_counter()
        work = distributed.all_reduce(bucket.buffer().div_(distributed.get_world_size()), async_op=True)

        def done(future):
            seconds["all-reduce"] += time.perf_counter() - started
            return future.value()[0]

        return work.get_future().then(done)

    return Timed, Watch()


def worker(out: str, argv: list[str]) -> None:
    """One rank: stage 1, the steps, one evaluation."""
    from transformers import AutoTokenizer
    from trl import ModelConfig, get_peft_config, get_quantization_config

    from trl_fsdp_qlora import AStarPOConfig
    from trl_fsdp_qlora.publishing.card import hardware, software
    from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe
    from trl_fsdp_qlora.recipe.data import load_data
    from trl_fsdp_qlora.recipe.runner import reward_functions

    script, config, model = parse_recipe((ScriptArguments, AStarPOConfig, ModelConfig), argv)
    train, test = load_data(script)
    seconds = dict.fromkeys(PHASES, 0.0)
    trainer_class, watch = timed_trainer(seconds)
    with tempfile.TemporaryDirectory() as scratch:
        # One cache for all ranks of this run, and for no other run.
        config.value_cache = os.environ["SPEEDUP_CACHE"]
        config.output_dir, config.save_strategy, config.disable_tqdm = scratch, "no", True
        config.eval_strategy, config.logging_steps, config.logging_strategy = "no", 1, "steps"
        config.do_eval = False
        trainer = trainer_class(
            model.model_name_or_path,
            reward_functions(script),
            config,
            train,
            processing_class=AutoTokenizer.from_pretrained(model.model_name_or_path),
            quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model),
            callbacks=[watch],
        )
        watch.watch(trainer)
        seconds["V* sampling"] = trainer.estimate_values().seconds
        trainer.train()
        metrics = trainer.evaluate(test)
        seconds["evaluation"] = metrics["eval_runtime"]
        if trainer.accelerator.is_main_process:
            ranks = trainer.accelerator.num_processes
            result = {
                "processes": ranks,
                "batch": config.per_device_train_batch_size * config.gradient_accumulation_steps * ranks,
                "steps": trainer.state.global_step,
                "seconds": seconds,
                "training_seconds": watch.seconds,
                "accuracy": metrics["eval_accuracy"],
                "n": metrics["eval_n"],
                "hardware": hardware(),
                # Over the machine's last minute; above the number of processes, something else was running too.
                "load": os.getloadavg()[0],
                "software": software(),
            }
            Path(out).write_text(json.dumps(result))


def launch(processes: int, argv: list[str]) -> dict:
    """Run `worker` on `processes` ranks and return what rank 0 measured."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "result.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={processes}",
            f"--master_port={port}",
        ]
        command += [__file__, "--worker", str(out), "--", *argv, *divided(processes, argv)]
        environment = {**os.environ, "SPEEDUP_CACHE": f"{scratch}/values"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        subprocess.run(command, env=environment, check=True)
        return json.loads(out.read_text())


def divided(processes: int, argv: list[str]) -> list[str]:
    """Overrides that keep the effective batch of one process.

    Raises:
        SystemExit: the batch cannot be divided.
    """
    from trl import ModelConfig

    from trl_fsdp_qlora import AStarPOConfig
    from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe

    _, config, _ = parse_recipe((ScriptArguments, AStarPOConfig, ModelConfig), argv)
    batch, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    while processes > 1:
        if accumulation % 2 == 0:
            accumulation //= 2
        elif batch % 2 == 0:
            batch //= 2
        else:
            sys.exit(f"a batch of {batch} x {accumulation} cannot be divided by {processes} more processes")
        processes /= 2
    return ["--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation)]


def table(results: list[dict], price: float | None) -> list[str]:
    """Seconds per phase, speed-up and efficiency against the first entry, and the cost of a run."""
    first = results[0]
    lines = ["| | " + " | ".join(f"{r['processes']} process{'es' * (r['processes'] > 1)}" for r in results) + " |"]
    lines.append("|---|" + "---|" * len(results))

    def row(name, values):
        lines.append(f"| {name} | {' | '.join(values)} |")

    row("load of the machine", [f"{r['load']:.1f}" for r in results])
    row("effective batch × steps", [f"{r['batch']} × {r['steps']}" for r in results])
    for phase in PHASES:
        row(f"{phase}, s", [f"{r['seconds'][phase]:.2f}" for r in results])
    totals = [r["seconds"]["V* sampling"] + r["training_seconds"] + r["seconds"]["evaluation"] for r in results]
    row("whole run, s", [f"{total:.2f}" for total in totals])
    parts = {
        "V* sampling": [r["seconds"]["V* sampling"] for r in results],
        "training": [r["training_seconds"] for r in results],
        "evaluation": [r["seconds"]["evaluation"] for r in results],
        "whole run": totals,
    }
    for name, values in parts.items():
        speedups = [values[0] / value for value in values]
        ratios = [r["processes"] / first["processes"] for r in results]
        row(
            f"speed-up (efficiency), {name}",
            [f"{s:.2f} ({100 * s / ratio:.0f}%)" for s, ratio in zip(speedups, ratios, strict=True)],
        )
    if price is not None:
        costs = [price * r["processes"] * total / 3600 for r, total in zip(results, totals, strict=True)]
        row(f"cost at {price:.2f} a device-hour", [f"{cost:.2f}" for cost in costs])
    return lines


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, argv = sys.argv[1:split], sys.argv[split + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="powers of two")
    parser.add_argument("--price", type=float, help="of a device for an hour")
    parser.add_argument("--out", default="benchmarks/results/a_star_po_speedup")
    arguments = parser.parse_args(own)
    if arguments.worker:
        worker(arguments.worker, argv)
        return
    results = [launch(processes, argv) for processes in arguments.processes]
    lines = table(results, arguments.price)
    print("\n".join(lines))
    out = Path(arguments.out).with_suffix(".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"arguments": argv, "table": lines, "results": results}, indent=1))


if __name__ == "__main__":
    main()
