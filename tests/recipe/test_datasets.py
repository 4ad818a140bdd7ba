import json

import pytest

from trl_fsdp_qlora.recipe import datasets
from trl_fsdp_qlora.recipe.answers import UnparsableGoldAnswer


def write(path, rows):
    text = "\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_three_families(tmp_path):
    svamp = write(tmp_path / "svamp.json", [{"Body": "A has 3", "Question": "How many?", "Answer": 3.0}])
    gsm8k = write(tmp_path / "gsm8k.jsonl", [{"question": "Q?", "answer": "1+1=2\n#### 2"}])
    plain = write(tmp_path / "plain.jsonl", [{"problem": "1+1=", "answer": 2}])
    assert datasets.read_problems(svamp) == [{"row": 0, "question": "A has 3. How many?", "answer": "3.0"}]
    assert datasets.read_problems(gsm8k) == [{"row": 0, "question": "Q?", "answer": "2"}]
    assert datasets.read_problems(plain) == [{"row": 0, "question": "1+1=", "answer": "2"}]


def test_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(datasets.DatasetError, match="columns a, b; known families"):
        datasets.read_problems(write(tmp_path / "x.json", [{"a": 1, "b": 2}]))
    with pytest.raises(datasets.DatasetError, match="no rows"):
        datasets.read_problems(write(tmp_path / "empty.json", []))
    with pytest.raises(datasets.DatasetError, match="no file here and no Hub id"):
        datasets.read_problems("some/missing/file.json")
    rows = [{"problem": "1", "answer": "1"}, {"problem": "2", "answer": "two"}]
    with pytest.raises(UnparsableGoldAnswer, match="row 1"):
        datasets.read_problems(write(tmp_path / "gold.json", rows))


def test_held_out_never_overlaps_also_with_repeated_questions():
    problems = [{"row": i, "question": f"q {i % 50}", "answer": "1"} for i in range(200)]
    train, held_out = datasets.hold_out(problems, 10)
    assert {p["question"] for p in train}.isdisjoint(p["question"] for p in held_out)
    assert len(train) + len(held_out) == 200
    assert len({p["question"] for p in held_out}) == 10
    assert datasets.hold_out(problems, 10) == (train, held_out)
    with pytest.raises(datasets.DatasetError, match="leaves nothing"):
        datasets.hold_out(problems, 50)


def test_without_overlap_ignores_case_and_spaces():
    train = [{"question": "How  many?"}, {"question": "Other"}]
    assert datasets.without_overlap(train, [{"question": "how many?"}]) == ([{"question": "Other"}], 1)


def test_prompts():
    problems = [{"row": 5, "question": "1+1?", "answer": "2"}]
    row = datasets.to_prompts(problems, "Be short.", "Solve: {question}")[0]
    assert row["prompt"] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Solve: 1+1?"},
    ]
    assert (row["answer"], row["row"]) == ("2", 5)
    assert datasets.to_prompts(problems, "Be short.", chat=False)[0]["prompt"] == "Be short.\n1+1?"
    with pytest.raises(datasets.DatasetError, match=r"no \{question\}"):
        datasets.to_prompts(problems, template="Solve")


@pytest.mark.parametrize(
    ("task", "question", "answer"), [("addition", "23+47=", "70"), ("multiplication", "23*47=", "1081")]
)
def test_the_tasks_of_the_small_base_by_name(task, question, answer):
    train, held_out = datasets.read_problems(task), datasets.read_problems(task, "test")
    assert len(held_out) == 1000
    assert {"question": question, "answer": answer}.items() <= next(
        p for p in train + held_out if p["question"] == question
    ).items()
    assert datasets.without_overlap(train, held_out)[1] == 0
