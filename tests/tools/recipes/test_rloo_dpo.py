"""recipes/rloo.py and recipes/dpo.py on a small model: what they leave, pairs that are right and wrong, resuming.

Covers `tools/recipe/pairs.py`.
"""

import json
import re
import runpy
from fractions import Fraction

import pytest
from datasets import Dataset
from trl import extract_prompt

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.tools.data import datasets
from trl_fsdp_qlora.tools.data.answers import DatasetError, answers_match, extract_answer
from trl_fsdp_qlora.tools.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.tools.recipe.pairs import read_pairs
from trl_fsdp_qlora.tools.recipe.problems import load_held_out

from .conftest import RECIPES

COMMON = (
    "--model_name_or_path base --dtype float32 --dataset sums.json --held_out 30 --output_dir out "
    "--max_completion_length 4 --use_peft true --lora_r 4 --lora_dropout 0 --lora_target_modules all-linear "
    "--gradient_checkpointing false --bf16 false --use_cpu true --report_to none --disable_tqdm true --logging_steps "
    "1 --resume_from_checkpoint auto"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small model, and sums with worked answers."""
    save_tiny_model(tmp_path / "base")
    pairs = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"Body": f"{a}+{b}", "Question": "=", "Equation": f"( {a}.0 + {b}.0 )", "Answer": a + b} for a, b in pairs]
    (tmp_path / "sums.json").write_text(json.dumps(rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_rloo_trains_measures_and_continues(folder, called):
    words = (
        f"{COMMON} --chat false --per_device_train_batch_size 8 --num_generations 4 --save_strategy steps "
        "--save_steps 1"
    )
    for steps in (1, 2):
        called("rloo", f"{words} --max_steps {steps}")
    record = json.loads((folder / "out" / "metrics.json").read_text())
    assert record["before"]["n"] == record["after"]["n"] == 30
    assert [entry["step"] for entry in record["history"] if "loss" in entry] == [1, 2]
    assert "RLOO" in (folder / "out" / "README.md").read_text()


def test_a_recipe_trains_on_tests_in_place_of_answers(folder, called):
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": [i, i + 1]} for i in range(40)]
    (folder / "tests.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "own_of_tests.py").write_text(
        "def near(completions, answer, **columns):\n"
        "    assert all(b == a + 1 for a, b in answer)\n"
        "    return [-len(each[-1]['content']) for each in completions]\n"
        "def even(prompts, completions, answer, **columns):\n"
        "    return [1 - low % 2 for low, high in answer]\n"
    )
    words = f"{COMMON} --dataset tests.jsonl --rewards own_of_tests.py:near --accuracy_function own_of_tests.py:even"
    called("rloo", f"{words} --max_steps 1 --per_device_train_batch_size 8 --num_generations 4 --save_strategy no")
    record = json.loads((folder / "out" / "metrics.json").read_text())
    held_out = load_held_out(ScriptArguments("tests.jsonl", held_out=30, accuracy_function="own_of_tests.py:even"))
    even = sum(low % 2 == 0 for low, _ in held_out["answer"])
    assert record["before"]["correct"] == record["after"]["correct"] == even
    assert record["measured_on"]["accuracy_function"] == "own_of_tests.py:even"
    called(
        "rloo",
        f"{words.partition(' --accuracy_f')[0]} --max_steps 1 --per_device_train_batch_size 8 "
        "--num_generations 4 --save_strategy no --output_dir unmeasured",
    )
    assert "before" not in json.loads((folder / "unmeasured" / "metrics.json").read_text())


def test_dpo_trains_on_pairs_that_the_example_makes(folder, called, capsys, monkeypatch):
    made = "pairs.py --model base --dataset sums.json --held-out 30 --problems 24 --samples 2 --output pairs.jsonl"
    monkeypatch.setattr("sys.argv", made.split())
    runpy.run_path(str(RECIPES.parent / "examples" / "preference_pairs.py"), run_name="__main__")
    words = f"{COMMON} --pairs pairs.jsonl --answer_format hash --per_device_train_batch_size 8 --save_steps 1"
    for steps in (1, 2):
        called("dpo", f"{words} --max_steps {steps} --save_strategy steps")
    printed = capsys.readouterr().out
    assert re.search(r"(?m)^step 1/1 .*\bloss 0\.\d+ ", printed) and "{'loss'" not in printed
    assert re.search(r"(?m)metrics\.json\b.*report\.html .*\bout$", printed)
    assert "out/report.html" in printed
    assert "->" in printed.splitlines()[-1]
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    assert 16 <= len(pairs) <= 24
    for pair in pairs:
        total = sum(map(int, re.findall(r"\d", pair["prompt"][-1]["content"])))
        right, wrong = (extract_answer(pair[name][0]["content"]) for name in ("chosen", "rejected"))
        assert answers_match(right, Fraction(total)) and not answers_match(wrong, Fraction(total))
    record = json.loads((folder / "out" / "metrics.json").read_text())
    assert [entry["step"] for entry in record["history"] if "loss" in entry] == [1, 2]
    assert record["before"]["n"] == record["after"]["n"] == 30
    assert "DPO" in (folder / "out" / "README.md").read_text()
    assert "rewards/margins" in (folder / "out" / "report.html").read_text()
    called("evaluate", "--adapter out --output measured.json")
    assert json.loads((folder / "measured.json").read_text())["correct"] == record["after"]["correct"]


def talk(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


SAID = {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "2"), ("rejected", "3"))}
ASKED = [{"role": "user", "content": "1+1="}]
EXPLICIT_TALK = {"prompt": ASKED, **SAID}
IMPLICIT_TALK = {"chosen": talk("1+1=", "2"), "rejected": talk("1+1=", "3")}
SPACED = {"chosen": " 2", "rejected": " 3"}
TEXTS = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
# By name, a row in one of TRL's formats and the pair that it is.
PAIRS = {
    "texts": (TEXTS, TEXTS),
    "texts without a prompt": ({"chosen": "1+1= 2", "rejected": "1+1= 3"}, {"prompt": "1+1=", **SPACED}),
    "conversations": (EXPLICIT_TALK, EXPLICIT_TALK),
    "conversations without a prompt": (IMPLICIT_TALK, EXPLICIT_TALK),
    "conversations and a text": ({"prompt": "1+1=", **IMPLICIT_TALK}, EXPLICIT_TALK),
    "a conversation and texts": ({"prompt": ASKED, "chosen": "2", "rejected": "3"}, EXPLICIT_TALK),
    "further columns": ({**TEXTS, "score_chosen": 3.5}, {**TEXTS, "score_chosen": 3.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("kind", ["pairs.jsonl", "pairs.parquet", "folder", "own_pairs_of_tests.py:load"])
def test_pairs_in_every_format_of_trls(name, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row, pair = PAIRS[name]
    rows = [row] * 3
    if kind == "pairs.jsonl":
        (tmp_path / kind).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif kind == "pairs.parquet":
        Dataset.from_list(rows).to_parquet(kind)
    elif kind == "folder":
        Dataset.from_list(rows).save_to_disk(kind)
    else:
        monkeypatch.setattr(datasets, "load_function", lambda path: lambda: rows)
    assert read_pairs(kind).to_list() == [pair] * 3


def test_dpo_on_implicit_prompts_equals_explicit_ones(folder, called, monkeypatch):
    """Stock TRL extracts the prompt itself; the losses are equal, and no `dataset` is needed."""
    asked = [(f"{i}+{i}=", str(2 * i), str(i)) for i in range(1, 17)]
    implicit = [
        {"chosen": talk(question, right), "rejected": talk(question, wrong)} for question, right, wrong in asked
    ]
    explicit = [extract_prompt(row) for row in implicit]
    words = COMMON.replace("--dataset sums.json --held_out 30 ", "").replace(" --resume_from_checkpoint auto", "")
    losses = []
    for name, rows in (("implicit", implicit), ("explicit", explicit)):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        settings = f"--pairs {name}.jsonl --output_dir {name} --max_steps 2 --per_device_train_batch_size 4"
        called("dpo", f"{words} {settings} --use_peft false --save_strategy no --learning_rate 1e-2")
        assert (folder / name / "model.safetensors").is_file()
        record = json.loads((folder / name / "metrics.json").read_text())
        losses.append([entry["loss"] for entry in record["history"] if "loss" in entry])
    assert len(losses[0]) == 2 and losses[0] == losses[1]


def test_a_missing_file_of_pairs_is_named(tmp_path):
    (tmp_path / "pairs.jsonl").touch()
    for name, hint in (("pair.jsonl", "did you mean 'pairs.jsonl'?"), ("nosuch.jsonl", "the head of a recipe has")):
        with pytest.raises(DatasetError, match=rf"pairs='.*{name}': there is no such file or folder; {hint}"):
            read_pairs(tmp_path / name)


def test_a_file_without_pairs_is_refused_by_its_name(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2)
    assert isinstance(read_pairs(path), Dataset) and len(read_pairs(path)) == 2
    for text in ('{"prompt": "a"}', '{"chosen": "b"}', ""):
        path.write_text(text)
        with pytest.raises(DatasetError, match=path.name):
            read_pairs(path)
