"""Each script in examples/ runs as it is, with a tiny model and two steps."""

import json
import re
import runpy
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.distributed.launch import run_launcher
from tests.tiny import save_tiny_model, save_tiny_vision_model, save_tool_calling_model, these_first
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing

ROOT = Path(__file__).parents[1]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
# What each one starts from; a script that is missing here has no test.
MODELS = {
    "distillation": save_tiny_model,
    "dpo": save_tiny_model,
    "environment": lambda folder: save_tool_calling_model(folder, "guess", {"number": 50}),
    "grpo": save_tiny_model,
    "judge": save_tiny_model,
    "loop": save_tiny_model,
    "pictures": save_tiny_vision_model,
    "qlora": save_tiny_model,
    "rloo": save_tiny_model,
    "running_total": save_tiny_model,
    "second_try": save_tiny_model,
    "self_distillation": save_tiny_model,
    "tools": lambda folder: save_tool_calling_model(folder, "multiply", {"a": 12, "b": 13}),
}


@pytest.fixture
def run_example(tmp_path, monkeypatch):
    """Runs an example by its name in an empty folder; returns the names that it leaves."""

    def run(name: str, *words: str) -> dict:
        model = MODELS[name](tmp_path / "tiny")
        monkeypatch.chdir(tmp_path)
        teacher = ["--teacher", model] if name == "distillation" else []
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES[name]), "--model", model, "--steps", "2", *teacher, *words])
        return runpy.run_path(str(EXAMPLES[name]), run_name="__main__")

    return run


def test_every_script_has_a_test():
    # The pairs are made and trained on in tests/tools/recipes/test_rloo_dpo.py.
    assert {*MODELS, "two_processes", "preference_pairs"} == set(EXAMPLES)


@pytest.fixture
def passes(monkeypatch):
    """Prompt sharing of each scored pass and of each packed pass of a backbone, in order, and what it computed."""
    scored = []

    def counting(method):
        def counted(sharing, *call):
            output = method(sharing, *call)
            if method.__name__ == "score" or sharing.figures.tokens:
                scored.append((sharing, sharing.figures))
            return output

        return counted

    for method in (PromptSharing.score, PromptSharing.last_hidden_states):
        monkeypatch.setattr(PromptSharing, method.__name__, counting(method))
    return scored


def check_that_prompts_were_shared(passes):
    assert passes and all(sharing.status.packs for sharing, _ in passes), passes[-1][0].describe()
    figures = passes[-1][1]
    assert figures.tokens < figures.padded_tokens


SHARING = ["grpo", "qlora", "pictures", "dpo", "rloo", "self_distillation", "distillation"]


@pytest.mark.parametrize("name", these_first(SHARING, "grpo", "dpo", "self_distillation"))
def test_it_trains_and_shares_prompts(name, run_example, tmp_path, passes):
    trainer = run_example(name)["trainer"]
    assert trainer.state.global_step == 2
    assert (tmp_path / "runs" / name / "adapter_model.safetensors").is_file()
    check_that_prompts_were_shared(passes)
    if name == "qlora":
        assert trainer.model.get_base_model().is_loaded_in_4bit


def test_the_loop_shares_prompts(run_example, capsys, passes):
    run_example("loop")
    check_that_prompts_were_shared(passes)
    assert re.findall(r"(?m)^step (\d+)\b", capsys.readouterr().out)[:2] == ["0", "1"]


@pytest.mark.parametrize("name", these_first(["tools", "environment"], "tools"))
def test_tools_are_called(name, run_example, tmp_path):
    trainer = run_example(name)["trainer"]
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 2 and (tmp_path / "runs" / name / "adapter_model.safetensors").is_file()
    assert all(row["tools/call_frequency"] > 0.5 and row["tools/failure_frequency"] < 0.5 for row in logged), logged
    assert any(row["reward"] > 0 for row in logged)


def test_wrong_answers_are_asked_again(run_example):
    """An untrained model calls the tool only with the digits that it happens to begin with."""
    environments = run_example("second_try")["trainer"].environments
    tries = [len(environment.tries) for environment in environments]
    assert 1 <= max(tries) <= 2


def test_an_environment_of_verifiers(run_example, monkeypatch):
    pytest.importorskip("verifiers", reason="verifiers is not installed: `make test-verifiers`")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    try:
        trainer = run_example("running_total")["trainer"]
    finally:
        sys.modules.pop("running_total", None)
    logged = trainer.state.log_history[-1]
    assert trainer.state.global_step == 2 and logged["environment/turns"] == logged["episodes/rows_mean"] == 2


class Judge(BaseHTTPRequestHandler):
    """Replies to every second question with the answers in reverse, and to the others with prose."""

    replies: ClassVar[list[str]] = []

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.replies.append("8,7,6,5,4,3,2,1" if len(self.replies) % 2 == 0 else "I like them all.")
        body = json.dumps({"choices": [{"message": {"content": self.replies[-1]}}]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_judge_rewards_the_groups_that_it_ranks(run_example, monkeypatch):
    monkeypatch.setattr(Judge, "replies", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/v1"
    names = run_example("judge", "--judge", address)
    server.shutdown()
    assert len(Judge.replies) == 4  # two steps of two groups
    logged = [row for row in names["trainer"].state.log_history if "reward" in row]
    assert [row["reward"] for row in logged] == pytest.approx([0.5, 0.5])
    server.server_close()
    assert names["rewards_of_group"]("?", ["a", "b"]) == [None, None]  # nobody listens any more


def run_two_processes(config: str, folder: Path, *words: str) -> str:
    """Returns what the example prints under an accelerate config, after two steps."""
    script = [str(EXAMPLES["two_processes"]), "--model", save_tiny_model(folder / "tiny"), "--steps", "2", *words]
    launch = ["trl-fsdp-qlora", "launch", "--config_file", config, "--num_processes", "2"]
    run = run_launcher(*launch, *script, cwd=folder)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("2 processes, 2 steps") == 1
    adapter = json.loads((folder / "runs" / "two_processes" / "adapter_config.json").read_text())
    assert adapter["peft_type"] == "LORA"
    return run.stdout


@pytest.mark.processes
@pytest.mark.exhaustive
def test_two_processes(tmp_path):
    assert "4-bit base" not in run_two_processes("ddp_cpu", tmp_path)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_two_processes_on_a_cpu_share_a_4_bit_base(tmp_path):
    printed = run_two_processes("fsdp2_qlora_cpu", tmp_path, "--four-bits")
    assert printed.count("each process holds 0.50 of the 4-bit base") == 1
