"""Memory of groups of several sizes when prompts are computed once per optimizer step, and CPU seconds.

    python benchmarks/group_memory.py               # bytes saved for backward, and seconds of a cut micro-batch
    python benchmarks/group_memory.py --model DIR   # and the peak resident memory of a real model, by process

Through the trainers, on fixed completions (see `any_batch_size.py`), LoRA, float32, one thread.

- Bytes: the distinct storages saved for backward that are alive at once, at most, in a step of micro-batches of one
  row.
- Resident memory: the peak (VmHWM) of a process in its first optimizer step, the comparison with stock included. Each
  case runs in a fork of its own, so that no case finds memory that another one freed.
- Seconds: a group in one micro-batch that `tokens_per_pass` cuts, next to the same group in one pass with gradient
  checkpointing.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch
from any_batch_size import make_trainer, seconds_of_step
from synthetic import RESULTS, cpu_name, make_model
from transformers import AutoModelForCausalLM

from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

VOCABULARY = 1024


class Saved:
    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class LiveSavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """The most bytes of distinct storages that are saved for backward at once, without the parameters of `model`."""

    def __init__(self, model):
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.uses: dict[int, int] = {}
        self.now = self.peak = 0
        super().__init__(self._pack, lambda saved: saved.tensor)

    def _pack(self, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        size = storage.nbytes()
        saved = Saved(tensor)
        if key not in self.parameters:
            self.uses[key] = self.uses.get(key, 0) + 1
            if self.uses[key] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(saved, self._let_go, key, size)
        return saved

    def _let_go(self, key: int, size: int) -> None:
        self.uses[key] -= 1
        if not self.uses[key]:
            del self.uses[key]
            self.now -= size


def make_ours(model, point, **options):
    ours = EfficientGRPOTrainer, EfficientGRPOConfig
    return make_trainer(*ours, model, point, VOCABULARY, compact_generation=False, **options)


def saved_bytes(point) -> int:
    """Bytes of a step after the first, because the first one compares with stock."""
    trainer = make_ours(make_model(SimpleNamespace(device="cpu", vocabulary=VOCABULARY, shape="tiny")), point)
    trainer.train()
    gc.collect()
    saved = LiveSavedBytes(trainer.model)
    with saved:
        trainer.train()
    return saved.peak


def _resident(results, model, point, options) -> None:
    torch.set_num_threads(1)
    trainer = make_ours(model, point, **options)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = _status("VmRSS")
    trainer.train()
    results.put((before, _status("VmHWM")))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def resident(model, point, **options) -> tuple[int, int]:
    """Resident bytes before a step and at its peak."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_resident, args=(results, model, point, options))
    process.start()
    measured = results.get()
    process.join()
    return measured


def seconds(point, budgets: list[int], runs: int) -> dict[str, float]:
    """Medians of CPU seconds of a step in turns: cut to each of the budgets, and in one checkpointed pass."""
    model = make_model(SimpleNamespace(device="cpu", vocabulary=VOCABULARY, shape="cpu"))
    trainers = {f"cut to {budget}": make_ours(model, point, tokens_per_pass=budget) for budget in budgets}
    trainers["checkpointed"] = make_ours(model, point, gradient_checkpointing=True)
    seconds_by_name: dict[str, list[float]] = {name: [] for name in trainers}
    for run in range(runs + 1):  # the first one warms up
        for name, trainer in trainers.items():
            elapsed = seconds_of_step(trainer)
            if run:
                seconds_by_name[name].append(elapsed)
    return {name: statistics.median(values) for name, values in seconds_by_name.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model whose resident memory is measured")
    parser.add_argument("--groups", type=int, nargs="*", default=[8, 32, 128], help="of which bytes are counted")
    parser.add_argument("--resident", type=int, nargs=2, default=[256, 64], metavar=("PROMPT", "COMPLETION"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--skip_seconds", action="store_true")
    parser.add_argument("--output", default="group_memory", help="file stem under benchmarks/results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict = {"setting": {"device": cpu_name(), "threads": 1, "torch": torch.__version__}}
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        prompt, completion = args.resident
        budget = 2 * (prompt + completion)
        results["resident"] = {}
        for group in (8, 64):
            for name, rows, options in (("row", 1, {}), ("cut", group, {"tokens_per_pass": budget})):
                before, peak = resident(model, (prompt, completion, group, rows), **options)
                results["resident"][f"{name} {group}"] = [before, peak]
                print(
                    f"resident, group of {group}, {name}: {before / 1e6:.0f} MB before, {peak / 1e6:.0f} MB",
                    flush=True,
                )
    results["saved"] = {}
    for group in args.groups:
        results["saved"][group] = saved_bytes((1024, 256, group, 1))
        print(f"saved for backward, group of {group}: {results['saved'][group] / 1e6:.2f} MB", flush=True)
    if not args.skip_seconds:
        results["seconds"] = seconds((512, 64, 16, 16), [640, 800, 1152], args.runs)
        print(f"CPU seconds: {results['seconds']}", flush=True)
    (Path(RESULTS) / f"{args.output}.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
