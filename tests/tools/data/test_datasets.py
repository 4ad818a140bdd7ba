"""Covers `tools/recipe/problems.py`."""

import contextlib
import json
import statistics
from dataclasses import replace

import pytest
from datasets import Dataset, DatasetDict

from trl_fsdp_qlora.tools.data import datasets
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.problems import load_data, load_held_out


def write(path, rows):
    text = "\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows)
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_three_families_and_columns_of_ones_own(tmp_path):
    families = [
        ("svamp.json", {"Body": "A has 3", "Question": "How many?", "Answer": 3.0}, "A has 3. How many?", "3.0"),
        ("gsm8k.jsonl", {"question": "Q?", "answer": "1+1=2\n#### 2"}, "Q?", "2"),
        ("plain.jsonl", {"problem": "1+1=", "answer": 2}, "1+1=", "2"),
    ]
    for name, row, question, answer in families:
        expected = [{"row": 0, "question": question, "answer": answer}]
        assert datasets.read_problems(write(tmp_path / name, [row])) == expected
    path = write(tmp_path / "mine.jsonl", [{"task": "1+1=", "gold": 2, "question": "other", "answer": "none"}])
    script = ScriptArguments(path, question_column="task", answer_column="gold", skip_accuracy=True)
    assert load_data(script)[0]["answer"][:] == ["2"]
    with pytest.raises(datasets.DatasetError, match="tsk, gold"):
        datasets.read_problems(path, question_column="tsk", answer_column="gold")


def test_rewards_get_the_other_columns_of_a_source(tmp_path):
    """As in TRL: a reward that named one failed in a recipe."""
    rows = [
        {
            "question": f"{i}+1=",
            "answer": i + 1,
            "level": i,
            "tests": [f"f({i})"],
            "prompt": "not this one",
            "note": None,
        }
        for i in range(4)
    ]
    script = ScriptArguments(write(tmp_path / "mine.jsonl", rows), held_out=1)
    train, measured = load_data(script)
    assert {row["level"]: row["tests"] for part in (train, measured) for row in part} == {
        i: [f"f({i})"] for i in range(4)
    }
    for row in train:
        assert row["prompt"][0]["content"] == row["question"] and row["answer"] == str(row["level"] + 1)


OWN = ["my_rewards.py:mine"]
TALK = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
# A row of a data set that `GRPOTrainer` takes, its prompt in a recipe, and whether its answer can be graded.
FORMATS = {
    "multiple choice": ({"question": "Which? A) 1 B) 2", "answer": "B"}, "Which? A) 1 B) 2", True),
    "yes or no": ({"problem": "Is 2 even?", "answer": True}, "Is 2 even?", True),
    "free text": ({"question": "Capital?", "answer": "Paris"}, "Capital?", True),
    "a long text": ({"question": "Why?", "answer": "x" * 1000}, "Why?", False),
    "tests": ({"question": "f(x) = x + 1", "answer": ["assert f(1) == 2"]}, "f(x) = x + 1", False),
    "a table": ({"question": "Which?", "answer": {"a": 1}, "level": 3}, "Which?", False),
    "prompt only": ({"prompt": "A haiku."}, "A haiku.", False),
    "TRL's own columns": ({"prompt": "1+1?", "solution": "2", "tools": "[]"}, "1+1?", False),
    "a prompt before a question": ({"prompt": "A haiku.", "question": "?"}, "A haiku.", False),
    "no answer in this row": ({"problem": "1+1?", "answer": None, "tests": ["a"]}, "1+1?", False),
    "conversation": ({"prompt": TALK, "answer": 2}, TALK, True),
    "conversation alone": ({"prompt": TALK[1:]}, TALK[1:], False),
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_trls_trainer_takes_is_taken(name, tmp_path, capsys):
    row, prompt, is_gradable = FORMATS[name]
    path = write(tmp_path / "mine.jsonl", [row] * 4)
    with pytest.raises(datasets.DatasetError) if not is_gradable else contextlib.nullcontext():
        load_data(ScriptArguments(path, skip_accuracy=True))  # exact_answer compares with the answer
    train, measured = load_data(ScriptArguments(path, rewards=OWN, skip_accuracy=is_gradable))
    assert measured is None
    further_lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("data: ")]
    assert bool(further_lines) == (not is_gradable)  # why accuracy is not measured
    expected = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for read in train:
        assert read["prompt"] == expected
        for column in row.keys() - {"prompt"}:  # as stock TRL hands them to a reward
            graded = is_gradable and column == "answer"
            assert read[column] == (str(row[column]) if graded else row[column])


