"""How far a plan's tensors are from what its run then allocates: small runs here, each in a process of its own.

    python benchmarks/plan_error.py [--smollm2 FOLDER] [--only NAME ...] [--again] [--output benchmarks/results/plan_error.json]

Each case is a recipe's run of three optimizer steps on the CPU, built by the functions that recipes/grpo.py calls, in float32. A plan
takes every completion to be as long as it may be and none to be left out, so that completions here may not end early
(`min_new_tokens`) and their rewards differ. Results are written after every case, and a case that is there already is not run again;
with `--again` it is planned anew, by the code as it is now, beside what was measured then.

Compared are the bytes of tensors of rank 0: what lies there from step to step (weights and optimizer), and how far each phase rises
above it in step 3, counted by torch's profiler from every allocation of its CPU allocator. The error is planned / measured - 1:
below zero the plan promised too little.
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


def planned(name: str, model_folder: str, tokens: int) -> dict[str, float]:
    """MiB by component of the plan that the code makes now: `lying`, and what each phase adds to it."""
    from trl_fsdp_qlora.compat.memory import TRL_VOCABULARY_CHUNK
    from trl_fsdp_qlora.planning import model, passes, plan
    from trl_fsdp_qlora.planning.hardware import what_is_there
    from trl_fsdp_qlora.planning.settings import Launch, from_yaml

    _, _, spreading, changes = CASES[name]
    ranks, kind = int(spreading[0]), spreading[2:] or "single"
    fields = BASE | changes | {"model_name_or_path": model_folder, "bf16": False, "use_cpu": True}
    fields["generation_kwargs"] = {"min_new_tokens": fields["max_completion_length"]}  # as in the run
    settings = from_yaml(None, fields, Launch(kind, ranks, use_cpu=True), prompt_tokens=tokens)
    found = plan.make_plan(settings, hardware=what_is_there(ranks, use_cpu=True))
    lies = {model.BASE_4BIT, model.STATE, model.BASE, model.REFERENCE, model.TRAINED, model.OPTIMIZER}
    # DDP's buckets lie there too, where neither Python nor the profiler's third step sees them; the comparison is in the first.
    unseen = lies | {plan.PROCESS, plan.COMPARISON, model.BUCKETS}
    values = {"lying": sum(found.phases["optimizer"].get(name, 0) for name in lies) / MIB}
    for phase, parts in found.phases.items():
        values[phase] = sum(size for part, size in parts.items() if part not in unseen) / MIB
    if (
        not found.packed
    ):  # the buffer of TRL's kernel has columns behind a small vocabulary, which no page is given for
        rows = min(4096, passes.loss_shape(settings, False, False).scored)
        unwritten = rows * max(0, TRL_VOCABULARY_CHUNK - found.config.vocab_size) * 4 / MIB
        values |= {phase: values[phase] + unwritten for phase in ("score", "forward_backward") if phase in values}
    return values


def pairs(found: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """`(planned, measured)` MiB of tensors by component."""
    compared = {"lying": (found["planned"]["lying"], found["lying"])}
    for phase, names in PHASES.items():
        rises = [found["rises"][name] for name in names if name in found["rises"]]
        if rises and phase in found["planned"]:
            compared[phase] = (found["planned"][phase], max(rises))
    return compared


def error(pair: tuple[float, float]) -> float:
    planned, measured = pair
    return planned / measured - 1


def summary(cases: dict[str, Any]) -> dict[str, Any]:
    """Median and largest absolute error, and the lowest, of the components of a hundredth of a case's tensors and more."""
    errors = []
    for found in cases.values():
        if "lying" in found.get("planned", {}):
            compared = pairs(found)
            whole = compared["lying"][1] + max(pair[1] for name, pair in compared.items() if name != "lying")
            errors += [error(pair) for pair in compared.values() if max(pair) >= whole / 100]
    return {
        "compared": len(errors),
        "within 5%": sum(abs(each) <= 0.05 for each in errors),
        "median": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "lowest": min(errors),
    }


def show(name: str, found: dict[str, Any]) -> None:
    if "failed" in found:
        print(f"{name}: FAILED, {found['failed']}", flush=True)
        return
    print(name)
    for part, pair in pairs(found).items():
        print(f"  {part:<17}{pair[0]:>9.1f}{pair[1]:>9.1f} MiB{100 * error(pair):>+8.1f}%")
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
            there = "rises" in content["cases"].get(name, {})
            if arguments.again and not there:
                continue
            if arguments.again or not there:
                path = arguments.smollm2 if shape == "smollm2" else str(Path(folder, shape))
                if not Path(path).is_dir():
                    make_model(Path(path), shape)
                found = content["cases"][name] if there else run_case(name, path)
                if "failed" not in found:
                    keys = ("date", "features", "lying", "rises", "tokens")
                    found = {"date": datetime.date.today().isoformat()} | {k: found[k] for k in keys if k in found}
                    found["planned"] = planned(name, path, found["tokens"])
                content["cases"][name] = found
                content["summary"] = summary({n: case for n, case in content["cases"].items() if n in chosen})
                write_json(arguments.output, content)
            show(name, content["cases"][name])
    print(json.dumps(content["summary"], indent=1))


if __name__ == "__main__":
    main()
