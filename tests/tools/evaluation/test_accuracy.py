"""Covers `utils/stats.py`."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from tests.tiny import Answering, prompts, tiny_model
from trl_fsdp_qlora.tools.data.answers import UnparsableGoldAnswer
from trl_fsdp_qlora.tools.evaluation import drawing
from trl_fsdp_qlora.tools.evaluation.accuracy import Evaluation, evaluate
from trl_fsdp_qlora.tools.evaluation.measurement import Judge, Measurement
from trl_fsdp_qlora.tools.small_base import character_tokenizer
from trl_fsdp_qlora.utils.stats import format_accuracy, wilson_interval


def even_ones_right(text: str, row: int, sampled: bool) -> str:
    """Of `a+b=`; samples are right every second time."""
    answer = sum(map(int, text.rstrip("=").split("+")))
    return f"{answer + (row % 2 if sampled else answer % 2)}"


def test_accuracy_of_a_known_model():
    dataset = prompts(25)
    even = sum(int(answer) % 2 == 0 for answer in dataset["answer"])
    model = Answering(even_ones_right)
    result = evaluate(model, model.tokenizer, dataset, Measurement(samples=4, batch_size=12))
    assert (result.n, result.correct) == (25, even)
    assert result.pass_at_k == 1.0  # two of four samples are right
    assert result.interval[0] < even / 25 < result.interval[1]


def test_a_bad_gold_answer_is_found_before_anything_is_generated():
    model = Answering(None)
    with pytest.raises(UnparsableGoldAnswer, match="row 2"):
        evaluate(model, model.tokenizer, Dataset.from_dict({"prompt": ["1+1=", "2+2="], "answer": ["2", "4" * 5000]}))


async def passes(prompts, completions, tests, **columns):
    """Right is the completion that the row's tests name; `None` and values below 1 are not right."""
    assert prompts[0] == "1+1=" and not columns
    values = {"2": 1.0, "3": 0.9, "4": None}
    return [values[text] if text in names else 0 for text, names in zip(completions, tests, strict=True)]


def fails(completions, **columns):
    raise KeyError("oh")


def returns_one_value(completions, **columns):
    return [1.0]


def test_a_function_of_ones_own_decides_in_place_of_answers(caplog):
    dataset = Dataset.from_dict({"prompt": ["1+1="] * 4, "tests": [["2"], ["3"], ["4"], ["5"]]})
    tokenizer = character_tokenizer()
    texts = []
    tokenizer.batch_decode = lambda rows, skip_special_tokens: [texts.pop(0) for _ in rows]
    for function, right in ((passes, 1), (fails, 0), (returns_one_value, 0)):
        texts += ["2", "3", "4", "2", *["2"] * 8]
        measurement = Measurement(judge=Judge(function), samples=2)
        result = evaluate(Answering(lambda *_: "7"), tokenizer, dataset, measurement)
        assert (result.n, result.correct, result.strict, result.lenient) == (4, right, None, None)
        assert result.first_right == (0 if right else None)
        assert result.pass_at_k == right / 4
        assert "strict" not in str(result)
    assert "fails" in caplog.text and "KeyError: 'oh'" in caplog.text
    assert "returns_one_value" in caplog.text


def test_letters_and_texts_are_compared_by_their_words():
    dataset = Dataset.from_dict({"prompt": ["1+1="] * 2, "answer": ["B", "Paris"]})
    tokenizer = character_tokenizer()
    texts = ["So B", "It is\nParis", *["A", "(B)", "B) 1"], *["paris", "London", "Paris!"]]
    tokenizer.batch_decode = lambda rows, skip_special_tokens: [texts.pop(0) for _ in rows]
    result = evaluate(Answering(lambda *_: "7"), tokenizer, dataset, Measurement(samples=3, batch_size=6))
    assert (result.correct, result.strict, result.lenient, result.pass_at_k) == (2, 0, 2, 1.0)


def test_the_result_is_the_same_in_training_mode():
    model = tiny_model().train()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    measurement = Measurement(samples=3, max_new_tokens=4, batch_size=6)
    first, again = (evaluate(model, character_tokenizer(), prompts(10), measurement) for _ in range(2))
    assert torch.equal(torch.rand(3), expected) and model.training
    assert replace(first, seconds=0) == replace(again, seconds=0)


def test_format_and_arithmetic_are_distinguished():
    dataset = Dataset.from_dict({"prompt": ["1+1="] * 4, "answer": ["2"] * 4})
    for answer_format, correct, strict in (("auto", 2, 1), ("hash", 1, 1), ("last_number", 3, 3)):
        tokenizer = character_tokenizer()
        texts = ["9 #### 2", "#### 3, that is 2", "it is 2", "none"]
        tokenizer.batch_decode = lambda rows, skip_special_tokens, texts=texts: [texts.pop(0) for _ in rows]
        model = Answering(lambda *_: "7")
        result = evaluate(model, tokenizer, dataset, Measurement(answer_format=answer_format))
        assert (result.correct, result.strict, result.lenient, result.first_right) == (correct, strict, 3, 0)
        assert f" {25 * strict}.0%" in str(result) and " 75.0%" in str(result)
    plain = Evaluation(10, 6, 0.6, (0.3, 0.8), 0, None, 1.0, 3.0, strict=0, lenient=6)
    assert "strict" not in str(plain)  # if problems ask for no format
    assert " 80.0%" not in str(plain) and " 80.0%" in str(replace(plain, lenient=8))


def test_penalties_of_the_models_own_config_are_left_out(monkeypatch):
    model = tiny_model()
    completions = []
    generate = drawing.generate

    def kept(*args, **kwargs):
        completions.append(generate(*args, **kwargs))
        return completions[-1]

    monkeypatch.setattr(drawing, "generate", kept)
    for penalty, ngram in ((1.0, 0), (20.0, 1)):
        model.generation_config.repetition_penalty = penalty
        model.generation_config.no_repeat_ngram_size = ngram
        evaluate(model, character_tokenizer(), prompts(4), Measurement(max_new_tokens=8))
    plain, penalised = completions
    assert plain == penalised and any(len(set(tokens)) < len(tokens) for tokens in plain)


def test_wilson_against_published_values():
    published = {
        (29, 30): (0.8333, 0.9941),  # the interval of 29 of 30 is 83-99%
        (0, 10): (0.0, 0.2775),  # Brown, Cai & DasGupta 2001, table: Wilson at x = 0 is z²/(n + z²)
        (5, 10): (0.2366, 0.7634),
        (0, 0): (0.0, 1.0),
    }
    for (correct, n), interval in published.items():
        assert wilson_interval(correct, n) == pytest.approx(interval, abs=5e-4)
    assert format_accuracy(29, 30) == "96.7% (n=30, 95% interval 83.3-99.4)"