def test_a_conversation_keeps_its_own_system_prompt():
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    problems = [{"row": 0, "question": question, "answer": "2"} for question in (TALK, TALK[1:], parts)]
    prompts = [datasets.to_prompts([each], "Be short.", "{question} Now.")[0]["prompt"] for each in problems]
    assert prompts[0] == [TALK[0], {"role": "user", "content": "1+1? Now."}]
    assert prompts[1] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1? Now."}]
    assert prompts[2][0]["content"][0]["text"] == "Be short."
    assert prompts[2][1]["content"][1]["text"] == "What? Now." and parts[0]["content"][1]["text"] == "What?"
    assert datasets.to_prompts(problems[:1], chat=False)[0]["prompt"] == TALK


def test_accuracy_is_measured_by_answers_or_by_a_function(tmp_path, capsys):
    rows = [{"question": f"{i}?", "answer": [None, str(i), "Paris", "x" * 999][i % 4]} for i in range(20)]
    path = write(tmp_path / "mixed.jsonl", rows)
    script = ScriptArguments(path, rewards=OWN, held_out=8)
    train, measured = load_data(script)
    assert len(train) == 12 and set(measured["answer"]) <= {row["answer"] for row in rows[1::4] + rows[2::4]}
    printed = capsys.readouterr().out
    assert f"{len(measured)} of 8 " in printed
    assert load_held_out(script)["row"][:] == measured["row"][:]
    assert len(load_data(replace(script, accuracy_function="my_rewards.py:passes"))[1]) == 8
    path = write(tmp_path / "prompts.jsonl", [{"prompt": "A haiku."}] * 4)
    with pytest.raises(datasets.DatasetError, match="accuracy_function names a function of yours"):
        load_held_out(ScriptArguments(path))


def test_ungraded_data_needs_no_split_to_measure_on(tmp_path):
    (tmp_path / "hub").mkdir()
    write(tmp_path / "hub" / "train.jsonl", [{"prompt": "A haiku."}] * 4)
    train, measured = load_data(ScriptArguments(str(tmp_path / "hub"), rewards=OWN))
    assert len(train) == 4 and measured is None
    with pytest.raises(datasets.DatasetError, match="'test'"):
        load_data(ScriptArguments(str(tmp_path / "hub"), rewards=OWN, accuracy_function="my_rewards.py:passes"))


def test_an_error_names_few_of_many_columns(tmp_path):
    columns = {f"column {i}" * (1 + i % 2 * 50): i for i in range(20_000)}
    for rows in ([columns], [{name: 1} for name in columns]):
        with pytest.raises(datasets.DatasetError, match="…; looked for Body") as refused:
            datasets._known_columns(rows, "mine.jsonl", None, None, graded=True)
        assert len(str(refused.value)) < 1000
    path = write(tmp_path / "mine.jsonl", [{"problem": {"a": ["x" * 10_000]}, "answer": 1}])
    with pytest.raises(datasets.DatasetError, match="row 1: the field 'problem' must be text or a list") as refused:
        datasets.read_problems(path)
    assert len(str(refused.value)) < 400


def test_a_column_of_mixed_types_is_left_out_with_a_warning(caplog):
    problems = [
        {"row": 0, "question": "?", "answer": "2", "columns": {"mixed": "a", "fine": 0}},
        {"row": 1, "question": "?", "answer": "2", "columns": {"mixed": 1.5, "fine": 1}},
    ]
    data = datasets.to_prompts(problems)
    assert "mixed" not in data.column_names and "'mixed'" in caplog.text
    assert data["fine"][:] == [0, 1]


def test_prompts_and_place_holders():
    problems = [{"row": 5, "question": "1+1?", "answer": "2"}]
    row = datasets.to_prompts(problems, "Be short.", "Solve: {question}")[0]
    assert row["prompt"] == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Solve: 1+1?"}]
    assert (row["answer"], row["row"]) == ("2", 5)
    assert datasets.to_prompts(problems, "Be short.", chat=False)[0]["prompt"] == "Be short.\n1+1?"
    for literal in (r"{question} in \boxed{answer}", '{question} as {"answer": 1}', "{question} {}"):
        row = datasets.to_prompts(problems, template=literal, chat=False)[0]
        assert row["prompt"] == literal.replace("{question}", "1+1?")
    row = datasets.to_prompts(problems, template="{question} {{x}}", chat=False)[0]
    assert row["prompt"] == "1+1? {x}"  # as in Python's own format
    with pytest.raises(datasets.DatasetError, match=r"\{question\}"):
        datasets.to_prompts(problems, template="Solve")


def test_held_out_never_overlaps_also_with_repeated_questions():
    problems = [{"row": i, "question": f"q {i % 50}", "answer": "1"} for i in range(200)]
    train, held_out = datasets.hold_out(problems, 10)
    assert {p["question"] for p in train}.isdisjoint(p["question"] for p in held_out)
    assert len(train) + len(held_out) == 200
    assert len({p["question"] for p in held_out}) == 10
    assert datasets.hold_out(problems, 10) == (train, held_out)
    with pytest.raises(datasets.DatasetError, match="50"):
        datasets.hold_out(problems, 50)
    train = [{"question": "How  many?"}, {"question": "Other"}]
    assert datasets.without_overlap(train, [{"question": "how many?"}]) == ([{"question": "Other"}], 1)


