"""Worked answers in datasets, for a supervised start and as the right answers of preference pairs."""

import operator
import re
from fractions import Fraction

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_NUMBER = r"(-?\d+(?:\.\d+)?(?:/\d+)?)"
_INNERMOST = re.compile(rf"\( {_NUMBER} ([-+*/]) {_NUMBER} \)")


def worked(row: dict) -> str | None:
    """The worked answer of a row of SVAMP or GSM8K, ending in `#### answer`; `None` if it has no right one.

    `( ( 4.0 + 8.0 ) / 3.0 )` becomes `4 + 8 = 12`, `12 / 3 = 4`, `#### 4`; GSM8K's calculator notes are left out.
    """
    if "####" in str(row.get("answer")):
        without_notes = re.sub(r"<<.*?>>", "", row["answer"])
        return without_notes.strip()
    equation = str(row.get("Equation"))
    lines = []
    match = _INNERMOST.search(equation)
    while match is not None:
        left = Fraction(match[1])
        sign = match[2]
        right = Fraction(match[3])
        if sign == "/" and right == 0:
            return None
        operation = _OPERATIONS[sign]
        value = operation(left, right)
        line = f"{_as_operand(left)} {sign} {_as_operand(right)} = {_as_text(value)}"
        lines.append(line)
        equation = equation.replace(match[0], str(value), 1)
        match = _INNERMOST.search(equation)
    try:
        result = Fraction(equation.strip())  # a number, because every operation is done
        answer = Fraction(str(row["Answer"]))
    except ValueError:
        return None
    if result != answer:
        return None
    lines.append(f"#### {_as_text(result)}")
    return "\n".join(lines)


def _as_operand(x: Fraction) -> str:
    text = _as_text(x)
    return f"({text})" if x < 0 else text


def _as_text(x: Fraction) -> str:
    """A whole number or a finite decimal as such, any other as a fraction."""
    if x.denominator == 1:
        return str(int(x))
    decimal = float(x)
    return str(decimal) if decimal == x else str(x)
