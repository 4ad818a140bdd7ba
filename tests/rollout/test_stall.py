"""A colocated engine that hangs: told after a while without a step, however it hangs, and never one that goes on."""

import signal
import threading
import time

import pytest

from tests.distributed.launch import run_code
from trl_fsdp_qlora.rollout import stall
from trl_fsdp_qlora.rollout.adapter_sync import RolloutError
from trl_fsdp_qlora.rollout.stall import EngineStall, Patience


def test_patience():
    now = [100.0]
    patience = Patience(5.0, clock=lambda: now[0])

    def look(second, seen):
        now[0] = 100.0 + second
        return patience.is_over(seen)

    assert [look(4, "a"), look(9, "a"), look(9.5, "a"), look(10, "b"), look(15, "b"), look(16, "b")] == [
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    patience.start("b")
    assert not look(20, "b") and look(22, "b")  # what was seen before is no progress


def wait_for_ever():
    threading.Event().wait()


def compute_for_ever():
    while True:
        sum(range(1000))


@pytest.mark.parametrize("hang, on_cpu", [(wait_for_ever, True), (wait_for_ever, False), (compute_for_ever, False)])
def test_what_hangs_is_interrupted(hang, on_cpu):
    watch = EngineStall(0.2, on_cpu)
    told = (
        r"did not generate: no step .* for 0\.2 s \(it is at .*\.py:\d+\).*vllm_stall_timeout.*resume_from_checkpoint"
    )
    with pytest.raises(RolloutError, match=told), watch.watching("generate"):
        hang()
    with watch.watching("generate"):  # and the next is watched anew
        pass


def test_what_computes_on_a_cpu_has_longer_for_a_step(monkeypatch):
    monkeypatch.setattr(stall, "SLOW_STEP", 5)
    watch, started = EngineStall(0.2, on_cpu=True), time.process_time()
    with pytest.raises(RolloutError, match="no step"), watch.watching("generate"):
        compute_for_ever()
    assert time.process_time() - started > 0.01  # it computed; a hang that waits is told after a fifth of the time


def test_an_engine_that_goes_on_is_left_alone():
    watch = EngineStall(0.4, on_cpu=False)
    with watch.watching("generate"):
        for _ in range(12):
            threading.Event().wait(0.1)
            watch.steps += 1


def test_no_limit():
    before = threading.active_count()
    with EngineStall(0, on_cpu=False).watching("generate"):
        assert threading.active_count() == before


def test_a_signal_that_comes_late_does_nothing():
    with EngineStall(60.0, on_cpu=False).watching("generate"):
        pass
    signal.pthread_kill(threading.get_ident(), stall._SIGNAL)


CANNOT_BE_INTERRUPTED = """
import signal, threading
from trl_fsdp_qlora.rollout import stall
stall.GRACE = 0.2
def in_the_main_thread():
    signal.pthread_sigmask(signal.SIG_BLOCK, [stall._SIGNAL])
    with stall.EngineStall(0.2, on_cpu=True).watching("generate"):
        threading.Event().wait()
def in_another_thread():
    with stall.EngineStall(0.2, on_cpu=True).watching("generate"):
        threading.Event().wait()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "call", ["in_the_main_thread()", "threading.Thread(target=in_another_thread).start()"], ids=["main", "other"]
)
def test_what_cannot_be_interrupted_ends_the_process(call, tmp_path):
    run = run_code(CANNOT_BE_INTERRUPTED + call, cwd=tmp_path)
    assert run.returncode == 1
    assert "error: vLLM did not generate" in run.stderr and "this process ends" in run.stderr
    assert "threading.py" in run.stderr  # where it stood
