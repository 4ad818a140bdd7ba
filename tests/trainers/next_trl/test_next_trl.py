"""Changed TRLs: the package trains as TRL's own trainer does, or says what runs as stock."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.trainers.next_trl.steps import every_change_and_faults

ROOT = Path(__file__).parents[3]
ALL = [change.name for change in every_change_and_faults()]
CHANGES = [name for name in ALL if not name.startswith("fault")]
# That of `make test`, with the faults that were planted; one of each further kind is in the long table.
FEW = ["tuple: GRPO _get_per_token_logps_and_entropies"]
OTHER_KINDS = [
    "inputs: GRPO per token",
    "loss: GRPO a new loss_type",
    "gone: _tool_call_loop",
    "argument: GRPO _get_per_token_logps_and_entropies",
    "forward: GRPO a mask on the vocabulary",
    "between: RLOO _compute_loss",
    "forward: DPO a flag",
]
PART = 24  # changes of one process
# All take a quarter of an hour: TRL_CHANGES=all, for a release. Otherwise every fifth one, and one of each kind.
RUN = CHANGES if os.environ.get("TRL_CHANGES") == "all" else sorted({*CHANGES[::5], *OTHER_KINDS})
GOOD = ("equal", "as stock")


def outcomes(names: list[str]) -> dict[str, list[dict]]:
    """What each change leads to, by a process that forks one per change."""
    numbers = [str(ALL.index(name)) for name in names]
    command = [sys.executable, "-m", "tests.trainers.next_trl.steps", *numbers]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1500)
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == len(names), run.stderr[-2000:]
    return {row["change"]: row["results"] for row in found}


def check(results: dict[str, list[dict]]) -> None:
    rows = [(change, result) for change, of in results.items() for result in of]
    counts = Counter(result["class"] for _, result in rows)
    print(dict(counts))
    bad = [f"{change}: {result}" for change, result in rows if result["class"] not in (*GOOD, "error")]
    assert not bad, "\n".join(bad)


@pytest.mark.slow
@pytest.mark.processes
def test_a_change_and_the_planted_faults():
    """A fault in the package is found by the first step's comparison, and by this test if nothing is compared."""
    results = outcomes([*FEW, "fault: compared", "fault: hidden"])
    (compared,) = results.pop("fault: compared")
    (hidden,) = results.pop("fault: hidden")
    check(results)
    assert compared["class"] == "as stock" and compared["text"]
    assert hidden["class"] == "different"


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("first", range(0, len(RUN), PART))
def test_every_change(first):
    check(outcomes(RUN[first : first + PART]))


def test_there_are_many_changes_of_every_kind():
    assert len(CHANGES) >= 120 and len(set(ALL)) == len(ALL)
