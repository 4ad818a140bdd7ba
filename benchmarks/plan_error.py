"""How far a plan is from what its run then takes: small runs here, each in a process of its own.

    python benchmarks/plan_error.py [--smollm2 FOLDER] [--only NAME ...] [--again] [--output benchmarks/results/plan_error.json]

Each case is a recipe's run of three optimizer steps on the CPU, built by the functions that recipes/grpo.py calls, in float32. A plan
takes every completion to be as long as it may be and none to be left out, so that completions here may not end early
(`min_new_tokens`) and their rewards differ. Results are written after every case, and a case that is there already is not run again;
with `--again` it is planned anew, by the code as it is now, beside what was measured then (and with the process of then).

Two quantities are compared, of rank 0:

- the resident set at the peak of each phase in steps 1 and 2 (the first compares packed with padded rows, the second is the first
  with an optimizer's state), against the plan's whole phase: what a machine has to hold. It has the process, its libraries and what
  the C library keeps of freed memory in it;
- the bytes of tensors, against the plan's parts without the process: what lies there from step to step (weights and optimizer),
  and how far each phase rises above it in step 3, counted by torch's profiler from every allocation of its CPU allocator.

The error is planned / measured - 1: below zero the plan promised too little. The resident set has pages of libraries in it, of which
how many are there depends on the kernel; a case with next to no tensors (`process`) shows that part alone.
"""

import argparse
import datetime
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

from plan_error_cases import BASE, CASES, make_model

RESULTS = Path(__file__).parent / "results" / "plan_error.json"
WORKER = Path(__file__).with_name("plan_error_worker.py")
MIB = 2**20
SECONDS = 900.0  # of a case, before it is ended
# Phases of a plan -> phases on the trainer's clock.
PHASES = {
    "generate": ("generate",),
    "score": ("old_policy_pass", "reference_pass"),
    "forward_backward": ("forward_backward",),
    "optimizer": ("optimizer",),
}


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
                command = [sys.executable, str(WORKER), name, model_folder, str(outs[rank])]
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


def planned_again(name: str, model_folder: str, found: dict[str, Any]) -> dict[str, Any]:
    """`found` with the plan that the code makes now."""
    from trl_fsdp_qlora.planning.hardware import what_is_there
    from trl_fsdp_qlora.planning.plan import PROCESS, make_plan
    from trl_fsdp_qlora.planning.settings import Launch, from_yaml

    _, _, spreading, changes = CASES[name]
    ranks, kind = int(spreading[0]), spreading[2:] or "single"
    fields = BASE | changes | {"model_name_or_path": model_folder, "bf16": False, "use_cpu": True}
    fields["generation_kwargs"] = {"min_new_tokens": fields["max_completion_length"]}  # as in the run
    settings = from_yaml(None, fields, Launch(kind, ranks, use_cpu=True), prompt_tokens=found["tokens"])
    plan = make_plan(settings, hardware=what_is_there(ranks, use_cpu=True))
    process = found["planned"]["optimizer"][PROCESS]
    phases = {phase: parts | {PROCESS: process} for phase, parts in plan.phases.items()}
    resident = {phase: sum(parts.values()) / MIB for phase, parts in phases.items()}
    planned = {"planned": phases, "resident_planned": resident, "unwritten": plan.unwritten / MIB}
    return found | planned | {"planned_on": datetime.date.today().isoformat()}


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
    parser.add_argument("--again", action="store_true", help="plan anew what was measured; runs nothing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    from trl_fsdp_qlora.checkpoints.disk import write_json
    from trl_fsdp_qlora.publishing.card import hardware, software

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
            there = "planned" in content["cases"].get(name, {})
            if arguments.again and not there:
                continue
            if arguments.again or not there:
                path = arguments.smollm2 if shape == "smollm2" else str(Path(folder, shape))
                if not Path(path).is_dir():
                    make_model(Path(path), shape)
                if there:
                    content["cases"][name] = planned_again(name, path, content["cases"][name])
                else:
                    content["cases"][name] = run_case(name, path) | {"date": datetime.date.today().isoformat()}
                content["summary"] = summary(content["cases"])
                write_json(arguments.output, content)
            show(name, content["cases"][name])
    print(json.dumps(summary(content["cases"]), indent=1))


if __name__ == "__main__":
    main()
