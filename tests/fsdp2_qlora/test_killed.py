"""`kill -9` of one rank of a sharded run: the other ends by itself, and the resumed run equals the uninterrupted one."""

import signal

import pytest

pytest.importorskip("bitsandbytes")

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.grpo.test_resume import assert_equal_runs
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.checkpoints import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.processes]


WORKER = "tests/fsdp2_qlora/resume_rank.py"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs resume_rank.py in two processes; returns their exit codes."""
    base = save_tiny_model(tmp_path_factory.mktemp("killed") / "base")

    def start(output_dir, kill=("", ""), resume="") -> list[int]:
        words, more = (base, output_dir, *kill, resume), {"environment": fsdp_environment(), "check": False}
        # A rank whose peer is gone has to end by itself, well within a minute.
        ranks = launch(WORKER, *words, timeout=240, grace=60, **more)
        print(*(text for _, text in ranks))  # shown where the test fails
        return [code for code, _ in ranks]

    return start


@pytest.fixture(scope="module")
def uninterrupted(train, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert train(run) == [0, 0]
    return run


@pytest.mark.parametrize(("kill", "resumes_at"), [(("", "step"), 6), (("saving", ""), 4)], ids=["step", "saving"])
def test_killed_and_resumed_equals_uninterrupted(train, uninterrupted, tmp_path, kill, resumes_at):
    run = tmp_path / "run"
    codes = train(run, kill)
    for code, cause in zip(codes, kill, strict=True):
        # The launcher would kill a rank that hangs.
        assert code == -signal.SIGKILL if cause else code not in (0, -signal.SIGKILL)
    assert checkpoints.last_complete_checkpoint(run).name == f"checkpoint-{resumes_at}"
    assert train(run, resume="auto") == [0, 0]
    assert_equal_runs(run, uninterrupted)  # two ranks' sums have one order: no tolerance
