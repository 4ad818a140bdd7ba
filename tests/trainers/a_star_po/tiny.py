"""Problems and a reward for the A*-PO tests and their workers, next to the tiny model of all tests."""

from datasets import Dataset


def problems(n: int) -> Dataset:
    """Prompts of different lengths with a digit as answer."""
    prompts = [f"{i}+{(3 * i) % 17}=" for i in range(n)]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(i % 10) for i in range(n)]})


def has_digit(completions, answer, **kwargs):
    """1 where the answer's digit occurs in the completion: random weights reach it about one time in three."""
    return [float(digit in completion) for completion, digit in zip(completions, answer, strict=True)]
