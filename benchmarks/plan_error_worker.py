"""One case of plan_error.py in a process of its own: three optimizer steps of a recipe, and the tensors that they took."""

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
    """

    def __init__(self, trainer):
        from torch.profiler import ProfilerActivity, profile
        from transformers import TrainerCallback

        self.clock, self.marks, self.lying = trainer.clock, [], 0
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        start, stop = self.clock.start, self.clock.stop
        self.clock.start = lambda name: (self._mark(name, True), start(name))
        self.clock.stop = lambda name: (stop(name), self._mark(name, False))
        meter = self

        class Steps(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 2:
                    meter.lying = lying_tensors()
                    meter.profiler.start()
                elif state.global_step == 3:
                    meter.profiler.stop()

        trainer.add_callback(Steps())

    def _mark(self, name: str, begins: bool) -> None:
        self.marks.append((time.time_ns(), name, begins))

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
    """Run a case; rank 0 writes what it found to `out`."""
    from trl import ModelConfig

    from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
    from trl_fsdp_qlora.planning.beside import longest_prompt
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
    given = model_arguments(config, model)
    trainer = EfficientGRPOTrainer(model.model_name_or_path, [spread], config, train, **given)
    meter = Meter(trainer)
    trainer.train()
    if not trainer.is_world_process_zero():
        return
    found = {
        "lying": meter.lying / MIB,
        "rises": meter.rises(),
        "features": trainer.features(),
        "tokens": longest_prompt(tokenizer, train),
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    worker(*sys.argv[1:])
