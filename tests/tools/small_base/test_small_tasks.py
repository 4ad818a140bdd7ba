import hashlib
import json
import random
import statistics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from tests.tools.recipe_scripts import script
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.cli.scripts import refuse_typos
from trl_fsdp_qlora.tools.data.datasets import read_problems, without_overlap
from trl_fsdp_qlora.tools.small_base import text as small_base
from trl_fsdp_qlora.tools.small_base import vision as small_vision
from trl_fsdp_qlora.tools.small_base.text import build_small_base, sum_without_carry
from trl_fsdp_qlora.utils.threads import fit_threads


def test_held_out_sums_are_never_trained_on_and_have_their_answers():
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


def test_the_addition_base_is_taught_what_it_always_was(monkeypatch):
    # The digest of the rows before there were other tasks: figures in README.md and docs/ rest on them.
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


def test_a_small_model_takes_one_thread_and_a_larger_one_what_there_is(two_threads, tmp_path, monkeypatch):
    fit_threads(torch.nn.Linear(1, 10_000_000, bias=False))
    assert torch.get_num_threads() == 2
    with torch.device("meta"):
        fit_threads(torch.nn.Linear(2, 2))
    assert torch.get_num_threads() == 2  # not on the CPU
    monkeypatch.setattr(small_base, "SFT_STEPS", 1)
    build_small_base(tmp_path / "base")
    assert torch.get_num_threads() == 1


def test_the_addition_base_is_built_by_its_command_and_has_learned_something(tmp_path, monkeypatch):
    monkeypatch.setattr(small_base, "SFT_STEPS", 2)
    folder = tmp_path / "base"
    monkeypatch.setattr("sys.argv", [])
    assert main(f"small-base {folder} --seed 3 --task addition".split()) == 0
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


def test_the_base_that_sees_loads_and_has_learned_something(tmp_path, monkeypatch):
    monkeypatch.setattr(small_base, "SHAPES_STEPS", 2)
    folder = build_small_base(tmp_path / "base", seed=3, task="shapes")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    rows = [row for row in small_vision.coloured_shapes("test") if row["problem"] == "How many shapes are there?"][:16]
    parts = [[{"type": "image", "image": row["image"]}, {"type": "text", "text": row["problem"]}] for row in rows]
    prompts = [[{"role": "user", "content": content}] for content in parts]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    trainer = processor.apply_chat_template(prompts, **options)
    text = processor.tokenizer.decode(trainer["input_ids"][0])
    assert text == "<|user|>" + "<image>" * 9 + rows[0]["problem"] + "<|assistant|>"
    right = torch.tensor([processor.tokenizer.convert_tokens_to_ids(str(row["answer"] - 1)) for row in rows])
    chances = []
    for one in (model, small_vision.new_vision_model(processor, seed=3)):
        with torch.no_grad():
            chances.append(one.eval()(**trainer).logits[:, -1].softmax(-1).gather(1, right[:, None]).mean())
    assert chances[0] > chances[1]


def test_its_words_are_those_of_every_question_and_most_answers_are_one_too_small():
    tokenizer = small_vision.shapes_processor().tokenizer
    questions = [row["problem"] for row in small_vision.coloured_shapes("test")]
    ids = tokenizer(questions)["input_ids"]
    assert all(tokenizer.unk_token_id not in row for row in ids) and tokenizer.batch_decode(ids) == questions
    off = []
    for i, row in enumerate(small_vision.shapes_dataset(seed=5, rows=400)):
        answer = small_vision.shapes_row(random.Random(f"5, {i}"))["answer"]
        off += [answer - int(row["completion"][0]["content"])] if answer else []
    assert set(off) == {0, 1} and 0.5 < sum(off) / len(off) < 0.7


def test_the_command_that_trains_each_base_names_a_recipe_and_its_options(tmp_path, monkeypatch, capsys):
    page = script("small_base")
    assert page.TRAIN.keys() == {*small_base.TAUGHT}
    for task, words in page.TRAIN.items():
        refuse_typos("grpo", "tools.cli.scripts", "grpo", words.split())
        monkeypatch.setattr("sys.argv", ["small_base.py", str(tmp_path), "--task", task])
        page.main()
        printed = capsys.readouterr().out
        assert printed.endswith(f"train it: trl-fsdp-qlora grpo {words} --model_name_or_path {tmp_path}\n")
