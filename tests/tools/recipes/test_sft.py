"""The supervised start: worked answers that are right, in the prompts of reinforcement, taught by TRL's trainer.

Covers `tools/data/worked.py`.
"""

import json
import re
import runpy

import pytest

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.tools.data.answers import answers_match, extract_answer, parse_gold
from trl_fsdp_qlora.tools.data.datasets import read_problems
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.problems import load_data, load_held_out, load_problems

from .conftest import RECIPES


@pytest.fixture(scope="module")
def worked():
    return runpy.run_path(str(RECIPES / "sft.py"))["worked"]


def test_equations_are_written_out_and_rationales_lose_notes(worked):
    expected = {
        ("( ( 4.0 + 8.0 ) / 3.0 )", 4.0): "4 + 8 = 12\n12 / 3 = 4\n#### 4",
        ("( 4.0 - ( 3.0 - 19.0 ) )", 20.0): "3 - 19 = -16\n4 - (-16) = 20\n#### 20",
        ("( ( 1.0 / 3.0 ) * 6.0 )", 2.0): "1 / 3 = 1/3\n1/3 * 6 = 2\n#### 2",
        ("( ( 4.0 - 2.0 ) + 3.0 )", 1.0): None,  # SVAMP's row 679: the equation's value is 5
        ("( 4.0 / 0.0 )", 1.0): None,
        ("__import__('os')", 1.0): None,
        (None, 4.0): None,
    }
    for (equation, answer), work in expected.items():
        assert worked({"Equation": equation, "Answer": answer}) == work
    assert worked({"answer": "48/2 = <<48/2=24>>24 clips.\n#### 24"}) == "48/2 = 24 clips.\n#### 24"
    assert worked({"answer": "24"}) is None


def test_taught_answers_score_in_the_form_of_reinforcement(svamp, worked):
    taught = 0
    for problem in read_problems(str(svamp), whole_rows=True):
        solution = worked(problem["columns"])
        if solution:
            taught += 1
            assert answers_match(extract_answer(solution, "hash"), parse_gold(problem["answer"], problem["row"]))
    assert taught == 999


@pytest.fixture
def script(tmp_path) -> ScriptArguments:
    """SVAMP's columns in the characters of the tiny tokenizer; the first row's equation is wrong."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"Body": f"{a}+{b}", "Question": "=", "Equation": f"( {a}.0 + {b}.0 )", "Answer": a + b} for a, b in pairs]
    rows[0]["Equation"] = "( 1.0 + 1.0 )"
    (tmp_path / "sums.json").write_text(json.dumps(rows))
    path = str(tmp_path / "sums.json")
    return ScriptArguments(path, answer_format="hash", prompt_template="{question}+", held_out=30)


def test_no_held_out_problem_is_trained_on(script):
    parts = [{problem["question"] for problem in part} for part in load_problems(script)]
    assert [len(part) for part in parts] == [70, 30] and len(set.union(*parts)) == 100
    _, measured = load_data(script)
    assert load_held_out(script).to_list() == measured.to_list()


def test_it_trains_and_a_stopped_run_continues(script, tmp_path, monkeypatch, called, capsys):
    save_tiny_model(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    words = (
        "--model_name_or_path base --dtype float32 --dataset sums.json --held_out 30 --prompt_template {question}+ "
        "--output_dir out --per_device_train_batch_size 16 --learning_rate 1e-2 --save_strategy epoch "
        "--sft_problems 32 --gradient_checkpointing false --bf16 false --use_cpu true --report_to none "
        "--disable_tqdm true --logging_steps 1 --resume_from_checkpoint auto --max_completion_length 4 "
        "--answer_format hash"
    )
    for epochs in (1, 2):
        called("sft", f"{words} --num_train_epochs {epochs}")
    printed = capsys.readouterr().out
    assert re.search(r"\b32\b.* 70\b", printed)
    assert "report.html" in printed and "{'loss'" not in printed and "\x1b" not in printed
    record = json.loads((tmp_path / "out" / "metrics.json").read_text())
    losses = [entry["loss"] for entry in record["history"] if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert (tmp_path / "out" / "checkpoint-2").is_dir()
    called("evaluate", "--model_name_or_path out --output measured.json")  # the folder has how it is measured
    result = json.loads((tmp_path / "measured.json").read_text())
    assert result["n"] == 30 and 0 < result["tokens_per_completion"] <= 4
    assert result["correct"] == record["after"]["correct"] and record["before"]["n"] == 30
