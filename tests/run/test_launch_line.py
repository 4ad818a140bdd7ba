import psutil
import pytest

from trl_fsdp_qlora.run import launch as launch_module
from trl_fsdp_qlora.run.launch import config_file, launch_words, resume_line


class Process:
    def __init__(self, *words):
        self.words = list(words)

    def cmdline(self):
        return self.words


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["/v/bin/python", "/v/bin/accelerate", "launch", "--cpu", "s.py"], "accelerate launch --cpu s.py"),
        (["python", "-m", "accelerate.commands.launch", "--cpu", "s.py"], "accelerate launch --cpu s.py"),
        (["/v/bin/python", "/v/bin/torchrun", "--nproc_per_node", "2", "s.py"], "torchrun --nproc_per_node 2 s.py"),
    ],
)
def test_the_launcher_is_asked(typed, words, monkeypatch):
    parents = [Process("python", "-u", "s.py"), Process(*typed), Process("bash", "-c", "make quickstart")]
    monkeypatch.setattr(psutil.Process, "parents", lambda self: parents)
    assert launch_words() == words.split()


def test_without_a_launcher(monkeypatch):
    monkeypatch.setattr(launch_module.sys, "argv", ["s.py", "--config", "c.yaml"])
    monkeypatch.setattr(psutil.Process, "parents", lambda self: [Process("bash", "accelerate-all.sh")])
    assert launch_words() == ["python", "s.py", "--config", "c.yaml"]

    def denied(self):
        raise psutil.AccessDenied()

    monkeypatch.setattr(psutil.Process, "parents", denied)
    assert launch_words() == ["python", "s.py", "--config", "c.yaml"]


@pytest.mark.parametrize(
    "before", ["", "--resume_from_checkpoint auto ", "--resume_from_checkpoint=runs/x/checkpoint-2 "]
)
def test_the_line_that_goes_on(before):
    line = resume_line(["python", "a script.py", *before.split(), "--seed", "1"])
    assert line == "python 'a script.py' --seed 1 --resume_from_checkpoint auto"


def test_the_recipe_file():
    assert config_file(["s.py", "--config", "c.yaml"]) == config_file(["s.py", "--config=c.yaml"]) == "c.yaml"
    assert config_file(["s.py", "--config_file", "x.yaml"]) is None
