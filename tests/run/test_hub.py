"""A machine without a network: the Hub is asked once, and after that only what is here is looked for."""

import json
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants, get_session

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.run import hub


class Refusing:
    """A session that reaches nothing, and counts how often it was asked."""

    def __init__(self):
        self.asked = []

    def head(self, url, **more):
        self.asked.append(url)
        raise ConnectionError("[Errno -3] no name server\nhere")


@pytest.fixture
def no_network(monkeypatch):
    # A session of the libraries would fail as well, but only after many tries: none may be used.
    session = Refusing()
    monkeypatch.setattr(hub, "get_session", lambda: session)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return session


def offline() -> tuple[bool, bool]:
    return constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE


def test_without_an_answer_only_this_machine_is_looked_at(no_network):
    with hub.asked_once(["nobody/model"]) as reason:
        assert reason == "ConnectionError: [Errno -3] no name server here" and offline() == (True, True)
        with pytest.raises(Exception, match="offline mode"):  # the libraries' own sessions ask nothing any more
            get_session().head(constants.ENDPOINT)
    assert offline() == (False, False)
    with pytest.raises(RuntimeError), hub.asked_once(["nobody/model"]):
        raise RuntimeError
    assert offline() == (False, False) and len(no_network.asked) == 2


def test_who_does_not_answer_is_not_waited_for(monkeypatch):
    never = hub.threading.Event()
    monkeypatch.setattr(hub, "get_session", never.wait)
    monkeypatch.setattr(hub, "PATIENCE", 0.05)
    assert hub.unreachable() == "no answer in 0.05 s"
    never.set()


def test_nobody_is_asked_about_what_is_here(no_network, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    for name in (None, "", "base", str(tmp_path / "nothing"), "./bas", "a/b/c"):
        with hub.asked_once([name]) as reason:
            assert reason is None and offline() == (False, False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with hub.asked_once(["nobody/model"]) as reason:  # switched off by the user, which is no fault of the network
        assert reason is None
    assert no_network.asked == []


@pytest.mark.parametrize("model", ["base", "nobody/model"])
def test_doctor_says_so_once_and_goes_on(no_network, tmp_path, monkeypatch, capsys, model):
    monkeypatch.chdir(tmp_path)
    save_tiny_model("base")
    capsys.readouterr()
    words = f"doctor --json --config small-base/grpo/quickstart --model_name_or_path {model} --dataset nobody/data"
    assert main([*words.split(), "--use_cpu", "true"]) == 1
    found = json.loads(capsys.readouterr().out)
    (network,) = [item for item in found if item["check"] == "network"]
    assert network["level"] == "warning" and "no name server" in network["text"]
    (data,) = [item for item in found if item["check"] == "data"]
    assert data["level"] == "error" and "nobody/data" in data["text"]
    errors = {item["check"] for item in found if item["level"] == "error"}
    assert ("model" in errors) == (model != "base") and len(no_network.asked) == 1


def test_plan_says_that_the_config_cannot_be_read(no_network, capsys):
    assert main(["plan", "--model_name_or_path", "nobody/model"]) == 2
    assert "its config cannot be read" in capsys.readouterr().err and len(no_network.asked) == 1
