"""How far a plan is from what its run then takes: small runs here, each in a process of its own.

    python benchmarks/plan_error.py [--smollm2 FOLDER] [--only NAME ...] [--output benchmarks/results/plan_error.json]

Each case is a recipe's run of two optimizer steps on the CPU, built by the functions that recipes/grpo.py calls, in float32. A plan
takes every completion to be as long as it may be and none to be left out, so that completions here may not end early
(`min_new_tokens`) and their rewards differ. Results are written after every case, and a case that is there already is not run again.

Two quantities are compared, of rank 0:

- the resident set at the peak of each phase of step 1, against the plan's whole phase: what a run prints after its first step,
  and what a machine has to hold. It has the process, its libraries and what the C library keeps of freed memory in it;
- the bytes of tensors, against the plan's parts without the process: what lies there from step to step (weights and optimizer),
  and how far each phase rises above it in step 2, counted by torch's profiler from every allocation of its CPU allocator.

The error is planned / measured - 1: below zero the plan promised too little. The resident set has pages of libraries in it, of which
how many are there depends on the kernel; a case with next to no tensors (`process`) shows that part alone.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "plan_error.json"
MIB = 2**20
SECONDS = 240.0  # of a case, before it is ended
# Phases of a plan -> phases on the trainer's clock.
PHASES = {
    "generate": ("generate",),
    "score": ("old_policy_pass", "reference_pass"),
    "forward_backward": ("forward_backward",),
    "optimizer": ("optimizer",),
}

_NARROW = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPES = {
    "process": {**_NARROW, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64},
    "narrow": {**_NARROW, "num_hidden_layers": 6, "vocab_size": 4096},
    "vocabulary": {**_NARROW, "num_hidden_layers": 2, "vocab_size": 65536},
    "wide": {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 8192,
    },
}
BASE = {
    "per_device_train_batch_size": 16,
    "num_generations": 8,
    "max_completion_length": 48,
    "gradient_checkpointing": False,
    "use_peft": True,
    "lora_r": 16,
    "lora_target_modules": "all-linear",
    "learning_rate": 1e-4,
    "dtype": "float32",
}
OFF, KEPT, FULL, FOUR = (
    {"prefix_sharing": "off"},
    {"gradient_checkpointing": True},
    {"use_peft": False, "learning_rate": 1e-6},
    {"load_in_4bit": True},
)
SHORT = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 24}
# name -> (model, tokens of the prompt's text, ranks and how they are spread, fields that differ from BASE)
CASES: dict[str, tuple[str, int, str, dict[str, Any]]] = {
    "process": ("process", 8, "1", {**SHORT, "max_completion_length": 8}),
    "narrow": ("narrow", 128, "1", {}),
    "narrow padded": ("narrow", 128, "1", OFF),
    "narrow checkpointing": ("narrow", 128, "1", KEPT),
    "narrow padded checkpointing": ("narrow", 128, "1", OFF | KEPT),
    "narrow groups of 16": ("narrow", 128, "1", {"num_generations": 16, "per_device_train_batch_size": 32}),
    "narrow groups of 4": ("narrow", 128, "1", {"num_generations": 4}),
    "narrow long prompt": ("narrow", 512, "1", {"max_completion_length": 16}),
    "narrow long completion": ("narrow", 32, "1", {"max_completion_length": 160, "per_device_train_batch_size": 8}),
    "narrow full": ("narrow", 128, "1", FULL),
    "narrow full padded": ("narrow", 128, "1", FULL | OFF),
    "narrow reference": ("narrow", 128, "1", {"beta": 0.1}),
    "narrow full reference padded": ("narrow", 128, "1", FULL | OFF | {"beta": 0.1}),
    "narrow accumulating": (
        "narrow",
        128,
        "1",
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 8},
    ),
    "vocabulary": ("vocabulary", 64, "1", {}),
    "vocabulary padded": ("vocabulary", 64, "1", OFF),
    "vocabulary full": ("vocabulary", 64, "1", FULL),
    "wide": ("wide", 96, "1", SHORT),
    "wide padded checkpointing": ("wide", 96, "1", SHORT | OFF | KEPT),
    "wide full checkpointing": ("wide", 96, "1", SHORT | FULL | KEPT),
    "wide 4-bit": ("wide", 96, "1", SHORT | FOUR),
    "wide 4-bit checkpointing": ("wide", 96, "1", SHORT | FOUR | KEPT),
    "wide 4-bit padded": ("wide", 96, "1", SHORT | FOUR | OFF),
    "two ranks narrow": ("narrow", 128, "2 ddp", {}),
    "two ranks narrow full": ("narrow", 128, "2 ddp", FULL),
    "two ranks wide sharded": ("wide", 96, "2 fsdp2", SHORT),
    "two ranks wide 4-bit sharded": ("wide", 96, "2 fsdp2", SHORT | FOUR | KEPT),
    "SmolLM2": ("smollm2", 64, "1", SHORT),
    "SmolLM2 checkpointing": ("smollm2", 64, "1", SHORT | KEPT),
    "SmolLM2 padded checkpointing": ("smollm2", 64, "1", SHORT | OFF | KEPT),
    "SmolLM2 4-bit checkpointing": ("smollm2", 64, "1", SHORT | FOUR | KEPT),
}


# --- a case, in a process of its own -----------------------------------------------------------------------------------


def make_model(folder: Path, shape: str) -> None:
    """A Llama of one of [`SHAPES`] with the character tokenizer, in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from trl_fsdp_qlora.recipe.small_base import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(**SHAPES[shape], **ends, max_position_embeddings=1024, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def spread(completions, **_columns) -> list[float]:
    """Rewards of two kinds by turns: none is its group's mean, so that every completion has an advantage."""
    return [float(place % 2) for place in range(len(completions))]


def prompts(tokens: int):
    """Different prompts of about `tokens` tokens, as long as each other: digits, which both tokenizers take one by one."""
    from datasets import Dataset

    texts = [f"{place:03d}" + "1234567890" * (tokens // 10 + 1) for place in range(64)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text[:tokens]}]} for text in texts])


def force_fsdp() -> None:
    """Let accelerate shard on the CPU as it does on GPUs; by itself it makes plain DDP of it without a word."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    stock = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs):
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def status(*names: str) -> dict[str, float]:
    """MiB of lines of /proc/self/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) / 1024 for name in names}


def lying_tensors() -> int:
    """Bytes of the distinct storages of all tensors that Python knows."""
    import gc

    import torch

    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu" and item.layout is torch.strided:
            if hasattr(item, "to_local"):
                item = item.to_local()
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Meter:
    """Wraps a trainer's clock: when phases begin and end; profiles the second step.

    Attributes:
        lying: bytes of tensors between the steps.
        marks: `(nanoseconds, phase, whether it begins)`.
        at: MiB of the process by kind, after phases of the first step.
    """

    def __init__(self, trainer):
        from torch.profiler import ProfilerActivity, profile
        from transformers import TrainerCallback

        self.clock, self.marks, self.lying, self.at = trainer.clock, [], 0, {}
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.first = True
        start, stop = self.clock.start, self.clock.stop
        self.clock.start = lambda name: (self._mark(name, True), start(name))
        self.clock.stop = lambda name: (stop(name), self._mark(name, False))
        meter = self

        class Steps(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    meter.lying, meter.first = lying_tensors(), False
                    meter.profiler.start()
                else:
                    meter.profiler.stop()

        trainer.add_callback(Steps())

    def _mark(self, name: str, begins: bool) -> None:
        self.marks.append((time.time_ns(), name, begins))
        if self.first and not begins:
            self.at[name] = status("RssAnon", "RssFile")

    def rises(self) -> dict[str, float]:
        """Phase -> MiB of tensors at its peak above what lay there when the step began."""
        events = [event for event in self.profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        steps = [(event.start_ns(), event.nbytes(), None, None) for event in events]
        begin = min(when for when, *_ in steps)
        steps += [(when, 0, name, begins) for when, name, begins in self.marks if when >= begin - 10**8]
        open_, found, level = set(), {}, 0
        for _, size, name, begins in sorted(steps, key=lambda step: step[0]):
            level += size
            if begins:
                open_.add(name)
                found.setdefault(name, level)
            elif name is not None:
                open_.discard(name)
            for one in open_:
                found[one] = max(found[one], level)
        return {name: most / MIB for name, most in found.items()}


def unwritten(plan) -> int:
    """Bytes of the buffer of TRL's kernel behind the vocabulary: allocated, but no page of the process, and not planned."""
    from trl_fsdp_qlora.planning.passes import loss_shape
    from trl_fsdp_qlora.scoring.logprobs import VOCABULARY_TILE
    from trl_fsdp_qlora.upstream.memory import TRL_VOCABULARY_CHUNK

    if plan.packed and plan.settings.model.use_peft:
        return 0  # the frozen head's kernel scores
    chunk = VOCABULARY_TILE if plan.packed else TRL_VOCABULARY_CHUNK
    rows = min(4096, loss_shape(plan.settings, plan.packed, False).scored)
    return rows * max(0, chunk - plan.config.vocab_size) * 4


def worker(name: str, model_folder: str, out: str) -> None:
    """Plan and run a case; rank 0 writes what it found to `out`."""
    from trl import ModelConfig

    from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
    from trl_fsdp_qlora.planning.beside import comparable, plan_first, watch
    from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe
    from trl_fsdp_qlora.recipe.building import model_arguments
    from trl_fsdp_qlora.recipe.checks import check_recipe

    _, tokens, spreading, changes = CASES[name]
    if spreading.endswith("fsdp2"):
        force_fsdp()
    fields = BASE | changes
    ends = json.dumps({"min_new_tokens": fields["max_completion_length"]})
    fields |= {"model_name_or_path": model_folder, "dataset": "addition", "skip_accuracy": True, "max_steps": 2}
    fields |= {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    fields |= {"output_dir": str(Path(out).parent / "run"), "disable_tqdm": True, "generation_kwargs": ends}
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in fields.items()]
    script, config, model = parse_recipe((ScriptArguments, EfficientGRPOConfig, ModelConfig), words)
    tokenizer = check_recipe(script, config, model)
    train = prompts(tokens)
    plan = plan_first(script, config, model, train, tokenizer)
    before = status("VmRSS", "RssAnon", "RssFile")
    given = model_arguments(config, model)
    trainer = EfficientGRPOTrainer(model.model_name_or_path, [spread], config, train, **given)
    watch(trainer, plan)
    meter = Meter(trainer)
    trainer.train()
    if plan is None:
        return
    step = next(entry for entry in trainer.state.log_history if "loss" in entry)
    found = {
        "planned": plan.phases,
        "resident_planned": {phase: comparable(plan, phase) / MIB for phase in plan.phases},
        "resident": {k[7:-9]: v for k, v in step.items() if k.startswith("memory/") and k.endswith("_peak_mib")},
        "lying": meter.lying / MIB,
        "rises": meter.rises(),
        "process": {"before": before, "after": meter.at},
        "unwritten": unwritten(plan) / MIB,
        "features": trainer.features(),
        "tokens": plan.settings.prompt_tokens,
    }
    Path(out).write_text(json.dumps(found))


# --- all cases ---------------------------------------------------------------------------------------------------------


def run_case(name: str, model_folder: str) -> dict[str, Any]:
    """What rank 0 of a case found, or `{"failed": ...}`; nothing that it started is left."""
    ranks = int(CASES[name][2].split()[0])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    if CASES[name][2].endswith("fsdp2"):
        shared |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        }
        shared |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
        shared |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        outs, logs = ([Path(folder, f"{rank}.{end}") for rank in range(ranks)] for end in ("json", "txt"))
        processes = []
        try:
            for rank in range(ranks):
                mine = {**environment, **(shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {})}
                command = [sys.executable, __file__, "--worker", name, model_folder, str(outs[rank])]
                with logs[rank].open("w") as log:
                    processes.append(subprocess.Popen(command, env=mine, stdout=log, stderr=subprocess.STDOUT))
            deadline = time.monotonic() + SECONDS
            codes = [process.wait(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {SECONDS:.0f} s"}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes) or not outs[0].is_file():
            return {"failed": f"exit codes {codes}: {logs[0].read_text()[-600:]}"}
        return json.loads(outs[0].read_text())


def parts_of(planned: dict[str, int]) -> tuple[float, float]:
    """MiB of a planned phase's tensors: `(that lie there between the steps, that it adds)`."""
    from trl_fsdp_qlora.planning import plan, static

    lying = {static.BASE_4BIT, static.STATE, static.BASE, static.REFERENCE, static.TRAINED, static.OPTIMIZER}
    # DDP's buckets lie there too, where neither Python nor the profiler's second step sees them.
    # The comparison is in the first step alone, and a mapped file's pages are no tensor's.
    unseen = {plan.PROCESS, plan.LIBRARIES, plan.ROOM, plan.COMPARISON, plan.FILE, static.BUCKETS}
    held = sum(size for name, size in planned.items() if name in lying)
    added = sum(size for name, size in planned.items() if name not in lying | unseen)
    return held / MIB, added / MIB


def pairs(found: dict[str, Any]) -> dict[str, dict[str, tuple[float, float]]]:
    """`(planned, measured)` MiB: of tensors by component, of the resident set by phase, and of its peak."""
    planned = found["planned"]
    components = {"lying": (parts_of(planned["optimizer"])[0], found["lying"])}
    resident = {}
    for phase, names in PHASES.items():
        if phase not in planned:
            continue
        rises = [found["rises"][name] for name in names if name in found["rises"]]
        if rises and phase != "optimizer":
            unwritten = 0.0 if phase == "generate" else found.get("unwritten", 0.0)
            components[phase] = (parts_of(planned[phase])[1] + unwritten, max(rises))
        peaks = [found["resident"][name] for name in names if name in found["resident"]]
        if peaks:
            resident[phase] = (found["resident_planned"][phase], max(peaks))
    peak = tuple(max(pair[side] for pair in resident.values()) for side in (0, 1))
    return {"components": components, "resident": resident, "peak": {"peak": peak}}


def error(pair: tuple[float, float]) -> float:
    planned, measured = pair
    return planned / measured - 1


def counts(pair: tuple[float, float], peak: float) -> bool:
    """Whether a component is large enough to be judged: a hundredth of the resident set."""
    return max(pair) >= peak / 100


def summary(cases: dict[str, Any]) -> dict[str, Any]:
    """Median and largest absolute error, and the lowest, of each of the three kinds, over all cases."""
    errors: dict[str, list[float]] = {"components": [], "resident": [], "peak": []}
    for found in cases.values():
        if "failed" in found:
            continue
        compared = pairs(found)
        peak = compared["peak"]["peak"][1]
        for kind, values in compared.items():
            errors[kind] += [error(pair) for pair in values.values() if kind != "components" or counts(pair, peak)]
    return {
        kind: {
            "compared": len(values),
            "median": statistics.median(map(abs, values)),
            "worst": max(values, key=abs),
            "lowest": min(values),
        }
        for kind, values in errors.items()
        if values
    }


def show(name: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{name}: FAILED, {found['failed']}", flush=True)
        return
    print(name)
    for kind, values in pairs(found).items():
        for part, pair in values.items():
            print(f"  {kind:<11}{part:<17}{pair[0]:>9.1f}{pair[1]:>9.1f} MiB{100 * error(pair):>+8.1f}%")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", help="folder of SmolLM2-135M-Instruct; its cases are left out without")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="; ".join(CASES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(*arguments.worker)
        return
    from trl_fsdp_qlora.publishing.card import hardware, software
    from trl_fsdp_qlora.run.manifest import write_json

    unknown = set(arguments.only or ()) - CASES.keys()
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    content = {"hardware": hardware(), "software": software(), "cases": {}, "summary": {}}
    if arguments.output.is_file():
        content["cases"] = json.loads(arguments.output.read_text())["cases"]
    chosen = [name for name in arguments.only or CASES if CASES[name][0] != "smollm2" or arguments.smollm2]
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            shape = CASES[name][0]
            if "planned" not in content["cases"].get(name, {}):
                path = arguments.smollm2 if shape == "smollm2" else str(Path(folder, shape))
                if not Path(path).is_dir():
                    make_model(Path(path), shape)
                content["cases"][name] = run_case(name, path)
                content["summary"] = summary(content["cases"])
                write_json(arguments.output, content)
            show(name, content["cases"][name])
    print(json.dumps(summary(content["cases"]), indent=1))


if __name__ == "__main__":
    main()
