"""Ways to write a right answer in another notation, for verify_math.py.

Each function takes a gold answer and a random generator and returns the altered answer, or None if it
does not apply. The functions edit the text of gold answers and know nothing of the verifier.
"""

import random
import re
from collections.abc import Callable
from fractions import Fraction

Change = Callable[[str, random.Random], str | None]


FRACTION = re.compile(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}")


def fraction_style(gold: str, draw: random.Random) -> str | None:
    """\\frac -> \\dfrac or \\tfrac"""
    if r"\frac" in gold:
        return gold.replace(r"\frac", draw.choice([r"\dfrac", r"\tfrac"]))
    return None


def spaces(gold: str, draw: random.Random) -> str | None:
    """white space around signs and commas"""
    if re.search(r"[A-Za-z]{4}|text|mbox|begin|,\\!|\d,\d{3}", gold):
        return None
    new = re.sub(r"\s*([+=])\s*", r" \1 ", gold).replace(",", r",\ ")
    return new if new != gold else None


def slash(gold: str, draw: random.Random) -> str | None:
    """\\frac{3}{4} -> 3/4"""
    match = FRACTION.fullmatch(gold)
    return f"{match[1]}{match[2]}/{match[3]}" if match else None


def decimal(gold: str, draw: random.Random) -> str | None:
    """a fraction whose decimal ends -> that decimal"""
    match = FRACTION.fullmatch(gold)
    if not match or int(match[3]) == 0:
        return None
    value = Fraction(int(match[2]), int(match[3]))
    for places in range(1, 7):
        if (value * 10**places).denominator == 1:
            return f"{match[1]}{float(value):.{places}f}"
    return None


def unreduced(gold: str, draw: random.Random) -> str | None:
    """\\frac{3}{4} -> \\frac{9}{12}"""
    match = FRACTION.fullmatch(gold)
    if not match:
        return None
    k = draw.randint(2, 5)
    return rf"{match[1]}\frac{{{int(match[2]) * k}}}{{{int(match[3]) * k}}}"


def mixed(gold: str, draw: random.Random) -> str | None:
    """\\frac{7}{4} -> 1\\frac{3}{4}"""
    match = FRACTION.fullmatch(gold)
    if not match or not int(match[3]) or int(match[2]) <= int(match[3]):
        return None
    whole, rest = divmod(int(match[2]), int(match[3]))
    return rf"{match[1]}{whole}\frac{{{rest}}}{{{match[3]}}}" if rest else None


def thousands(gold: str, draw: random.Random) -> str | None:
    """12345 -> 12,345"""
    if not re.fullmatch(r"-?\d{4,}", gold):
        return None
    return f"{int(gold):,}".replace(",", draw.choice([",", "{,}", r",\!", r"\,"]))


def point_zero(gold: str, draw: random.Random) -> str | None:
    """42 -> 42.0, 2.5 -> 2.50"""
    if re.fullmatch(r"-?\d+", gold):
        return gold + ".0"
    return gold + "0" if re.fullmatch(r"-?\d+\.\d+", gold) else None


def unit(gold: str, draw: random.Random) -> str | None:
    """42 -> 42 \\text{ cm}"""
    if re.fullmatch(r"-?\d+(\.\d+)?|\\frac\{\d+\}\{\d+\}|\d+\\pi|\d*\\sqrt\{\d+\}", gold):
        return gold + draw.choice([r"\text{ cm}", r" \text{ square units}", r"\mathrm{~m/s}",
                                   r"\text{ miles}", " degrees", r"^\circ", " dollars"])  # fmt: skip
    return None


def currency(gold: str, draw: random.Random) -> str | None:
    """42 -> \\$42"""
    return r"\$" + gold if re.fullmatch(r"\d+(\.\d+)?", gold) else None


def label(gold: str, draw: random.Random) -> str | None:
    """5 -> x = 5"""
    if re.search(r"[=<>,x:]|text|mbox|\\[gl]e|[A-Za-z]{4}", gold):
        return None
    return f"x = {gold}"


