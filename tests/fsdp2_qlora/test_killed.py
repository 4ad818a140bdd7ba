"""`kill -9` of one rank of a sharded run: the other ends by itself, and the resumed run equals the uninterrupted one."""

import signal

import pytest
import torch

pytest.importorskip("bitsandbytes")

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.fsdp2_qlora.runs import WORKER
from tests.grpo.test_resume import assert_equal_runs
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.checkpoints import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains two ranks in a folder; returns their exit codes."""
    base, out = save_tiny_model(tmp_path_factory.mktemp("killed") / "base"), tmp_path_factory.mktemp("out")

    def start(folder, kills="+", resume="") -> list[int]:
        words = base, out, f"run=killed:kills={kills},resume={resume},into={folder}"
        # A rank whose peer is gone has to end by itself, well within a minute.
        ranks = launch(WORKER, *words, timeout=240, grace=60, environment=fsdp_environment(), check=False)
        print(*(text for _, text in ranks))  # shown where the test fails
        codes = [code for code, _ in ranks]
        if codes == [0, 0]:
            assert torch.load(out / "rank1.pt", weights_only=False)["run"] <= 0.52  # the base was sharded
        return codes

    return start


@pytest.fixture(scope="module")
def uninterrupted(train, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert train(run) == [0, 0]
    return run


@pytest.mark.parametrize(("kills", "resumes_at"), [("+step", 6), ("saving+", 4)])
def test_killed_and_resumed_equals_uninterrupted(train, uninterrupted, tmp_path, kills, resumes_at):
    run = tmp_path / "run"
    for code, cause in zip(train(run, kills), kills.split("+"), strict=True):
        # The launcher would kill a rank that hangs.
        assert code == -signal.SIGKILL if cause else code not in (0, -signal.SIGKILL)
    assert checkpoints.last_complete_checkpoint(run).name == f"checkpoint-{resumes_at}"
    assert train(run, resume="auto") == [0, 0]
    assert_equal_runs(run, uninterrupted)  # two ranks' sums have one order: no tolerance
