"""Seconds of a step with a vLLM server, with `rollouts_ahead` and without: a server on one core, a trainer on another.

    .venv-vllm/bin/python benchmarks/rollouts_ahead.py --model DIR_OR_HUB_ID --data SVAMP.json

Starts `vllm serve` on the first of `--cores` and trains on the second, LoRA in float32, `--prompts` x `--group`
completions of `--tokens` tokens each (they do not end early, so every step has the same work). Runs without and with
the option alternate; the first two steps of each are left out (the first compares packed rows with padded ones, and
with the option the second waits less for that). A draw is what the client waited for its answer, the rest of a step
is everything else. `--reward_seconds` makes the reward sleep. `--picture` draws one run of each kind as a
timeline.

Cores that do other things too make both sides slower at once, and the ratio means little then.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

for name, value in {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}.items():
    os.environ.setdefault(name, value)

UNMEASURED_STEPS = 2
COLOURS = {
    "draw": "#4878a8", "wait_for_server": "#eeeeee", "weight_sync": "#d0a030", "reward": "#c06060", "train": "#60a070",
}  # fmt: skip


@contextmanager
def vllm_server(model: str, core: int, port: int):
    """The address of `vllm serve` on one core, once it answers."""
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_OMP_THREADS_BIND": str(core),
    }  # fmt: skip
    command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--port", str(port), "--enable-lora"]
    command += ["--max-lora-rank", "16", "--logprobs-mode", "processed_logprobs", "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        try:
            while process.poll() is None:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            else:
                log.seek(0)
                sys.exit(log.read().decode(errors="replace")[-4000:])
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def run(url: str, ahead: int, words: argparse.Namespace) -> dict:
    """One training: its spans `(name, start, end)`, and by step its seconds."""
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback

    from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
    from trl_fsdp_qlora.engines.vllm.engine import AdapterServer
    from trl_fsdp_qlora.tools.data.datasets import read_problems, to_prompts

    spans = []
    steps = []
    stock = AdapterServer.generate

    def generate(self, *args, **kwargs):
        started = time.perf_counter()
        try:
            return stock(self, *args, **kwargs)
        finally:
            spans.append(("draw", started, time.perf_counter()))

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            self.began = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            steps.append((self.began, time.perf_counter()))

    def reward(completions, **_):
        time.sleep(words.reward_seconds)
        return [float(sum(c.isdigit() for c in completion[-1]["content"])) for completion in completions]

    rows = words.prompts * words.group
    with tempfile.TemporaryDirectory() as folder:
        config = EfficientGRPOConfig(
            folder,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=url,
            rollouts_ahead=ahead,
            per_device_train_batch_size=rows,
            num_generations=words.group,
            max_completion_length=words.tokens,
            generation_kwargs={"ignore_eos": True},
            max_steps=words.steps + UNMEASURED_STEPS,
            learning_rate=1e-5,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_steps=1,
        )
        trainer = EfficientGRPOTrainer(
            words.model,
            reward,
            config,
            to_prompts(read_problems(words.data)),
            processing_class=AutoTokenizer.from_pretrained(words.model),
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
            callbacks=[Steps()],
        )
        drain = trainer.clock.drain_spans

        def recorded():
            drained = drain()
            spans.extend(drained)
            return drained

        trainer.clock.drain_spans = recorded
        AdapterServer.generate = generate
        try:
            trainer.train()
        finally:
            AdapterServer.generate = stock
    return {"ahead": ahead, "spans": spans, "steps": steps}


def seconds_of(result: dict) -> list[dict[str, float]]:
    """By measured step: its seconds, those of the draw of its batch, and of all that is not waiting."""
    draws = [(start, end) for name, start, end in result["spans"] if name == "draw"]
    rows = []
    for number, (began, ended) in enumerate(result["steps"][UNMEASURED_STEPS:], start=UNMEASURED_STEPS):
        start, end = draws[number]
        waited = end - start
        if result["ahead"]:
            waits = [(a, b) for name, a, b in result["spans"] if name == "wait_for_server" and began <= a < ended]
            waited = sum(b - a for a, b in waits)
        rows.append({"step": ended - began, "draw": end - start, "rest": ended - began - waited})
    return rows


def picture(results: list[dict], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(len(results), 1, figsize=(10, 1.4 * len(results) + 0.8), sharex=True)
    for axis, result in zip(axes, results, strict=True):
        first = result["steps"][0][0]
        for name, start, end in result["spans"]:
            if start < first:
                continue
            what = name if name in COLOURS else "train"
            if name == "generate" or (name == "draw" and not result["ahead"]):
                # Without the option the client's wait is inside the phase `generate`: both rows show the draw.
                what = "draw" if name == "draw" else None
            if what is not None:
                row = 1 if what == "draw" else 0
                axis.barh(row, end - start, left=start - first, color=COLOURS[what], height=0.8)
        axis.set_yticks([0, 1], ["trainer", "server"])
        axis.set_title(f"rollouts_ahead: {result['ahead']}", fontsize=10, loc="left")
    axes[-1].set_xlabel("seconds")
    names = {"wait_for_server": "wait", "weight_sync": "send the adapter"}
    handles = [Patch(color=colour, label=names.get(name, name)) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, ncol=len(handles), loc="upper right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, help="as a recipe's `dataset`")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=2, help="runs without and with the option")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--reward_seconds", type=float, default=0.0)
    parser.add_argument("--cores", type=int, nargs=2, default=[0, 1], help="the server's and the trainer's")
    parser.add_argument("--port", type=int, default=8011)
    parser.add_argument("--output", help="a JSON file")
    parser.add_argument("--picture", help="a PNG file")
    words = parser.parse_args()
    with vllm_server(words.model, words.cores[0], words.port) as url:
        os.sched_setaffinity(0, {words.cores[1]})
        import torch

        torch.set_num_threads(1)
        results = [run(url, ahead, words) for _ in range(words.rounds) for ahead in (0, 1)]
    rows = {ahead: [row for r in results if r["ahead"] == ahead for row in seconds_of(r)] for ahead in (0, 1)}
    medians = {
        ahead: {name: statistics.median(row[name] for row in of_kind) for name in ("step", "draw", "rest")}
        for ahead, of_kind in rows.items()
    }
    print("| rollouts_ahead | step, s | draw, s | rest, s |\n|---|---|---|---|")
    for ahead, found in medians.items():
        print(f"| {ahead} | {found['step']:.2f} | {found['draw']:.2f} | {found['rest']:.2f} |")
    slower = max(medians[0]["draw"], medians[0]["rest"])
    speedup = medians[0]["step"] / medians[1]["step"]
    print(f"{speedup:.2f} times faster; a step takes {medians[1]['step'] / slower:.2f} x the slower side without it")
    if words.output:
        content = {"setting": vars(words), "load": os.getloadavg(), "medians": medians, "rows": rows}
        Path(words.output).write_text(json.dumps(content, indent=2) + "\n")
    if words.picture:
        picture(results[:2], words.picture)


if __name__ == "__main__":
    main()
