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

from tests.distributed.launch import REPOSITORY, _end_all, _Rank, _run, free_port, launch, rank_environment
from tests.tiny import save_tiny_model
from trl_fsdp_qlora.checkpoints.checkpoints import checkpoints_in

CONFIGS = REPOSITORY / "accelerate_configs"
WORKER = "tests/distributed/node_worker.py"
SCRIPT = str(REPOSITORY / WORKER)
AGENT = str(REPOSITORY / "tests/distributed/agent.py")
STEPS = 4

slow = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("nodes") / "base")


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory):
    """Two ranks of DDP, each a node of its own, without a launcher."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    launch(WORKER, "ddp", base, out, environment={"LOCAL_WORLD_SIZE": "1"}, timeout=240)
    return out


def accelerate(config: str, kind: str, base: str, out: Path, processes: int, *words: str) -> None:
    """`accelerate launch --machine_rank 0` and `1` with a config of this package."""
    port, starts = free_port(), []
    for node in (0, 1):
        command = ["--fork", "accelerate", "--config_file", str(CONFIGS / f"{config}.yaml"), "--num_machines", "2"]
        command += ["--num_processes", str(processes), "--machine_rank", str(node), "--mixed_precision", "no", *words]
        command += ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port), SCRIPT, kind, base, str(out)]
        starts.append(partial(_Rank, AGENT, command, rank_environment({"ACCELERATE_USE_CPU": "true"})))
    _run(starts, timeout=400, check=True)


def losses(out: Path) -> list[float]:
    state = json.loads((checkpoints_in(out)[-1] / "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def difference(one: Path, other: Path) -> float:
    """Largest absolute difference between the adapters of two runs."""
    a, b = (load_file(out / "final" / "adapter_model.safetensors") for out in (one, other))
    assert a.keys() == b.keys() and any(value.any() for value in a.values())
    return max((a[name] - b[name]).abs().max().item() for name in a)


class TestLaunched:
    pytestmark = slow

    def test_ddp(self, base, undisturbed, tmp_path):
        accelerate("multi_node_ddp", "ddp", base, tmp_path / "run", 2)
        assert len(losses(undisturbed)) == STEPS and losses(tmp_path / "run") == losses(undisturbed)
        assert difference(tmp_path / "run", undisturbed) == 0

    def test_hsdp(self, base, tmp_path):
        pytest.importorskip("bitsandbytes")
        from tests.fsdp2_qlora.test_hsdp import mesh_environment

        sizes = ["--parallelism_config_dp_replicate_size", "2", "--parallelism_config_dp_shard_size", "2"]
        accelerate("multi_node_hsdp_qlora", "hsdp", base, tmp_path / "run", 4, *sizes)
        launch(WORKER, "hsdp", base, tmp_path / "plain", processes=4, environment=mesh_environment(), timeout=300)
        assert len(losses(tmp_path / "run")) == STEPS and losses(tmp_path / "run") == losses(tmp_path / "plain")
        assert difference(tmp_path / "run", tmp_path / "plain") == 0

    def test_zero2(self, base, undisturbed, tmp_path):
        pytest.importorskip("deepspeed")
        accelerate("multi_node_zero2", "zero2", base, tmp_path / "run", 2)
        assert losses(tmp_path / "run") == pytest.approx(losses(undisturbed), abs=1e-5)
        # DeepSpeed sums gradients in buckets of another order, and AdamW makes a step of any gradient, however small.
        assert difference(tmp_path / "run", undisturbed) <= 1e-4

    def test_another_node_takes_the_place_of_one_that_dies(self, base, undisturbed, tmp_path):
        """torchrun on two nodes; the second's agent and rank are killed in step 3, and an agent is started in its place."""
        out, port, started = tmp_path / "run", free_port(), []

        def agent(node: int, attempt: int) -> None:
            log = tmp_path / f"node{node}-{attempt}.txt"
            log.touch()
            nodes = ["--nnodes", "2", "--nproc_per_node", "1"]
            words = ["--fork", "torchrun", *nodes, "--rdzv_backend", "c10d", "--rdzv_id", "job"]
            words += ["--rdzv_endpoint", f"127.0.0.1:{port}", "--local_addr", "127.0.0.1", "--max_restarts", "3"]
            variables = {"DIE_AT": "2"}
            # Where agents share one store over all rounds, torch 2.13 tells a new agent nothing of it: it waits in vain.
            variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            words += [SCRIPT, "ddp", base, str(out)]
            started.append(_Rank(AGENT, words, rank_environment(variables), log))

        try:
            agent(0, 0)  # hosts the rendezvous: its death would end the job
            await_(lambda: listens(port), 60, "the first agent hosts no rendezvous")
            agent(1, 0)
            await_(lambda: started[1].poll() is not None, 240, "the second node did not die")
            agent(1, 1)
            await_(lambda: None not in (started[0].poll(), started[2].poll()), 240, "the run does not end")
        finally:
            _end_all(started)
            for log in sorted(tmp_path.glob("node*.txt")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
        assert started[0].returncode == started[2].returncode == 0
        # Checkpoints were whole up to step 2; the third step, in flight, was made anew.
        assert losses(out) == losses(undisturbed)
        assert difference(out, undisturbed) == 0


def await_(happened, seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


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
    assert {k: v for k, v in several.items() if k not in of_nodes} == {
        k: v for k, v in one.items() if k not in of_nodes
    }
    assert several["num_machines"] == 2
    mesh = several.get("parallelism_config", {"all": several["num_processes"]})
    assert math.prod(mesh.values()) == several["num_processes"]
