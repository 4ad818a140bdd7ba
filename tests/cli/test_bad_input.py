"""What a user mistypes or does not have, command by command: one line with the nearest known name, and the exit status."""

import json
import logging
import threading
from contextlib import contextmanager
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants
from trl import ModelConfig

from tests.planning.models import folder
from trl_fsdp_qlora import AStarPOConfig, TSPMOConfig
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.cli import compare
from trl_fsdp_qlora.cli.scripts import LAUNCHER
from trl_fsdp_qlora.planning import command
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.run import launch
from trl_fsdp_qlora.run.one_line import refuse_misspelled

QUICK = "--config small-base/grpo/quickstart"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a mistyped recipe, a YAML that is none, and folders that are no models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "typo.yaml").write_text("model_name_or_path: base\nlerning_rate: 1e-5\n")
    (tmp_path / "syntax.yaml").write_text("a: [1\nb")
    folder(tmp_path / "base")
    for name, config in (("empty", None), ("odd", {"hello": 1})):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
    folder(tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    return tmp_path


def said_in_one_line(words: str, capsys) -> tuple[int, str]:
    try:
        status = main(words.split())
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    return status, printed.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gpro", "no command 'gpro'; did you mean 'grpo'?"),
        ("recipes small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        ("recipes small-base/grpo/quickstart --copi", "unknown option '--copi'; did you mean '--copy'?"),
        ("config cpi", "did you mean 'cpu'?"),
        ("config cpu --halp", "unknown option '--halp'; did you mean '--help'?"),
        ("launch", "no script; trl-fsdp-qlora launch --config_file ddp my_script.py"),
        ("launch --config_file ddpp x.py", "no accelerate config named 'ddpp'; did you mean 'ddp'?"),
        ("launch --num_processes two x.py", "invalid int value: 'two'"),
        ("publish", "the following arguments are required: adapter, --repo"),
        ("publish nothing_here --repo me/sums", "'nothing_here' is no folder"),
        ("grpo --config small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        (f"grpo {QUICK} --num_procesess 2", "unknown key '--num_procesess'; did you mean '--num_processes'?"),
        ("plan", "plan needs a recipe: --config FILE.yaml"),
        ("plan --config small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        ("plan --config typo.yaml", "typo.yaml: unknown key 'lerning_rate'; did you mean 'learning_rate'?"),
        ("plan --config syntax.yaml", "--config syntax.yaml, line 2, column 2: no YAML"),
        (f"plan {QUICK} --hardwear h100", "unknown key '--hardwear'; did you mean '--hardware'?"),
        (f"plan {QUICK} --num_processes two", "argument --num_processes: invalid int value: 'two'"),
        (f"plan {QUICK} --num_processes 0", "--num_processes 0 must be at least 1"),
        (f"plan {QUICK} --accelerate_config ddpp", "no such file or name; did you mean 'ddp'?"),
        ("plan --model_name_or_path empty", "'empty' is a folder without config.json"),
        ("plan --model_name_or_path odd", "Should have a `model_type` key in its config.json"),
        ("plan --model_name_or_path cut --hardware h100", "has no header of safetensors"),
        ("compare --config small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        (f"compare {QUICK} --stepps 3", "unknown key '--stepps'; did you mean '--steps'?"),
        ("doctor --config small-base/grpo/quikstart", "did you mean 'small-base/grpo/quickstart'?"),
        ("doctor --jason", "unknown key '--jason'; did you mean '--json'?"),
        ("small-base base --taks addition", "unknown option '--taks'; did you mean '--task'?"),
        ("merge --adaptor x --output y", "unknown key '--adaptor'; did you mean '--adapter'?"),
    ],
)
def test_one_line_names_what_is_meant(words, said, place, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["trl-fsdp-qlora"])
    status, line = said_in_one_line(words, capsys)
    assert status == 2 and line.startswith("error: ") and said in line


def test_no_field_is_taken_for_a_misspelled_option():
    options = {*LAUNCHER, *compare._OWN, "--config", "--json"}
    options |= {option for action in command.parser()._actions for option in action.option_strings}
    known = {
        f"--{item.name}"
        for kind in (TSPMOConfig, AStarPOConfig, ModelConfig, ScriptArguments)
        for item in fields(kind)
    }
    refuse_misspelled(sorted(known | {name.replace("_", "-") for name in known}), options)
    with pytest.raises(ValueError, match="did you mean '--steps'"):
        refuse_misspelled(["--stepps=3"], options)


_KINDS = {"gated": (403, "GatedRepo"), "bare": (404, "EntryNotFound"), "": (200, "")}


class _Answers(BaseHTTPRequestHandler):
    """A Hub with a gated model, one without a config, and nothing else."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        status, error = _KINDS.get(self.path.split("/")[1], (401, "RepoNotFound"))
        self.send_response(status)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD


@contextmanager
def hub(monkeypatch, tmp_path):
    """That Hub in the place of the real one; it is gone behind the block, and still asked."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def test_a_gated_model_no_such_model_and_no_network_are_one_line_each(place, monkeypatch, capsys):
    with hub(monkeypatch, place):
        for name, reason in (
            ("gated/model", "gated repo"),
            ("nobody/model", "is not a valid model identifier"),
            ("bare/model", "no folder here, and without config.json on the Hub"),
        ):
            status, line = said_in_one_line(f"plan --model_name_or_path {name}", capsys)
            assert status == 2 and f"model_name_or_path='{name}'" in line and reason in line
            assert "a folder with its config.json is enough: --model_name_or_path FOLDER" in line
    status, line = said_in_one_line("plan --model_name_or_path gated/model", capsys)
    assert status == 2 and "couldn't connect to" in line and "--model_name_or_path FOLDER" in line


def test_what_accelerate_says_of_threads_alone_is_left_out():
    def says(*names: str) -> bool:
        lines = "".join(f"\t`--{name}` was set to a value of `2`\n" for name in names)
        record = logging.LogRecord(
            "x", logging.WARNING, "", 0, f"The following values were not passed:\n{lines}", None, None
        )
        return launch._tells_more_than_threads(record)

    assert not says("num_cpu_threads_per_process")
    assert says("num_processes", "num_cpu_threads_per_process") and says("num_processes")
