"""The client of a vLLM server, against recorded answers: a server that is wrong, mute or gone is told within a minute."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import requests
from trl.generation import vllm_client
from urllib3.connection import HTTPConnection
from urllib3.exceptions import ConnectTimeoutError

from tests.distributed.launch import free_port, launch
from tests.vllm.serve import WRONG_STARTS, RecordedServer
from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.rollout import server as module
from trl_fsdp_qlora.rollout import server_stall, stall
from trl_fsdp_qlora.rollout.adapter_sync import RolloutError
from trl_fsdp_qlora.rollout.server import AdapterServer

PATIENCE = 0.2


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """TRL's client needs vLLM for what an adapter does not use. Nothing is waited for; what would have been is added up here."""
    slept = []
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def client(url: str, max_lora_rank: int = 8, stall_timeout: float = 50.0) -> AdapterServer:
    return AdapterServer(
        url, group_port=1, patience=PATIENCE, max_lora_rank=max_lora_rank, stall_timeout=stall_timeout
    )


def test_a_server_that_is_right():
    with RecordedServer() as running:
        found = client(running.url)
        assert (found.base, found.folder) == ("base", "/base")
        assert running.asked[0] == "/health" and running.asked[-2:] == ["/server_info", "/metrics"]


@pytest.mark.parametrize("wrong, named", WRONG_STARTS)
def test_a_server_that_was_started_wrong(waits, wrong, named):
    with RecordedServer(**wrong) as running, pytest.raises(RolloutError, match=named):
        client(running.url)
    assert not waits


def test_nothing_at_the_url():
    with pytest.raises(ConnectionError, match=r"nothing is up at http://127.0.0.1:\d+ after 0\.2 s"):
        client(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize("status, told", [(404, "/health answers 404"), (0, "timed out")])
def test_something_else_at_the_url(monkeypatch, status, told):
    """TRL's client asks such a URL for ever."""
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 0.1)
    with RecordedServer(other={"/health": status}) as running, pytest.raises(ConnectionError, match=told):
        client(running.url)


def test_an_adapter_that_is_not_loaded_in_time_is_not_sent_twice(monkeypatch):
    monkeypatch.setattr(module, "_LOAD_SECONDS", 0.1)
    with RecordedServer(other={"/v1/load_lora_adapter": 0}) as running:
        found = client(running.url)
        with pytest.raises(requests.ReadTimeout):
            found.load_adapter("policy-v1", "/folder")
        assert running.asked.count("/v1/load_lora_adapter") == 1
        assert found.model == "base"  # what was not loaded is not asked for


def test_a_server_that_is_overloaded_is_asked_again(waits):
    with RecordedServer(other={"/v1/load_lora_adapter": 503}) as running:
        with pytest.raises(requests.RequestException, match="503"):
            client(running.url).load_adapter("policy-v1", "/folder")
        assert running.asked.count("/v1/load_lora_adapter") == 3
    assert sum(waits) == 4


def test_a_host_that_drops_packets_is_told_within_a_minute(waits, monkeypatch):
    with RecordedServer() as running:
        found = client(running.url)
    given = []

    def dropped(connection):
        given.append(connection.timeout)
        raise ConnectTimeoutError(connection, "dropped")

    monkeypatch.setattr(HTTPConnection, "_new_conn", dropped)
    waits.clear()
    with pytest.raises(requests.ConnectTimeout):
        found.load_adapter("policy-v1", "/folder")
    assert len(given) == 3
    assert sum(given) + sum(waits) < 60
    assert module._CONNECT_SECONDS + module._LOAD_SECONDS < 60  # one that takes the connection and is mute then


def test_completions_are_waited_for_as_long_as_tokens_are_counted():
    """Three requests at a time, for three times as long as there may be no progress, and one of them looks for all."""
    with RecordedServer(steps=12) as running:
        found = client(running.url, stall_timeout=0.4)
        with ThreadPoolExecutor(3) as pool:
            drawn = list(pool.map(lambda _: found.generate([[5, 6]], logprobs=None), range(3)))
        assert [answer["completion_ids"] for answer in drawn] == [[[7]]] * 3
        looks = running.asked.count("/metrics")
        assert 12 <= looks < 24


