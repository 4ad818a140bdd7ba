"""Two nodes on this machine's loopback, each with a launcher of its own, as two machines are started.

What they train is compared with the same ranks started without a launcher; equal to the bit, but for DeepSpeed.
"""

import json
import math
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from tests.distributed.launch import AGENT, REPOSITORY, _end_all, _Rank, _run, free_port, launch, rank_environment
from tests.fsdp2_qlora.runs import difference, mesh_environment
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.checkpoints.checkpoints import checkpoints_in

CONFIGS = REPOSITORY / "accelerate_configs"
WORKER = str(REPOSITORY / "tests/distributed/node_worker.py")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("nodes") / "base")


def found_in(out: Path) -> tuple[list[float], dict]:
    """Losses and adapter of a finished run."""
    state = json.loads((checkpoints_in(out)[-1] / "trainer_state.json").read_text())
    adapter = load_file(out / "final" / "adapter_model.safetensors")
    assert any(value.any() for value in adapter.values())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry], adapter


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """What two ranks of DDP find, each a node of its own, without a launcher."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    launch(WORKER, "ddp", base, out, environment={"LOCAL_WORLD_SIZE": "1"}, timeout=240)
    assert len(found_in(out)[0]) == 3
    return found_in(out)


def agent(words: list, log: Path, **variables: str) -> _Rank:
    log.touch()
    return _Rank(AGENT, list(map(str, words)), rank_environment(variables), log)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "hsdp", "zero2"])
def test_two_launchers_train_as_ranks_without_one(base, undisturbed, tmp_path, kind):
    """`accelerate launch --machine_rank 0` and `1` with a config of this package; of HSDP two ranks on each node."""
    pytest.importorskip({"ddp": "torch", "hsdp": "bitsandbytes", "zero2": "deepspeed"}[kind])
    config, processes, port = "hsdp_qlora" if kind == "hsdp" else kind, 4 if kind == "hsdp" else 2, free_port()
    starts = []
    for node in (0, 1):
        words = ["accelerate", "--config_file", CONFIGS / f"multi_node_{config}.yaml", "--num_machines", 2]
        words += ["--num_processes", processes, "--machine_rank", node, "--mixed_precision", "no"]
        if kind == "hsdp":
            words += ["--parallelism_config_dp_replicate_size", 2, "--parallelism_config_dp_shard_size", 2]
        words += ["--main_process_ip", "127.0.0.1", "--main_process_port", port, WORKER, kind, base, tmp_path / "run"]
        starts.append(partial(agent, words, ACCELERATE_USE_CPU="true"))
    _run(starts, timeout=400, check=True)
    expected_losses, expected = undisturbed
    if kind == "hsdp":
        launch(WORKER, kind, base, tmp_path / "plain", processes=4, environment=mesh_environment(), timeout=300)
        expected_losses, expected = found_in(tmp_path / "plain")
    # DeepSpeed sums gradients in buckets of another order, and AdamW makes a step of any gradient, however small.
    near = (1e-5, 1e-4) if kind == "zero2" else (0, 0)
    losses, adapter = found_in(tmp_path / "run")
    assert losses == pytest.approx(expected_losses, rel=0, abs=near[0]) and difference(adapter, expected) <= near[1]


@pytest.mark.slow
@pytest.mark.processes
def test_another_node_takes_the_place_of_one_that_dies(base, undisturbed, tmp_path):
    """torchrun on two nodes; the second's agent and rank are killed in step 2, and an agent is started in its place."""
    port, started = free_port(), []
    words = ["torchrun", "--nnodes", 2, "--nproc_per_node", 1, "--rdzv_backend", "c10d", "--rdzv_id", "job"]
    words += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1", "--max_restarts", 3]
    words += ["--rdzv_conf", "keep_alive_interval=1"]  # a node counts as dead after three seconds instead of fifteen
    words += [WORKER, "ddp", base, tmp_path / "run"]
    # Where agents share one store over all rounds, torch 2.13 tells a new agent nothing of it: it waits in vain.
    variables = {"DIE_AT": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    try:
        for happened, otherwise in (
            (lambda: listens(port), "the first agent hosts no rendezvous"),  # its death would end the job
            (lambda: started[1].poll() is not None, "the second node did not die"),
            (lambda: None not in (started[0].poll(), started[2].poll()), "the run does not end"),
        ):
            started.append(agent(words, tmp_path / f"agent{len(started)}.txt", **variables))
            deadline = time.monotonic() + 240
            while not happened():
                assert time.monotonic() < deadline, otherwise
                time.sleep(0.1)
    finally:
        _end_all(started)
        for log in sorted(tmp_path.glob("agent*.txt")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
    assert started[0].returncode == started[2].returncode == 0
    # The checkpoint of step 1 was whole; the second step, in flight, was made anew.
    losses, adapter = found_in(tmp_path / "run")
    assert losses == undisturbed[0] and difference(adapter, undisturbed[1]) == 0


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("config", "twin"),
    [("multi_node_ddp", "ddp"), ("multi_node_hsdp_qlora", "fsdp2_qlora"), ("multi_node_zero2", "zero2")],
)
def test_a_config_of_several_nodes_differs_in_the_nodes_alone(config, twin):
    of_nodes = {"num_machines", "num_processes", "main_process_port", "parallelism_config"}
    several, one = (yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in (config, twin))
    several.get("deepspeed_config", {}).pop("deepspeed_multinode_launcher", None)
    same = [{name: value for name, value in each.items() if name not in of_nodes} for each in (several, one)]
    assert same[0] == same[1] and several["num_machines"] == 2
    mesh = several.get("parallelism_config", {"all": several["num_processes"]})
    assert math.prod(mesh.values()) == several["num_processes"]
