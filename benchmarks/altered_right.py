"""Ways to write a right answer in another notation, for verify_math.py.

Each function takes a reference answer and a random generator and returns the altered answer, or None if
it does not apply. The functions edit the text of reference answers and know nothing of the verifier.
"""

import random
import re
from collections.abc import Callable
from fractions import Fraction

Change = Callable[[str, random.Random], str | None]


FRACTION = re.compile(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}")


def fraction_style(answer: str, draw: random.Random) -> str | None:
    """\\frac -> \\dfrac or \\tfrac"""
    if r"\frac" in answer:
        return answer.replace(r"\frac", draw.choice([r"\dfrac", r"\tfrac"]))
    return None


def spaces(answer: str, draw: random.Random) -> str | None:
    """white space around signs and commas"""
    if re.search(r"[A-Za-z]{4}|text|mbox|begin|,\\!|\d,\d{3}", answer):
        return None
    new = re.sub(r"\s*([+=])\s*", r" \1 ", answer).replace(",", r",\ ")
    return new if new != answer else None


def slash(answer: str, draw: random.Random) -> str | None:
    """\\frac{3}{4} -> 3/4"""
    match = FRACTION.fullmatch(answer)
    return f"{match[1]}{match[2]}/{match[3]}" if match else None


def decimal(answer: str, draw: random.Random) -> str | None:
    """a fraction whose decimal ends -> that decimal"""
    match = FRACTION.fullmatch(answer)
    if not match or int(match[3]) == 0:
        return None
    value = Fraction(int(match[2]), int(match[3]))
    for places in range(1, 7):
        if (value * 10**places).denominator == 1:
            return f"{match[1]}{float(value):.{places}f}"
    return None


def unreduced(answer: str, draw: random.Random) -> str | None:
    """\\frac{3}{4} -> \\frac{9}{12}"""
    match = FRACTION.fullmatch(answer)
    if not match:
        return None
    k = draw.randint(2, 5)
    return rf"{match[1]}\frac{{{int(match[2]) * k}}}{{{int(match[3]) * k}}}"


def mixed(answer: str, draw: random.Random) -> str | None:
    """\\frac{7}{4} -> 1\\frac{3}{4}"""
    match = FRACTION.fullmatch(answer)
    if not match or not int(match[3]) or int(match[2]) <= int(match[3]):
        return None
    whole, rest = divmod(int(match[2]), int(match[3]))
    return rf"{match[1]}{whole}\frac{{{rest}}}{{{match[3]}}}" if rest else None


def thousands(answer: str, draw: random.Random) -> str | None:
    """12345 -> 12,345"""
    if not re.fullmatch(r"-?\d{4,}", answer):
        return None
    return f"{int(answer):,}".replace(",", draw.choice([",", "{,}", r",\!", r"\,"]))


def point_zero(answer: str, draw: random.Random) -> str | None:
    """42 -> 42.0, 2.5 -> 2.50"""
    if re.fullmatch(r"-?\d+", answer):
        return answer + ".0"
    return answer + "0" if re.fullmatch(r"-?\d+\.\d+", answer) else None


def unit(answer: str, draw: random.Random) -> str | None:
    """42 -> 42 \\text{ cm}"""
    if re.fullmatch(r"-?\d+(\.\d+)?|\\frac\{\d+\}\{\d+\}|\d+\\pi|\d*\\sqrt\{\d+\}", answer):
        return answer + draw.choice([r"\text{ cm}", r" \text{ square units}", r"\mathrm{~m/s}",
                                   r"\text{ miles}", " degrees", r"^\circ", " dollars"])  # fmt: skip
    return None


def currency(answer: str, draw: random.Random) -> str | None:
    """42 -> \\$42"""
    return r"\$" + answer if re.fullmatch(r"\d+(\.\d+)?", answer) else None


def label(answer: str, draw: random.Random) -> str | None:
    """5 -> x = 5"""
    if re.search(r"[=<>,x:]|text|mbox|\\[gl]e|[A-Za-z]{4}", answer):
        return None
    return f"x = {answer}"


