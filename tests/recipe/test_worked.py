"""Worked answers, the problems that are set aside for validation, and supervised fine-tuning on both."""

import json
import re

import pytest
from trl import ModelConfig, SFTConfig

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.recipe.answers import answers_match, extract_answer, parse_gold
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.recipe.data import load_data, load_held_out, load_problems
from trl_fsdp_qlora.recipe.datasets import DatasetError, read_problems
from trl_fsdp_qlora.recipe.supervised import build_sft_trainer, run_sft, worked_data
from trl_fsdp_qlora.recipe.worked import gsm8k_work, svamp_work
from trl_fsdp_qlora.run.errors import CheckpointError


@pytest.mark.parametrize(
    ("equation", "answer", "work"),
    [
        ("( 76.0 - 25.0 )", 51.0, "76 - 25 = 51\n#### 51"),
        ("( ( 4.0 + 8.0 ) / 3.0 )", 4.0, "4 + 8 = 12\n12 / 3 = 4\n#### 4"),
        ("( 4.0 - ( 3.0 - 19.0 ) )", 20.0, "3 - 19 = -16\n4 - (-16) = 20\n#### 20"),
        ("( 28.0 * ( 24.0 / 16.0 ) )", 42.0, "24 / 16 = 1.5\n28 * 1.5 = 42\n#### 42"),
        ("( ( 4.0 - 2.0 ) + 3.0 )", 1.0, None),  # SVAMP's row 679: the equation comes to 5
        ("( 4.0 / 0.0 )", 1.0, None),
        ("( 2.0 ** 3.0 )", 8.0, None),
        ("__import__('os')", 1.0, None),
        ("4 +", 4.0, None),
        (None, 4.0, None),
    ],
)
def test_an_equation_is_written_out(equation, answer, work):
    assert svamp_work({"Equation": equation, "Answer": answer}) == work


def test_a_rationale_loses_its_notes():
    assert gsm8k_work({"answer": "48/2 = <<48/2=24>>24 clips.\n#### 24"}) == "48/2 = 24 clips.\n#### 24"
    assert gsm8k_work({"answer": "24"}) is None


def test_what_is_taught_scores_in_the_form_that_reinforcement_wants(svamp):
    problems = [problem for problem in read_problems(str(svamp), worked=True) if problem["work"]]
    assert len(problems) == 999
    for problem in problems:
        assert answers_match(extract_answer(problem["work"], "hash"), parse_gold(problem["answer"], problem["row"]))


def rows(count: int) -> list[dict]:
    """SVAMP's columns in the characters of the tiny tokenizer; the first row's equation is wrong."""
    made = [
        {"Body": f"{a}+{b}", "Question": "=", "Equation": f"( {a}.0 + {b}.0 )", "Answer": a + b}
        for a in range(10)
        for b in range(10)
    ]
    made[0]["Equation"] = "( 1.0 + 1.0 )"
    return made[:count]


@pytest.fixture
def script(tmp_path) -> ScriptArguments:
    path = tmp_path / "sums.json"
    path.write_text(json.dumps(rows(100)))
    return ScriptArguments(
        str(path),
        held_out=30,
        validation=10,
        accuracy_on="validation",
        answer_format="hash",
        prompt_template="{question}+",
    )


def test_validation_comes_out_of_training_and_nothing_is_in_two_places(script):
    parts = [{problem["question"] for problem in part} for part in load_problems(script)]
    assert [len(part) for part in parts] == [60, 10, 30]
    assert len(set.union(*parts)) == 100
    _, measured = load_data(script)
    assert load_held_out(script).to_list() == measured.to_list()
    script.validation = 0
    with pytest.raises(
        DatasetError, match="accuracy_on='validation' has no problems to measure on; set validation: 100"
    ):
        load_data(script)
    script.accuracy_on = "test"
    _, test = load_data(script)
    assert {row["row"] for row in test}.isdisjoint(row["row"] for row in measured)
    script.validation = 70
    with pytest.raises(DatasetError, match="validation=70 of 70 different questions leaves nothing"):
        load_data(script)


def test_the_prompts_are_those_of_reinforcement(script, monkeypatch, tmp_path, capsys):
    script.validation = 1  # so that the row that cannot be taught is among those to train on
    taught, measured = worked_data(script, None)
    prompts, also_measured = load_data(script)
    skipped = [row for row in prompts if row["row"] == 0]
    assert [row["prompt"] for row in prompts if row["row"] != 0] == taught["prompt"][:]
    assert measured.to_list() == also_measured.to_list()
    assert len(taught) == 69 - len(skipped)
    assert re.fullmatch(r"\d \+ \d = \d+\n#### \d+", taught[0]["completion"][0]["content"])
    assert len(worked_data(script, 5)[0]) == 5
    with pytest.raises(DatasetError, match="sft_problems=70 are more than"):
        worked_data(script, 70)
    with pytest.raises(DatasetError, match="'addition' holds no worked answers"):
        worked_data(ScriptArguments("addition"), None)


def test_an_epoch_is_measured_and_kept_and_a_stopped_run_goes_on(script, tmp_path):
    base, out = save_tiny_model(tmp_path / "base"), tmp_path / "out"

    def run(epochs: int, resume=None):
        train, test = worked_data(script, 32)
        config = SFTConfig(
            str(out), num_train_epochs=epochs, per_device_train_batch_size=16, learning_rate=1e-2, save_strategy="epoch",
            gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        trainer = build_sft_trainer(config, ModelConfig(base, dtype="float32"), train)
        record = run_sft(trainer, script, test, 4, resume)
        return trainer, record

    _, first = run(1)
    assert (first["before"]["n"], len(first["epochs"]), first["accuracy_on"]) == (10, 1, "validation")
    trainer, second = run(2, "auto")
    assert trainer.state.global_step == 4
    assert second["before"] == json.loads(json.dumps(first["before"]))
    assert [entry["epoch"] for entry in second["epochs"]] == [1, 2]
    losses = [entry["loss"] for entry in second["history"] if "loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert {"model.safetensors", "tokenizer.json", "checkpoint-2"} <= {path.name for path in out.iterdir()}
    trainer, third = run(2, "auto")  # over: nothing is trained
    assert trainer.state.global_step == 0 and third == json.loads(json.dumps(second))
    with pytest.raises(CheckpointError):
        run(3, str(tmp_path / "none"))
