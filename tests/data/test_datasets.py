import json
import statistics

import pytest
from datasets import Dataset, DatasetDict

from trl_fsdp_qlora.data import datasets
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.recipe.problems import load_data, load_held_out


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
    for literal in (r"{question} in \boxed{answer}", '{question} as {"answer": 1}', "{question} {{x}} {}"):
        row = datasets.to_prompts(problems, template=literal, chat=False)[0]
        assert row["prompt"] == literal.replace("{question}", "1+1?")
    for template, named in (("Solve", r"\{question\}"), ("{context} {question}", r"\{context\}")):
        with pytest.raises(datasets.DatasetError, match=named):
            datasets.to_prompts(problems, template=template)


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
    both = {"rows.parquet": "train", "saved": "any", "splits": "train+dev", "hub": "train+test"}
    for name, split in both.items():
        assert datasets.read_problems(str(tmp_path / name), split) == PROBLEMS, name
    assert datasets.read_problems(str(tmp_path / "splits"), "train") == PROBLEMS[:1]
    assert datasets.read_problems(str(tmp_path / "hub")) == PROBLEMS[:1]


@pytest.mark.parametrize(
    "parts",
    [{}, {"held_out": 500}, {"held_out": 200, "validation": 500, "accuracy_on": "validation"}],
    ids=["whole file", "held out", "validation"],
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


def test_a_file_of_ones_own_trains_unmeasured_and_is_measured_whole(tmp_path, capsys):
    path = write(tmp_path / "mine.jsonl", ROWS)
    train, test = load_data(ScriptArguments(dataset=path, skip_accuracy=True))
    assert len(train) == 2 and test is None
    assert len(load_held_out(ScriptArguments(dataset=path))) == 2
    assert path in capsys.readouterr().out