ROWS = [{"problem": "1+1=", "answer": 2}, {"problem": "2, 3 and 4: how many?", "answer": 3}]
PROBLEMS = [{"row": i, "question": row["problem"], "answer": str(row["answer"])} for i, row in enumerate(ROWS)]
CSV = 'problem,answer\n1+1=,2\n"2, 3 and 4: how many?",3\n'


def test_kinds_of_text_files(tmp_path):
    kinds = {
        "mixed.jsonl": '{"problem": "1+1=", "answer": "2"}\n' + json.dumps(ROWS[1]),
        "windows_bom.jsonl": "\ufeff" + "\r\n".join(map(json.dumps, ROWS)) + "\r\n",
        "list.json": json.dumps(ROWS),
        "bom.csv": "\ufeff" + CSV,
        "rows.tsv": CSV.replace(",", "\t").replace("2\t 3", "2, 3"),
    }
    for name, content in kinds.items():
        (tmp_path / name).write_text(content, encoding="utf-8", newline="")
        assert datasets.read_problems(str(tmp_path / name)) == PROBLEMS, name


def test_parquet_what_datasets_saved_and_two_splits_as_one(tmp_path):
    dataset = Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": dataset.select([0]), "dev": dataset.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "hub").mkdir()
    write(tmp_path / "hub" / "train.jsonl", ROWS[:1])
    write(tmp_path / "hub" / "test.jsonl", ROWS[1:])
    both = {"rows.parquet": "train", "saved": "train", "splits": "train+dev", "hub": "train+test"}
    for name, split in both.items():
        assert datasets.read_problems(str(tmp_path / name), split) == PROBLEMS, name
    assert datasets.read_problems(str(tmp_path / "splits"), "train") == PROBLEMS[:1]
    assert datasets.read_problems(str(tmp_path / "hub")) == PROBLEMS[:1]


@pytest.mark.parametrize(
    "parts",
    [{}, {"held_out": 500}],
    ids=["whole file", "held out"],
)
def test_eval_problems_is_a_fixed_sample_also_of_a_sorted_file(tmp_path, parts):
    """The first hundred of a file that is sorted by difficulty are the hundred easiest."""
    rows = [{"problem": f"{i}+1=", "answer": i + 1} for i in range(1000)]
    path = write(tmp_path / "sorted.jsonl", rows)

    def measured(count: int | None) -> list[int]:
        return load_held_out(ScriptArguments(path, eval_problems=count, **parts))["row"][:]

    everything = measured(None)
    assert everything == measured(len(everything)) == sorted(everything)  # nothing is sampled: the file's own order
    sample = measured(100)
    assert len(set(sample)) == 100 and set(sample) <= set(everything)
    error = statistics.pstdev(everything) / 10  # of the mean of 100
    assert abs(statistics.mean(sample) - statistics.mean(everything)) < 3 * error
    assert measured(30) == sample[:30]  # a smaller sample is part of a larger one
    if parts:
        assert load_data(ScriptArguments(path, eval_problems=100, **parts))[1]["row"][:] == sample


def test_a_users_file_trains_unmeasured_and_is_measured_whole(tmp_path, capsys):
    path = write(tmp_path / "mine.jsonl", ROWS)
    train, test = load_data(ScriptArguments(dataset=path, skip_accuracy=True))
    assert len(train) == 2 and test is None
    assert len(load_held_out(ScriptArguments(dataset=path))) == 2
    assert path in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("rows.jsonl", b'{"question": "1", "answer": 2}\n{"question": "3", "answer": 6x}\n', "JSON"),
        ("rows.jsonl", '{"question": "1"}\n{"question": "café"}\n'.encode("latin-1"), "utf-8"),
        ("rows.csv", 'question,answer\n1,2\n"café",3\n'.encode("latin-1"), "utf-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(datasets.DatasetError, match=f"{name}.*{reason}"):
        datasets.read_problems(str(tmp_path / name), graded=False)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked the Hub"))
    for source in ("nosuch.jsonl", "./nosuch", "/nowhere/data", "data/nosuch", "a/b/c", "nosuch.jsnl", "o/nosuch.cvs"):
        with pytest.raises(datasets.DatasetError, match=f"{source}'?: there is no such file or folder"):
            datasets.read_problems(source)
    with pytest.raises(datasets.DatasetError, match=r"did you mean 'rows\.jsonl'"):
        datasets.read_problems("row.jsonl")
    for name in ("gsm8k", "openai/gsm8k", "Qwen/Qwen2.5-0.5B", "gpt-4.1", "owner/v0.1-8b"):
        assert not datasets.is_missing_path(name)