def test_a_server_whose_engine_hangs(monkeypatch):
    with RecordedServer(other={"/v1/completions": 0}) as running:
        found = client(running.url, stall_timeout=0.4)
        with pytest.raises(
            RolloutError, match=r"counted no token for 0\.4 s.*vllm_stall_timeout.*resume_from_checkpoint"
        ):
            found.generate([[5, 6]])
        assert running.asked.count("/v1/completions") == 1
    monkeypatch.setattr(server_stall, "_ANSWER_SECONDS", 0.1)
    mute = {"/v1/completions": 0}
    with RecordedServer(other=mute) as running:
        found = client(running.url, stall_timeout=0.4)
        mute["/metrics"] = 0  # from now on nothing of it answers
        with pytest.raises(RolloutError, match=r"counted no token"):
            found.generate([[5, 6]])


def test_time_between_rollouts_is_no_hang():
    with RecordedServer(steps=1) as running:
        found = client(running.url, stall_timeout=0.2)
        found.generate([[5, 6]], logprobs=None)
        threading.Event().wait(0.4)
        found.generate([[5, 6]], logprobs=None)


@pytest.mark.parametrize("changes, stall_timeout", [({"other": {"/metrics": 404}}, 50.0), ({}, 0)])
def test_a_server_that_does_not_tell_how_far_it_is(changes, stall_timeout):
    with RecordedServer(**changes) as running:
        found = client(running.url, stall_timeout=stall_timeout)
        assert not found.is_watched
        assert found.generate([[5, 6]], logprobs=None)["completion_ids"] == [[7]]


def test_a_hang_is_told_within_a_minute_by_default():
    (field,) = (item for item in fields(EfficientGRPOConfig) if item.name == "vllm_stall_timeout")
    # A server: a look that comes just before the last token counts, one that is not answered; then the last look.
    assert field.default + 2 * server_stall._LOOK_EVERY + server_stall._ANSWER_SECONDS < 60
    assert field.default + 2 * stall.LOOK_EVERY + stall.GRACE < 60


# By the fault of tests/rollout/faults_worker.py: what every rank says.
TOLD = {
    "unreachable_for_one_rank": r"nothing is up at .*vllm_server_base_url",
    "no_lora": "--enable-lora",
    "rank_too_small": "--max-lora-rank 8",
    "no_room": r"could not be written under .*No space left.*output_dir",
    "folder_deleted": r"load_lora_adapter failed.*is gone",
    "killed_in_a_rollout": r"did not generate.*resume_from_checkpoint",
    "hangs_in_a_rollout": r"counted no token for 0\.4 s.*resume_from_checkpoint",
    "hangs_on_one_rank": r"no step of the engine has ended for 0\.4 s.*resume_from_checkpoint",
    "another_base": "another base",
}


@pytest.mark.processes
def test_both_ranks_are_told_of_every_fault_within_a_minute(tmp_path, monkeypatch):
    monkeypatch.undo()  # this process waits for the ranks
    with (
        RecordedServer(other={"/v1/load_lora_adapter": 200, "/v1/completions": 0}) as right,
        RecordedServer(other={"/v1/load_lora_adapter": 400}) as refusing,
        RecordedServer(max_lora_rank=None) as without_lora,
        RecordedServer(max_lora_rank=4) as small,
    ):
        urls = [running.url for running in (right, refusing, without_lora, small)]
        launch("tests/rollout/faults_worker.py", tmp_path, *urls)
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert told.keys() == TOLD.keys()
        for fault, said in TOLD.items():
            assert re.search(said, told[fault]["error"]), told[fault]
            assert told[fault]["seconds"] < 60  # with what was to be slept
        assert told["another_base"]["kind"] == "StaleRolloutError"
