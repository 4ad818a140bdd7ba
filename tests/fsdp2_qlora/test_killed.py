"""`kill -9` of one rank of a sharded run: the other ends by itself, and the resumed run equals the uninterrupted one."""

import multiprocessing
import signal
import time

import pytest
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")

from tests.distributed.launch import free_port
from tests.grpo.test_resume import KEYS, history
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.run import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """Runs `resume_rank.run_rank` in two processes; returns their exit codes."""
    base = save_tiny_model(tmp_path_factory.mktemp("killed") / "base")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fsdp2_qlora.resume_rank"])

    def start(output_dir, kill=(None, None), resume=None) -> list[int]:
        from tests.fsdp2_qlora.resume_rank import run_rank

        port = free_port()
        ranks = [
            context.Process(target=run_rank, args=(rank, port, base, str(output_dir), kill[rank], resume))
            for rank in (0, 1)
        ]
        for rank in ranks:
            rank.start()
        # A rank whose peer is gone has to end by itself, well within a minute.
        deadline = time.monotonic() + 60
        for rank in ranks:
            rank.join(timeout=max(0, deadline - time.monotonic()))
        hanging = [rank for rank in ranks if rank.exitcode is None]
        for rank in hanging:
            rank.kill()
        assert not hanging, "a rank hangs"
        return [rank.exitcode for rank in ranks]

    return start


@pytest.fixture(scope="module")
def uninterrupted(launch, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert launch(run) == [0, 0]
    return run


@pytest.mark.parametrize(("kill", "resumes_at"), [((None, "step"), 6), (("saving", None), 4)], ids=["step", "saving"])
def test_killed_and_resumed_equals_uninterrupted(launch, uninterrupted, tmp_path, kill, resumes_at):
    run = tmp_path / "run"
    codes = launch(run, kill)
    for code, cause in zip(codes, kill, strict=True):
        assert code == -signal.SIGKILL if cause else code not in (0, None)
    assert checkpoints.last_complete_checkpoint(run).name == f"checkpoint-{resumes_at}"
    assert launch(run, resume="auto") == [0, 0]
    expected, resumed = history(uninterrupted), history(run)
    assert expected.keys() == resumed.keys() == set(range(1, 10))
    for step, entry in expected.items():
        for key in entry.keys() & set(KEYS):
            assert resumed[step][key] == entry[key], (step, key)  # two ranks' sums have one order: no tolerance
    weights = load_file(run / "final" / "adapter_model.safetensors")
    for name, weight in load_file(uninterrupted / "final" / "adapter_model.safetensors").items():
        assert weight.equal(weights[name]), name
