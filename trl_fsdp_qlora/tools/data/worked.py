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
        return re.sub(r"<<.*?>>", "", row["answer"]).strip()
    equation = str(row.get("Equation"))
    lines = []
    while match := _INNERMOST.search(equation):
        a = Fraction(match[1])
        sign = match[2]
        b = Fraction(match[3])
        if sign == "/" and b == 0:
            return None
        value = _OPERATIONS[sign](a, b)
        left, right = (f"({_as_text(x)})" if x < 0 else _as_text(x) for x in (a, b))
        lines.append(f"{left} {sign} {right} = {_as_text(value)}")
        equation = equation.replace(match[0], str(value), 1)
    try:
        value = Fraction(equation.strip())  # a number, because every operation is done
        is_right = value == Fraction(str(row["Answer"]))
    except ValueError:
        return None
    return "\n".join([*lines, f"#### {_as_text(value)}"]) if is_right else None


def _as_text(x: Fraction) -> str:
    """A whole number or a finite decimal as such, any other as a fraction."""
    if x.denominator == 1:
        return str(int(x))
    return str(float(x) if float(x) == x else x)
