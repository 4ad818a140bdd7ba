"""Worked answers that datasets bring along, as text that ends in `#### answer`: what supervised fine-tuning teaches."""

import ast
import operator
import re
from fractions import Fraction

_OPERATORS = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}
_CALCULATOR = re.compile(r"<<.*?>>")  # GSM8K's notes for a calculator


def _plain(value: Fraction) -> str:
    """`51` of 51, `2.5` of 5/2, and the fraction itself where the decimals do not end."""
    if value.denominator == 1:
        return str(value.numerator)
    decimals = f"{float(value):.6f}".rstrip("0")
    return decimals if Fraction(decimals) == value else f"{value.numerator}/{value.denominator}"


def _calculate(node: ast.expr, lines: list[str]) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return Fraction(str(node.value))
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ValueError(f"{ast.unparse(node)!r} is neither a number nor one of + - * /")
    left, right = _calculate(node.left, lines), _calculate(node.right, lines)
    sign, apply = _OPERATORS[type(node.op)]
    value = apply(left, right)
    shown = [f"({_plain(each)})" if each < 0 else _plain(each) for each in (left, right)]
    lines.append(f"{shown[0]} {sign} {shown[1]} = {_plain(value)}")
    return value


def svamp_work(row: dict) -> str | None:
    """SVAMP's `Equation`, one operation per line: `( ( 4.0 + 8.0 ) / 3.0 )` is `4 + 8 = 12`, `12 / 3 = 4`, `#### 4`.

    `None` where the row has none, or one that does not come to the row's answer.
    """
    equation, lines = row.get("Equation"), []
    if not isinstance(equation, str):
        return None
    try:
        value = _calculate(ast.parse(equation.strip(), mode="eval").body, lines)
        right = value == Fraction(str(row["Answer"]))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return "\n".join([*lines, f"#### {_plain(value)}"]) if right else None


def gsm8k_work(row: dict) -> str | None:
    """GSM8K's `answer` as it is, without the notes for a calculator; `None` where it holds only the number."""
    answer = row.get("answer")
    if not isinstance(answer, str) or "####" not in answer:
        return None
    return _CALCULATOR.sub("", answer).strip()
