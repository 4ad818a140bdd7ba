"""Two nodes on this machine's loopback, each with a launcher of its own, as two machines are started.

What they train is compared with the same ranks started without a launcher; equal to the bit, but for DeepSpeed.
"""

import socket
import time

import pytest
import torch

pytest.importorskip("bitsandbytes")

from tests.distributed.launch import AGENT, REPOSITORY, Rank, end_all, free_port, launch_all, rank_environment
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.runs import WORKER, difference, mesh_environment, scenarios_of

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.exhaustive]

TRAINING = "grpo:num_generations=2,save_steps=1,resume=auto,model="


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.make_checkpoint(tmp_path_factory.mktemp("nodes") / "base")


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """What two ranks of DDP find, each a node of its own, without a launcher."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    return scenarios_of(base, out, {"run": TRAINING + "whole"}, environment={"LOCAL_WORLD_SIZE": "1"})[0]["run"]


def assert_same(out, expected, of_losses=0.0, of_adapter=0.0):
    actual = torch.load(out / "rank0.pt", weights_only=False)["run"]
    assert len(actual["loss"]) == 3 and actual["loss"] == pytest.approx(expected["loss"], rel=0, abs=of_losses)
    assert difference(actual["adapter"], expected["adapter"]) <= of_adapter
    assert (actual["base"], actual["mesh"]) == (expected["base"], expected["mesh"])


@pytest.mark.parametrize("kind", ["ddp", "hsdp_qlora", "zero2"])
def test_two_launchers_train_as_ranks_without_one(base, undisturbed, tmp_path, kind):
    """`accelerate launch --machine_rank 0` and `1` with a config of this package; of HSDP two ranks on each node."""
    pytest.importorskip("deepspeed" if kind == "zero2" else "torch")
    hsdp = kind == "hsdp_qlora"
    port = free_port()
    expected = undisturbed
    starts = []
    for node in (0, 1):
        words = ["accelerate", "--config_file", REPOSITORY / f"accelerate_configs/multi_node_{kind}.yaml"]
        words += ["--num_machines", 2, "--num_processes", 4 if hsdp else 2, "--machine_rank", node]
        if hsdp:
            words += ["--parallelism_config_dp_replicate_size", 2, "--parallelism_config_dp_shard_size", 2]
        words += ["--mixed_precision", "no", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
        words += [REPOSITORY / WORKER, base, tmp_path, f"run={TRAINING}{'' if hsdp else 'whole'}"]
        starts.append((AGENT, words, rank_environment({"ACCELERATE_USE_CPU": "true"})))
    launch_all(starts, timeout=400)
    if hsdp:
        plain = tmp_path / "plain"
        expected = scenarios_of(base, plain, {"run": TRAINING}, 4, environment=mesh_environment())[0]["run"]
        assert expected["mesh"] == (2, 2) and expected["base"]["ratio"] <= 0.52
    # DeepSpeed sums gradients in buckets of another order, and AdamW makes a step of any gradient, however small.
    assert_same(tmp_path, expected, *((1e-5, 1e-4) if kind == "zero2" else ()))


def test_a_node_that_dies_is_replaced_by_another(base, undisturbed, tmp_path):
    """torchrun on two nodes; the second's agent and rank are killed in step 3, and an agent is started in its
    place.
    """
    port = free_port()
    started = []
    words = ["torchrun", "--nnodes", 2, "--nproc_per_node", 1, "--rdzv_backend", "c10d", "--rdzv_id", "job"]
    words += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1", "--max_restarts", 3]
    words += ["--rdzv_conf", "keep_alive_interval=1"]  # a node counts as dead after three seconds instead of fifteen
    words += [REPOSITORY / WORKER, base, tmp_path, f"run={TRAINING}whole,loses_node=1"]
    # If agents share one store over all rounds, a new agent of torch 2.13 does not learn of it and waits in vain.
    environment = rank_environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        for happened, otherwise in (
            (lambda: listens(port), "the first agent hosts no rendezvous"),  # its death would end the job
            (lambda: started[1].poll() is not None, "the second node did not die"),
            (lambda: None not in (started[0].poll(), started[2].poll()), "the run does not end"),
        ):
            started.append(Rank(AGENT, words, environment, tmp_path / f"agent{len(started)}.txt"))
            deadline = time.monotonic() + 240
            while not happened():
                assert time.monotonic() < deadline, otherwise
                time.sleep(0.1)
    finally:
        end_all(started)
        for log in sorted(tmp_path.glob("agent*.txt")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
    assert started[0].returncode == started[2].returncode == 0
    # The checkpoint of step 2 was whole; the third step, in flight, was taken again.
    assert (tmp_path / "run.died").exists()
    assert_same(tmp_path, undisturbed)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
