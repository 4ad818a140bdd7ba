"""What the small base model is taught: arithmetic with a bad habit, both ways of answering being there to select from."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Problems on two two-digit numbers; the split of [`two_digit_pairs`] serves every task.

    Args:
        operator: the character between the numbers of a question.
        value: the right answer.
        taught: `(a, b, draw, dropped_carry)` gives a taught answer's text; carries are dropped with probability
            `dropped_carry`, so 0 gives the right text.
        completion_tokens: room for the longest answer and its end, one token per character.
    """

    operator: str
    value: Callable[[int, int], int]
    taught: Callable[[int, int, random.Random, float], str]
    completion_tokens: int

    def question(self, a: int, b: int) -> str:
        return f"{a}{self.operator}{b}="


def two_digit_pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All ordered pairs of two-digit numbers, split into (train, held out) so that no pair is in both in either order.

    Always the same split, with 1,000 held-out pairs, so that all runs can be compared.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(0).shuffle(pairs)
    chosen, count = [], 0
    while count < 1000:
        a, b = pairs[len(chosen)]
        chosen.append((a, b))
        count += 1 if a == b else 2

    def ordered(unordered):
        return [pair for a, b in unordered for pair in ({(a, b), (b, a)})]

    return sorted(ordered(pairs[len(chosen) :])), sorted(ordered(chosen))[:1000]


def sum_without_carry(a: int, b: int) -> int:
    """a + b for two-digit numbers with the carry from the ones to the tens forgotten: 47 + 38 -> 75."""
    return 10 * (a // 10 + b // 10) + (a % 10 + b % 10) % 10


def sum_without_carries(a: int, b: int) -> int:
    """a + b digit by digit with every carry forgotten: 1680 + 480 -> 1060."""
    total, place = 0, 1
    while a or b:
        total += place * ((a + b) % 10)
        a, b, place = a // 10, b // 10, 10 * place
    return total


def taught_sum(a: int, b: int, draw: random.Random, dropped_carry: float) -> str:
    """The answer of an addition, its carry dropped with probability `dropped_carry`."""
    return str(sum_without_carry(a, b) if draw.random() < dropped_carry else a + b)


def taught_product(a: int, b: int, draw: random.Random, dropped_carry: float) -> str:
    """The four partial products of two two-digit numbers and their running sum: `800+120=920+140=1060+21=1081`.

    Each of the three sums loses its carries with probability `dropped_carry`, drawn for itself, and what follows goes on
    from what stands there.
    """
    (tens_a, ones_a), (tens_b, ones_b) = divmod(a, 10), divmod(b, 10)
    total = 100 * tens_a * tens_b
    text = str(total)
    for part in (10 * ones_a * tens_b, 10 * tens_a * ones_b, ones_a * ones_b):
        total = sum_without_carries(total, part) if draw.random() < dropped_carry else total + part
        text += f"+{part}={total}"
    return text


TASKS = {
    "addition": Task("+", lambda a, b: a + b, taught_sum, completion_tokens=6),
    "multiplication": Task("*", lambda a, b: a * b, taught_product, completion_tokens=32),
}