def no_label(gold: str, draw: random.Random) -> str | None:
    """x = 5 -> 5"""
    match = re.fullmatch(r"[A-Za-z](?:\([a-z]\))?\s*=\s*([^=,]+)", gold)
    return match[1] if match else None


def sized_brackets(gold: str, draw: random.Random) -> str | None:
    """( ) -> \\left( \\right), or the other way"""
    if r"\left(" in gold:
        return gold.replace(r"\left(", "(").replace(r"\right)", ")")
    if "(" in gold and gold.count("(") == gold.count(")") and "text" not in gold:
        return gold.replace("(", r"\left(").replace(")", r"\right)")
    return None


def list_parts(gold: str) -> list[str] | None:
    if re.search(r"text|mbox|[A-Za-z]{4}|\d,\\?!?\d{3}|=", gold):
        return None
    parts, depth, start = [], 0, 0
    for i, c in enumerate(gold):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(gold[start:i].strip())
            start = i + 1
    parts.append(gold[start:].strip())
    return parts if len(parts) > 1 and all(parts) else None


def permuted(gold: str, draw: random.Random) -> str | None:
    """1, 2, 3 -> 3, 1, 2"""
    parts = list_parts(gold)
    if not parts:
        return None
    new = draw.sample(parts, len(parts))
    return ", ".join(new) if new != parts else ", ".join(reversed(parts))


def braces(gold: str, draw: random.Random) -> str | None:
    """1, 2 -> \\{1, 2\\}"""
    parts = list_parts(gold)
    return rf"\{{{', '.join(parts)}\}}" if parts else None


def joined_by_and(gold: str, draw: random.Random) -> str | None:
    """1, 2 -> 1 \\text{ and } 2"""
    parts = list_parts(gold)
    if not parts:
        return None
    return ", ".join(parts[:-1]) + draw.choice([r" \text{ and } ", r"\text{ or }"]) + parts[-1]


def terms_of(gold: str) -> list[str] | None:
    if re.search(r"[=<>,:]|text|mbox|\\(?:pm|cup|begin|le|ge|in)|[A-Za-z]{5}|\de-?\d", gold):
        return None
    terms, depth, start = [], 0, 0
    for i, c in enumerate(gold):
        depth += (c in "([{") - (c in ")]}")
        if c in "+-" and depth == 0 and i > start and gold[:i].rstrip()[-1:] not in "^*/(":
            terms.append(gold[start:i].strip())
            start = i
    terms.append(gold[start:].strip())
    return terms if len(terms) > 1 and all(terms) else None


def reordered(gold: str, draw: random.Random) -> str | None:
    """a + b - c -> b - c + a"""
    terms = terms_of(gold)
    if not terms:
        return None
    signed = [t if t[0] in "+-" else f"+{t}" for t in terms[1:] + terms[:1]]
    return " ".join(signed).removeprefix("+")


def power_of_ten(gold: str, draw: random.Random) -> str | None:
    """4.5e33 -> 4.5 \\times 10^{33}"""
    match = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", gold)
    times = draw.choice([r"\times", r"\cdot"])
    return rf"{match[1]} {times} 10^{{{match[2]}}}" if match else None


def rewritten_words(gold: str, draw: random.Random) -> str | None:
    """\\text{Evelyn} -> Evelyn or evelyn"""
    match = re.fullmatch(r"\\(?:text|mbox)\{([A-Za-z ]+)\}", gold)
    if not match:
        return None
    return draw.choice([match[1], match[1].lower(), rf"\textbf{{{match[1]}}}"])


def other_matrix(gold: str, draw: random.Random) -> str | None:
    """pmatrix -> bmatrix"""
    return gold.replace("pmatrix", "bmatrix") if "pmatrix" in gold else None


def under_root(gold: str, draw: random.Random) -> str | None:
    """2\\sqrt{3} -> \\sqrt{12}"""
    match = re.fullmatch(r"(\d+)\s*\\sqrt\{(\d+)\}", gold)
    return rf"\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}" if match else None


