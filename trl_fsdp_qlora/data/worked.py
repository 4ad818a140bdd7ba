"""Worked answers in datasets, for a supervised start and as the right answers of preference pairs."""

import re
from fractions import Fraction


def worked(row: dict) -> str | None:
    """The worked answer of a row of SVAMP or GSM8K, ending in `#### answer`; `None` if it has no right one.

    `( ( 4.0 + 8.0 ) / 3.0 )` becomes `4 + 8 = 12`, `12 / 3 = 4`, `#### 4`; GSM8K's calculator notes are left out.
    """
    if "####" in str(row.get("answer")):
        return re.sub(r"<<.*?>>", "", row["answer"]).strip()
    text = str(row.get("Equation"))
    lines = []
    number = r"(-?\d+(?:\.\d+)?(?:/\d+)?)"

    def as_text(x: Fraction) -> str:
        if x.denominator == 1:
            return str(int(x))
        return str(float(x) if float(x) == x else x)

    while match := re.search(rf"\( {number} ([-+*/]) {number} \)", text):  # the innermost, from the left
        a = Fraction(match[1])
        sign = match[2]
        b = Fraction(match[3])
        if sign == "/" and not b:
            return None
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[sign]
        terms = [f"({as_text(x)})" if x < 0 else as_text(x) for x in (a, b)]
        lines.append(f"{terms[0]} {sign} {terms[1]} = {as_text(value)}")
        text = text.replace(match[0], str(value), 1)
    try:
        value = Fraction(text.strip())  # every operation is done
        right = value == Fraction(str(row["Answer"]))
    except ValueError:
        return None
    return "\n".join([*lines, f"#### {as_text(value)}"]) if right else None
