"""500 fuzzed episodes on two ranks against those in turns, and runs with tools that are killed again and again."""

import json
import os
import signal
from contextlib import suppress

import pytest

from tests.distributed.launch import launch
from tests.engines.vllm.sampling_server import SamplingServer

from .helpers import wait_until

pytestmark = pytest.mark.exhaustive
WORKER = "tests/experimental/one_generation_ahead/episodes_rank.py"


def run(server, out, processes=1, meanwhile=None, **changes) -> None:
    out.mkdir(exist_ok=True)
    limits = {"timeout": 500, "grace": 20, "check": meanwhile is None, "meanwhile": meanwhile}
    launch(WORKER, server.url, str(out), json.dumps(changes), processes=processes, **limits)


def trained(out, ranks: int = 1) -> dict[int, list]:
    """By step: prompts, completions and counts of calls, of all ranks; the last time that a step was done."""
    batches: dict[int, list] = {}
    for rank in range(ranks):
        rows = [json.loads(line) for line in (out / f"trained_{rank}.jsonl").read_text().splitlines()]
        for step, parts in dict(rows).items():
            before = batches.get(step, [[], [], []])
            batches[step] = [kept + part for kept, part in zip(before, parts, strict=True)]
    return batches


@pytest.mark.parametrize("environments", [False, True])
@pytest.mark.parametrize("fuzz", range(4))
def test_fuzzed_episodes_on_two_ranks_are_those_in_turns(tmp_path, fuzz, environments):
    """64 episodes each. In turns one process draws, because ranks with fewer turns end a step of TRL's."""
    settings = {"fuzz": fuzz, "environments": environments, "max_steps": 4, "max_completion_length": 24}
    runs = {}
    for ahead, processes in ((0, 1), (1, 2)):
        out = tmp_path / str(ahead)
        with SamplingServer(keeps_keys=True) as server:
            per_device = {"per_device_train_batch_size": 16 // processes}
            run(server, out, processes, rollouts_ahead=ahead, **per_device, **settings)
        runs[ahead] = trained(out, processes), json.loads((out / "done_0.json").read_text())
    assert runs[1][0] == runs[0][0] and sorted(runs[0][0]) == [0, 1, 2, 3]
    assert sum(len(parts[1]) for parts in runs[0][0].values()) == 64
    for name, values in runs[0][1].items():
        assert runs[1][1][name] == pytest.approx(values, abs=1e-5), name
    assert min(runs[0][1]["tools/call_frequency"]) > 0


def end_one(server, out, where: str, kill: int):
    """A function that kills one rank, another with each `kill`, in a draw, a call of a tool or a save."""
    holds = moments(server, out)[where]

    def end(processes):
        def has_failed() -> bool:
            return any(process.poll() is not None for process in processes)

        wait_until(lambda: holds(1 + kill % 3) or has_failed(), seconds=200)
        with suppress(ProcessLookupError):
            os.kill(processes[kill % len(processes)].pid, signal.SIGKILL)

    return end


def moments(server, out) -> dict[str, list]:
    """What to wait for before a kill: conditions, by where it happens."""
    drawn = len(server.draws)
    tools = out / "tools"
    calls = len(tools.read_text()) if tools.is_file() else 0
    return {
        "draw": lambda later: len(server.draws) > drawn + 2 * later and server.draws[-1].status == "running",
        "tool": lambda later: tools.is_file() and len(tools.read_text()) > calls + 6 * 10 * later,
        "save": lambda later: (out / "_staging").is_dir(),
    }


KILLS = {
    "in draws": (1, ["draw"] * 7, {"max_steps": 40}),
    "in tools": (1, ["tool"] * 7, {"max_steps": 40}),
    "in saves": (1, ["save"] * 6, {"max_steps": 40}),
    "of one rank of two": (2, ["draw", "tool", "save"], {"max_steps": 8, "per_device_train_batch_size": 4}),
}


@pytest.mark.parametrize("kills", KILLS)
def test_a_run_that_is_killed_trains_on_each_prompt_once(tmp_path, kills):
    ranks, places, sizes = KILLS[kills]
    settings = {
        "fuzz": 0, "rollouts_ahead": 1, "max_completion_length": 16, "learning_rate": 1e-2, "save_strategy": "steps",
        "save_steps": 1, "save_total_limit": 2, **sizes,
    }  # fmt: skip
    with SamplingServer(keeps_keys=True, seconds=0.05) as server:
        run(server, tmp_path / "whole", ranks, **settings)
        out = tmp_path / "killed"
        for kill, where in enumerate(places):
            run(server, out, ranks, meanwhile=end_one(server, out, where, kill), **settings)
            assert not list(out.glob("done_*.json"))
        run(server, out, ranks, **settings)
    whole, killed = trained(tmp_path / "whole", ranks), trained(out, ranks)
    assert sorted(killed) == list(range(settings["max_steps"]))
    assert {step: parts[0] for step, parts in killed.items()} == {step: parts[0] for step, parts in whole.items()}