def rational_root(gold: str, draw: random.Random) -> str | None:
    """\\frac{3\\sqrt{2}}{4} -> \\frac{6}{4\\sqrt{2}}"""
    match = re.fullmatch(r"(-?)\\frac\{(\d*)\s*\\sqrt\{(\d+)\}\}\{(\d+)\}", gold)
    if not match:
        return None
    top = int(match[2] or 1) * int(match[3])
    return rf"{match[1]}\frac{{{top}}}{{{match[4]}\sqrt{{{match[3]}}}}}"


def factor_outside(gold: str, draw: random.Random) -> str | None:
    """\\frac{3\\pi}{4} -> \\frac{3}{4}\\pi"""
    match = re.fullmatch(r"(-?)\\frac\{(\d*)\s*(\\pi|\\sqrt\{\d+\}|[a-z])\}\{(\d+)\}", gold)
    return rf"{match[1]}\frac{{{match[2] or 1}}}{{{match[4]}}} {match[3]}" if match else None


def other_union(gold: str, draw: random.Random) -> str | None:
    """(1,2) \\cup (5,6) -> (5,6) \\cup (1,2)"""
    parts = gold.split(r"\cup")
    return r" \cup ".join(part.strip() for part in reversed(parts)) if len(parts) > 1 else None


def inequality(gold: str, draw: random.Random) -> str | None:
    """[4, \\infty) -> x \\ge 4"""
    match = re.fullmatch(r"([\[(])([^,()]+),\s*\\infty\s*\)", gold.replace(r"\right", ""))
    if not match or "infty" in match[2]:
        return None
    return rf"x {chr(92) + 'geq' if match[1] == '[' else '>'} {match[2]}"


def as_point(gold: str, draw: random.Random) -> str | None:
    """a column vector -> (1, 2)"""
    match = re.fullmatch(r"\\begin\{pmatrix\}([^&]*)\\end\{pmatrix\}", gold)
    return "(" + ", ".join(c.strip() for c in match[1].split(r"\\")) + ")" if match else None


def factored(gold: str, draw: random.Random) -> str | None:
    """x^2 - 1 -> (x - 1)(x + 1), and the other way"""
    if not re.fullmatch(r"[-+()\d\sx^{}]*x[-+()\d\sx^{}]*", gold) or "=" in gold:
        return None
    import sympy
    from sympy.parsing.sympy_parser import (
        convert_xor,
        implicit_multiplication_application,
        parse_expr,
        standard_transformations,
    )  # fmt: skip

    rules = (*standard_transformations, convert_xor, implicit_multiplication_application)
    tree = parse_expr(gold.replace("{", "(").replace("}", ")"), transformations=rules)
    if not tree.is_polynomial() or sympy.degree(tree) > 20:
        return None
    new = sympy.factor(tree) if draw.random() < 0.5 else sympy.expand(tree)
    if new == tree:
        new = sympy.factor(tree) if new != sympy.factor(tree) else sympy.expand(tree)
    return sympy.latex(new) if new != tree else None


def evaluated(gold: str, draw: random.Random) -> str | None:
    """2^{10} -> 1024"""
    match = re.fullmatch(r"(\d)\^\{?(\d{1,2})\}?", gold)
    return str(int(match[1]) ** int(match[2])) if match else None


def apples(gold: str, draw: random.Random) -> str | None:
    """42 -> 42 \\text{ apples}"""
    if not re.fullmatch(r"\d+", gold):
        return None
    return gold + draw.choice(
        [r" \text{ apples}", r"\text{ red balls}", " players", r"\mbox{ tickets}"]
    )


RIGHT: list[Change] = [
    fraction_style, spaces, slash, decimal, unreduced, mixed, thousands, point_zero, unit, currency,
    label, no_label, sized_brackets, permuted, braces, joined_by_and, reordered, power_of_ten,
    rewritten_words, other_matrix, under_root, rational_root, factor_outside, other_union,
    inequality, as_point, factored, evaluated, apples,
]  # fmt: skip
