"""Covers `utils/threads.py`."""

import hashlib
import json
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tools.recipe_scripts import script
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools import small_base
from trl_fsdp_qlora.tools.cli.scripts import refuse_typos
from trl_fsdp_qlora.tools.data.datasets import read_problems, without_overlap
from trl_fsdp_qlora.tools.small_base import build_small_base, sum_without_carry
from trl_fsdp_qlora.utils.threads import fit_threads


def test_held_out_sums_are_not_trained_on():
    assert [sum_without_carry(*pair) for pair in ((47, 38), (12, 34), (95, 95))] == [75, 46, 180]
    train = read_problems("addition")
    held_out = read_problems("addition", "test")
    assert len(held_out) == 1000 and without_overlap(train, held_out)[1] == 0
    assert all(eval(problem["question"].rstrip("=")) == int(problem["answer"]) for problem in train + held_out)


def test_the_first_held_out_problems_are_as_hard_as_all_of_them():
    """`eval_problems: 100` measures on them. Sorted, they were sums with 10 to 18: 87% of 100 and 96% of 1,000."""
    answers = [int(problem["answer"]) for problem in read_problems("addition", "test")]
    error = statistics.pstdev(answers) / 10  # of the mean of 100
    assert abs(statistics.mean(answers[:100]) - statistics.mean(answers)) < 3 * error


def test_the_base_is_taught_what_it_always_was(monkeypatch):
    # The digest of the rows of the first version: figures in README.md and docs/ rest on them.
    monkeypatch.setattr(small_base, "SFT_STEPS", 8)
    rows = list(small_base.habit_dataset(seed=0))
    assert len(rows) == 1024
    digest = hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    assert digest == "b6f9a9b5e341628b3af5cb62b3e524d2f49619c54b6883b6a610add2866087b1"


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_a_small_model_takes_one_thread_and_a_larger_one_all(two_threads, tmp_path, monkeypatch):
    fit_threads(torch.nn.Linear(1, 10_000_000, bias=False))
    assert torch.get_num_threads() == 2
    with torch.device("meta"):
        fit_threads(torch.nn.Linear(2, 2))
    assert torch.get_num_threads() == 2  # not on the CPU
    monkeypatch.setattr(small_base, "SFT_STEPS", 1)
    build_small_base(tmp_path / "base")
    assert torch.get_num_threads() == 1


def test_the_commands_base_has_learned_something(tmp_path, monkeypatch):
    monkeypatch.setattr(small_base, "SFT_STEPS", 2)
    folder = tmp_path / "base"
    monkeypatch.setattr("sys.argv", [])
    assert main(f"small-base {folder} --seed 3".split()) == 0
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    untrained = small_base.new_model(small_base.character_tokenizer(), seed=3)
    question = [{"role": "user", "content": small_base.question_of(23, 47)}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(f"{text}70<|end|>", return_tensors="pt")["input_ids"]
    assert tokenizer.unk_token_id not in ids
    with torch.no_grad():
        losses = [m.eval()(input_ids=ids, labels=ids).loss.item() for m in (untrained, model)]
    assert losses[1] < losses[0]
    with pytest.raises(FileExistsError, match=folder.name):
        build_small_base(folder)


def test_the_training_command_names_a_recipe_and_its_options(tmp_path, monkeypatch, capsys):
    page = script("small_base")
    monkeypatch.setattr("sys.argv", ["small_base.py", str(tmp_path)])
    page.main()
    start, _, words = capsys.readouterr().out.rstrip().partition("train it: trl-fsdp-qlora grpo ")
    assert "is there already" in start and words.endswith(f" --model_name_or_path {tmp_path}")
    refuse_typos("grpo", words.split())
