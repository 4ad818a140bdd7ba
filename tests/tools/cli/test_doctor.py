"""The command doctor: what it finds of a machine, a package and a run, by planted faults."""

import re

import pytest

from tests.tiny import save_tiny_model, tool_tokenizer
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.cli import doctor
from trl_fsdp_qlora.tools.small_base import new_model

QUICK = "--config small-base/grpo/quickstart --model_name_or_path base --use_cpu true"


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    save_tiny_model(folder / "base")
    return folder


@pytest.fixture
def findings(capsys, user_folder, monkeypatch):
    """A function that runs the doctor on the quickstart with more arguments; it returns exit status and findings."""
    monkeypatch.chdir(user_folder)

    def call(words: str) -> tuple[int, list[dict]]:
        status = main(["doctor", *QUICK.split(), *words.split()])
        lines = capsys.readouterr().out.splitlines()[:-1]
        parts = (re.fullmatch(r"(\w+) +([^:]+): (.*)", line) for line in lines)
        return status, [dict(zip(("level", "check", "text"), part.groups(), strict=True)) for part in parts]

    return call


def files_of(folder) -> list:
    """The files and folders below `folder`, except those that an import writes."""
    return [path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts]


def test_a_recipe_that_is_right_and_no_folder_is_left(findings, user_folder):
    before = files_of(user_folder)
    for words in ("", "--per_device_train_batch_size 4 --num_processes 2"):
        status, items = findings(f"--output_dir runs/new/one {words}")
        assert status == 0
        assert {item["level"] for item in items} == {"ok"}, items
    texts = {item["check"]: item["text"] for item in items}
    assert texts["recipe"] == "EfficientGRPOConfig, 2 processes"
    assert files_of(user_folder) == before


@pytest.mark.parametrize(
    ("words", "level", "text"),
    [
        ("--lora_target_modules nothing", "error", "lora_target_modules: "),
        ("--learning_rat 1", "error", "unknown key '--learning_rat'; did you mean '--learning_rate'?"),
        (
            "--per_device_train_batch_size 4",
            "error",
            "num_generations=8 does not divide them: change one of these",
        ),
    ],
)
def test_each_finding_by_itself(words, level, text, findings):
    status, items = findings(words)
    problems = [item for item in items if item["level"] != "ok"]
    assert [item for item in problems if item["level"] == level and text in item["text"]], problems
    assert all("\n" not in item["text"] for item in items)
    assert status == any(item["level"] == "error" for item in problems)


TOOLS = """
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: the one
        b: the other
    '''
    return a + b


def without_thoughts(tokenizer):
    from trl.chat_template_utils import add_response_schema

    tokenizer = add_response_schema(tokenizer)  # TRL knows a template by its text
    tokenizer.chat_template = tokenizer.chat_template.replace("reasoning_content", "nothing")
    return tokenizer
"""


def test_a_template_that_strips_thinking_is_a_warning(findings, user_folder):
    """Qwen3's own template keeps what was thought since the last question; without that line it strips."""
    tokenizer = tool_tokenizer()
    new_model(tokenizer, 0, hidden=32, layers=2).save_pretrained(user_folder / "agent")
    tokenizer.save_pretrained(user_folder / "agent")
    (user_folder / "my_tools.py").write_text(TOOLS)
    agent = "--model_name_or_path agent --tools my_tools.py:add"
    strips = "--tool_format my_tools.py:without_thoughts"
    warnings = []
    for words in (agent, f"{agent} {strips}", f"{agent} {strips} --history template"):
        status, items = findings(words)
        assert status == 0, items
        warnings.append([item["text"] for item in items if item["check"] == "history"])
    line = "the chat template strips earlier thinking: what is trained is not what is served; history: template"
    assert warnings == [[], [line], []]


def test_devices():
    gpus = [("Tesla T4", (7, 5)), ("A100", (8, 0))]
    for installation, levels in (
        (("2.13.0+cpu", None, True, []), ["error", "ok"]),
        (("2.13.0", "12.8", True, []), ["error", "ok"]),
        (("2.13.0+cpu", None, False, []), ["ok"]),
        (("2.13.0", "12.8", True, gpus), ["warning", "ok"]),
    ):
        assert [item.level for item in doctor.devices(*installation)] == levels


def test_a_missing_toolkit_compiler_or_peer_access_is_named():
    complete = list(doctor.surroundings("/usr/bin/nvcc", "/usr/bin/cc", []))
    bare = list(doctor.surroundings(None, None, [(0, 1), (1, 0)]))
    assert complete == []
    assert [(item.level, item.check) for item in bare] == [
        ("ok", "CUDA toolkit"),
        ("warning", "C compiler"),
        ("warning", "peer access"),
    ]
    assert "GPUs 0 and 1 reach" in bare[-1].text