def no_label(answer: str, draw: random.Random) -> str | None:
    """x = 5 -> 5"""
    match = re.fullmatch(r"[A-Za-z](?:\([a-z]\))?\s*=\s*([^=,]+)", answer)
    return match[1] if match else None


def sized_brackets(answer: str, draw: random.Random) -> str | None:
    """( ) -> \\left( \\right), or the other way"""
    if r"\left(" in answer:
        return answer.replace(r"\left(", "(").replace(r"\right)", ")")
    if "(" in answer and answer.count("(") == answer.count(")") and "text" not in answer:
        return answer.replace("(", r"\left(").replace(")", r"\right)")
    return None


def list_parts(answer: str) -> list[str] | None:
    if re.search(r"text|mbox|[A-Za-z]{4}|\d,\\?!?\d{3}|=", answer):
        return None
    parts, depth, start = [], 0, 0
    for i, c in enumerate(answer):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(answer[start:i].strip())
            start = i + 1
    parts.append(answer[start:].strip())
    return parts if len(parts) > 1 and all(parts) else None


def permuted(answer: str, draw: random.Random) -> str | None:
    """1, 2, 3 -> 3, 1, 2"""
    parts = list_parts(answer)
    if not parts:
        return None
    new = draw.sample(parts, len(parts))
    return ", ".join(new) if new != parts else ", ".join(reversed(parts))


def braces(answer: str, draw: random.Random) -> str | None:
    """1, 2 -> \\{1, 2\\}"""
    parts = list_parts(answer)
    return rf"\{{{', '.join(parts)}\}}" if parts else None


def joined_by_and(answer: str, draw: random.Random) -> str | None:
    """1, 2 -> 1 \\text{ and } 2"""
    parts = list_parts(answer)
    if not parts:
        return None
    return ", ".join(parts[:-1]) + draw.choice([r" \text{ and } ", r"\text{ or }"]) + parts[-1]


def terms_of(answer: str) -> list[str] | None:
    if re.search(r"[=<>,:]|text|mbox|\\(?:pm|cup|begin|le|ge|in)|[A-Za-z]{5}|\de-?\d", answer):
        return None
    terms, depth, start = [], 0, 0
    for i, c in enumerate(answer):
        depth += (c in "([{") - (c in ")]}")
        if c in "+-" and depth == 0 and i > start and answer[:i].rstrip()[-1:] not in "^*/(":
            terms.append(answer[start:i].strip())
            start = i
    terms.append(answer[start:].strip())
    return terms if len(terms) > 1 and all(terms) else None


def reordered(answer: str, draw: random.Random) -> str | None:
    """a + b - c -> b - c + a"""
    terms = terms_of(answer)
    if not terms:
        return None
    signed = [t if t[0] in "+-" else f"+{t}" for t in terms[1:] + terms[:1]]
    return " ".join(signed).removeprefix("+")


def power_of_ten(answer: str, draw: random.Random) -> str | None:
    """4.5e33 -> 4.5 \\times 10^{33}"""
    match = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", answer)
    times = draw.choice([r"\times", r"\cdot"])
    return rf"{match[1]} {times} 10^{{{match[2]}}}" if match else None


def rewritten_words(answer: str, draw: random.Random) -> str | None:
    """\\text{Evelyn} -> Evelyn or evelyn"""
    match = re.fullmatch(r"\\(?:text|mbox)\{([A-Za-z ]+)\}", answer)
    if not match:
        return None
    return draw.choice([match[1], match[1].lower(), rf"\textbf{{{match[1]}}}"])


def other_matrix(answer: str, draw: random.Random) -> str | None:
    """pmatrix -> bmatrix"""
    return answer.replace("pmatrix", "bmatrix") if "pmatrix" in answer else None


def under_root(answer: str, draw: random.Random) -> str | None:
    """2\\sqrt{3} -> \\sqrt{12}"""
    match = re.fullmatch(r"(\d+)\s*\\sqrt\{(\d+)\}", answer)
    return rf"\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}" if match else None


