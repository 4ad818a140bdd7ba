from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from tests.tiny import prompts, tiny_model
from trl_fsdp_qlora.recipe import evaluation
from trl_fsdp_qlora.recipe.answers import UnparsableGoldAnswer
from trl_fsdp_qlora.recipe.evaluation import Evaluation, evaluate, majority
from trl_fsdp_qlora.recipe.small_base import character_tokenizer


class Oracle(torch.nn.Module):
    """Answers `a+b=` rightly for even sums, and one too many for odd ones; samples are right every second time."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokenizer = character_tokenizer()
        self.generation_config = type("Config", (), {"eos_token_id": self.tokenizer.eos_token_id})()
        self.problems = []

    def generate(self, input_ids, attention_mask, generation_config, synced_gpus):
        assert not synced_gpus
        rows = []
        for i, ids in enumerate(input_ids):
            text = self.tokenizer.decode(ids, skip_special_tokens=True).strip("= ").replace(" ", "")
            self.problems.append(text)
            answer = sum(map(int, text.rstrip("=").split("+")))
            wrong = i % 2 if generation_config.do_sample else answer % 2
            rows.append(self.tokenizer(f"{answer + wrong}")["input_ids"] + [self.tokenizer.eos_token_id])
        width = max(map(len, rows))
        rows = [row + [self.tokenizer.pad_token_id] * (width - len(row)) for row in rows]
        return torch.cat([input_ids, torch.tensor(rows)], 1)


def test_accuracy_of_a_known_model():
    dataset = prompts(25)
    even = sum(int(answer) % 2 == 0 for answer in dataset["answer"])
    result = evaluate(Oracle(), character_tokenizer(), dataset, samples=4, batch_size=12, progress=False)
    assert (result.n, result.correct) == (25, even)
    assert result.pass_at_k == 1.0  # two of four samples are right
    assert result.majority_at_k == 1.0  # a tie of two and two goes to the first sample, which is right
    assert result.answered == 1.0
    assert result.interval[0] < even / 25 < result.interval[1]


def test_the_result_does_not_depend_on_training_mode_and_leaves_the_generator_alone():
    model = tiny_model().train()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    how = {"samples": 3, "max_new_tokens": 4, "batch_size": 6, "progress": False}
    first = evaluate(model, character_tokenizer(), prompts(10), **how)
    assert torch.equal(torch.rand(3), expected)
    assert model.training
    again = evaluate(model, character_tokenizer(), prompts(10), **how)
    assert {**first.as_dict(), "seconds": 0} == {**again.as_dict(), "seconds": 0}


def test_a_bad_gold_answer_is_found_before_anything_is_generated():
    oracle = Oracle()
    with pytest.raises(UnparsableGoldAnswer, match="row 1"):
        evaluate(oracle, oracle.tokenizer, Dataset.from_dict({"prompt": ["1+1=", "2+2="], "answer": ["2", "four"]}))
    assert oracle.problems == []


class Says(Oracle):
    """Gives the completions that it was made with, in turn."""

    def __init__(self, texts):
        super().__init__()
        self.texts = list(texts)
        self.tokenizer.decode = lambda tokens, skip_special_tokens: self.texts.pop(0)


def test_format_and_arithmetic_are_told_apart():
    texts = ["9 #### 2", "#### 3, that is 2", "it is 2", "none"]  # where 2 is right
    dataset = Dataset.from_dict({"prompt": ["1+1="] * 4, "answer": ["2"] * 4})
    for answer_format, correct, strict in (("auto", 2, 1), ("hash", 1, 1), ("last_number", 3, 3)):
        oracle = Says(texts)
        oracle.generate = lambda input_ids, **_: torch.cat([input_ids, torch.zeros_like(input_ids[:, :1])], 1)
        result = evaluate(oracle, oracle.tokenizer, dataset, answer_format=answer_format, progress=False)
        assert (result.correct, result.strict, result.lenient) == (correct, strict, 3)
        assert f"strict {25 * strict}.0%, lenient 75.0%" in str(result)


def test_problems_that_ask_for_no_format_have_one_accuracy():
    plain = Evaluation(10, 6, 0.6, (0.3, 0.8), 0, None, None, 1.0, 1.0, 3.0, strict=0, lenient=6)
    assert "strict" not in str(plain)
    assert "strict 0.0%, lenient 80.0%" in str(replace(plain, lenient=8))


def test_majority_by_value():
    assert majority(["5.0", "7", "5", None]) == "5.0"
    assert majority([None, None]) is None


def test_penalties_of_the_models_own_config_are_left_out(monkeypatch):
    model, completions = tiny_model(), []
    generate = evaluation.generate
    monkeypatch.setattr(
        evaluation,
        "generate",
        lambda *args, **kwargs: completions.append(generate(*args, **kwargs)) or completions[-1],
    )
    for penalty, ngram in ((1.0, 0), (20.0, 1)):
        model.generation_config.repetition_penalty, model.generation_config.no_repeat_ngram_size = penalty, ngram
        evaluate(model, character_tokenizer(), prompts(4), max_new_tokens=8, progress=False)
    plain, penalised = completions
    assert plain == penalised and any(len(set(tokens)) < len(tokens) for tokens in plain)
