"""One case of plan_error.py in a process of its own: the recipe's plan, three optimizer steps, and what they took."""

import ctypes
import json
import sys
import time
from pathlib import Path

from plan_error_cases import BASE, CASES, prompts, spread

MIB = 2**20


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


def heap() -> dict[str, float]:
    """MiB of the C library's heap, and of what is free in it, by mallinfo2(3); nothing where there is no such function."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return {}
    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    fields = [(name, ctypes.c_size_t) for name in names]
    ask.restype = type("Mallinfo2", (ctypes.Structure,), {"_fields_": fields})
    found = ask()
    return {"heap": found.arena / MIB, "heap_free": found.fordblks / MIB}


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
    """Wraps a trainer's clock: when phases begin and end; profiles the third step.

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
                meter.first = False
                if state.global_step == 2:
                    meter.lying = lying_tensors()
                    meter.profiler.start()
                elif state.global_step == 3:
                    meter.profiler.stop()

        trainer.add_callback(Steps())

    def _mark(self, name: str, begins: bool) -> None:
        self.marks.append((time.time_ns(), name, begins))
        if self.first and not begins:
            self.at[name] = status("RssAnon", "RssFile") | heap()

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


def worker(name: str, model_folder: str, out: str) -> None:
    """Plan and run a case; rank 0 writes what it found to `out`."""
    from accelerate.utils import DistributedType
    from trl import ModelConfig

    from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
    from trl_fsdp_qlora.planning.beside import comparable, plan_first, watch
    from trl_fsdp_qlora.recipe.arguments import ScriptArguments, parse_recipe
    from trl_fsdp_qlora.recipe.checks import check_recipe
    from trl_fsdp_qlora.recipe.runner import model_arguments

    _, tokens, spreading, changes = CASES[name]
    if spreading.endswith("fsdp2"):
        force_fsdp()
    fields = BASE | changes
    ends = json.dumps({"min_new_tokens": fields["max_completion_length"]})
    fields |= {"model_name_or_path": model_folder, "dataset": "addition", "skip_accuracy": True, "max_steps": 3}
    fields |= {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    fields |= {"output_dir": str(Path(out).parent / "run"), "disable_tqdm": True, "generation_kwargs": ends}
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in fields.items()]
    script, config, model = parse_recipe((ScriptArguments, EfficientGRPOConfig, ModelConfig), words)
    tokenizer = check_recipe(script, config, model)
    train = prompts(tokens)
    kind = config.distributed_state.distributed_type
    if spreading.endswith("fsdp2"):
        config.distributed_state.distributed_type = DistributedType.FSDP  # which a plan on a GPU reads off the launch
    plan = plan_first(script, config, model, train, tokenizer)
    config.distributed_state.distributed_type = kind
    before = status("VmRSS", "RssAnon", "RssFile")
    given = model_arguments(config, model)
    trainer = EfficientGRPOTrainer(model.model_name_or_path, [spread], config, train, **given)
    watch(trainer, plan)
    meter = Meter(trainer)
    trainer.train()
    if plan is None:
        return
    steps = [entry for entry in trainer.state.log_history if "loss" in entry][:2]  # the third has the profiler in it
    peaks = {key for step in steps for key in step if key.startswith("memory/") and key.endswith("_peak_mib")}
    found = {
        "planned": plan.phases,
        "resident_planned": {phase: comparable(plan, phase) / MIB for phase in plan.phases},
        "resident": {key[7:-9]: max(step[key] for step in steps if key in step) for key in peaks},
        "lying": meter.lying / MIB,
        "rises": meter.rises(),
        "process": {"before": before, "after": meter.at},
        "unwritten": plan.unwritten / MIB,
        "features": trainer.features(),
        "tokens": plan.settings.prompt_tokens,
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    worker(*sys.argv[1:])