def rational_root(answer: str, draw: random.Random) -> str | None:
    """\\frac{3\\sqrt{2}}{4} -> \\frac{6}{4\\sqrt{2}}"""
    match = re.fullmatch(r"(-?)\\frac\{(\d*)\s*\\sqrt\{(\d+)\}\}\{(\d+)\}", answer)
    if not match:
        return None
    top = int(match[2] or 1) * int(match[3])
    return rf"{match[1]}\frac{{{top}}}{{{match[4]}\sqrt{{{match[3]}}}}}"


def factor_outside(answer: str, draw: random.Random) -> str | None:
    """\\frac{3\\pi}{4} -> \\frac{3}{4}\\pi"""
    match = re.fullmatch(r"(-?)\\frac\{(\d*)\s*(\\pi|\\sqrt\{\d+\}|[a-z])\}\{(\d+)\}", answer)
    return rf"{match[1]}\frac{{{match[2] or 1}}}{{{match[4]}}} {match[3]}" if match else None


def other_union(answer: str, draw: random.Random) -> str | None:
    """(1,2) \\cup (5,6) -> (5,6) \\cup (1,2)"""
    parts = answer.split(r"\cup")
    return r" \cup ".join(part.strip() for part in reversed(parts)) if len(parts) > 1 else None


def inequality(answer: str, draw: random.Random) -> str | None:
    """[4, \\infty) -> x \\ge 4"""
    match = re.fullmatch(r"([\[(])([^,()]+),\s*\\infty\s*\)", answer.replace(r"\right", ""))
    if not match or "infty" in match[2]:
        return None
    return rf"x {chr(92) + 'geq' if match[1] == '[' else '>'} {match[2]}"


def as_point(answer: str, draw: random.Random) -> str | None:
    """a column vector -> (1, 2)"""
    match = re.fullmatch(r"\\begin\{pmatrix\}([^&]*)\\end\{pmatrix\}", answer)
    return "(" + ", ".join(c.strip() for c in match[1].split(r"\\")) + ")" if match else None


def factored(answer: str, draw: random.Random) -> str | None:
    """x^2 - 1 -> (x - 1)(x + 1), and the other way"""
    if not re.fullmatch(r"[-+()\d\sx^{}]*x[-+()\d\sx^{}]*", answer) or "=" in answer:
        return None
    import sympy
    from sympy.parsing.sympy_parser import (
        convert_xor,
        implicit_multiplication_application,
        parse_expr,
        standard_transformations,
    )  # fmt: skip

    rules = (*standard_transformations, convert_xor, implicit_multiplication_application)
    tree = parse_expr(answer.replace("{", "(").replace("}", ")"), transformations=rules)
    if not tree.is_polynomial() or sympy.degree(tree) > 20:
        return None
    new = sympy.factor(tree) if draw.random() < 0.5 else sympy.expand(tree)
    if new == tree:
        new = sympy.factor(tree) if new != sympy.factor(tree) else sympy.expand(tree)
    return sympy.latex(new) if new != tree else None


def evaluated(answer: str, draw: random.Random) -> str | None:
    """2^{10} -> 1024"""
    match = re.fullmatch(r"(\d)\^\{?(\d{1,2})\}?", answer)
    return str(int(match[1]) ** int(match[2])) if match else None


def apples(answer: str, draw: random.Random) -> str | None:
    """42 -> 42 \\text{ apples}"""
    if not re.fullmatch(r"\d+", answer):
        return None
    return answer + draw.choice(
        [r" \text{ apples}", r"\text{ red balls}", " players", r"\mbox{ tickets}"]
    )


RIGHT: list[Change] = [
    fraction_style, spaces, slash, decimal, unreduced, mixed, thousands, point_zero, unit, currency,
    label, no_label, sized_brackets, permuted, braces, joined_by_and, reordered, power_of_ten,
    rewritten_words, other_matrix, under_root, rational_root, factor_outside, other_union,
    inequality, as_point, factored, evaluated, apples,
]  # fmt: skip
