"""Wrong answers that are close to the reference answer, for verify_math.py. See altered_right.py."""

import random
import re
from fractions import Fraction

from altered_right import FRACTION, Change, inequality, list_parts, terms_of


def other_digit(answer: str, draw: random.Random) -> str | None:
    """one digit changed"""
    places = [m.start() for m in re.finditer(r"(?<![_\d.e^{-])\d", answer) if "_" not in answer]
    if not places or "text" in answer:
        return None
    at = draw.choice(places)
    return answer[:at] + draw.choice([d for d in "123456789" if d != answer[at]]) + answer[at + 1 :]


def off_by_one(answer: str, draw: random.Random) -> str | None:
    """42 -> 43 or 41"""
    return str(int(answer) + draw.choice([-1, 1])) if re.fullmatch(r"-?\d+", answer) else None


def other_sign(answer: str, draw: random.Random) -> str | None:
    """5 -> -5"""
    if not re.fullmatch(r"-?(\d+(\.\d+)?|\\d?frac\{\d+\}\{\d+\}|\d*\\sqrt\{\d+\}|\d*\\pi)", answer):
        return None
    return (
        (answer[1:] if answer[0] == "-" else f"-{answer}") if re.search(r"[1-9]", answer) else None
    )


def upside_down(answer: str, draw: random.Random) -> str | None:
    """\\frac{3}{4} -> \\frac{4}{3}"""
    match = FRACTION.fullmatch(answer)
    if not match or match[2] == match[3] or int(match[2]) == 0:
        return None
    return rf"{match[1]}\frac{{{match[3]}}}{{{match[2]}}}"


def moved_point(answer: str, draw: random.Random) -> str | None:
    """42 -> 4.2, 1.5 -> 15"""
    if re.fullmatch(r"[1-9]\d+", answer):
        return f"{answer[:-1]}.{answer[-1]}"
    return str(float(answer) * 10) if re.fullmatch(r"[1-9]\d*\.\d+", answer) else None


def dropped(answer: str, draw: random.Random) -> str | None:
    """1, 2, 3 -> 1, 2"""
    parts = list_parts(answer)
    return ", ".join(parts[:-1]) if parts and len(set(parts)) == len(parts) else None


def added(answer: str, draw: random.Random) -> str | None:
    """1, 2 -> 1, 2, 77"""
    parts = list_parts(answer)
    return f"{answer}, 77" if parts and "(" not in answer else None


def other_brackets(answer: str, draw: random.Random) -> str | None:
    """[1, 2) -> (1, 2)"""
    if not re.fullmatch(r"\[[^()\[\]]*[)\]]|\([^()\[\]]*\]", answer):
        return None
    return ("(" if answer[0] == "[" else "[") + answer[1:]


def swapped(answer: str, draw: random.Random) -> str | None:
    """(1, 2) -> (2, 1)"""
    match = re.fullmatch(r"\(([^(),]+),([^(),]+)\)", answer)
    if not match or match[1].strip() == match[2].strip() or "infty" in answer:
        return None
    return f"({match[2].strip()}, {match[1].strip()})"


def other_exponent(answer: str, draw: random.Random) -> str | None:
    """4.5e33 -> 4.5e34, x^2 -> x^3"""
    match = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", answer)
    if match:
        return f"{match[1]}e{int(match[2]) + draw.choice([-1, 1])}"
    powers = list(re.finditer(r"(?<=[a-z])\^\{?(\d)\}?", answer))
    if not powers:
        return None
    at = draw.choice(powers)
    return f"{answer[: at.start()]}^{int(at[1]) + 1}{answer[at.end() :]}"


def other_mantissa(answer: str, draw: random.Random) -> str | None:
    """1.6e-19 -> 1.8e-19"""
    match = re.fullmatch(r"(-?[\d.]+)e(-?\d+)", answer)
    return f"{float(match[1]) + draw.choice([0.2, 1.0]):.4g}e{match[2]}" if match else None


def other_variable(answer: str, draw: random.Random) -> str | None:
    """4x + 1 -> 4z + 1"""
    letters = re.findall(r"(?<![A-Za-z\\])[xyzntabk](?![A-Za-z(])", answer)
    if not letters or re.search(r"[=<>]|text|mbox|[\\A-Za-z]{5}", answer):
        return None
    new = draw.choice([c for c in "wvuq" if c not in answer])
    return re.sub(rf"(?<![A-Za-z\\]){draw.choice(letters)}(?![A-Za-z(])", new, answer)


def lost_letter(answer: str, draw: random.Random) -> str | None:
    """4t -> 4"""
    match = re.fullmatch(r"(\d+)\s*[a-z]", answer)
    return match[1] if match else None


def plus_minus(answer: str, draw: random.Random) -> str | None:
    """a + b -> a - b"""
    terms = terms_of(answer)
    if not terms:
        return None
    last = terms[-1]
    if not last.strip("+-0 "):
        return None
    return " ".join(terms[:-1]) + (" - " if last[0] == "+" else " + ") + last[1:].strip()


def fewer_terms(answer: str, draw: random.Random) -> str | None:
    """a + b + c -> a + b"""
    terms = terms_of(answer)
    return " ".join(terms[:-1]) if terms and terms[-1].strip("+-0 ") else None


def other_base(answer: str, draw: random.Random) -> str | None:
    """66_8 -> 66_9"""
    match = re.fullmatch(r"(\w+)_\{?(\d)\}?", answer)
    return f"{match[1]}_{int(match[2]) + 1}" if match else None


def rounded(answer: str, draw: random.Random) -> str | None:
    """\\frac{1}{3} -> 0.33"""
    match = FRACTION.fullmatch(answer)
    if not match or int(match[3]) == 0:
        return None
    value = Fraction(int(match[2]), int(match[3]))
    short = f"{float(value):.2f}"
    return f"{match[1]}{short}" if Fraction(short) != value else None


def other_word(answer: str, draw: random.Random) -> str | None:
    """\\text{Evelyn} -> \\text{Carla}"""
    match = re.fullmatch(r"\\(?:text|mbox)\{([A-Za-z ]+)\}", answer)
    names = ["Carla", "odd", "even", "Monday", "parabola", "B", "Yes", "No"]
    new = draw.choice(names)
    return rf"\text{{{new}}}" if match and match[1].strip().lower() != new.lower() else None


def lost_constant(answer: str, draw: random.Random) -> str | None:
    """2\\pi -> 2, 3\\sqrt{2} -> 3"""
    match = re.fullmatch(r"(\d+)\s*(?:\\pi|\\sqrt\{\d+\}|i)", answer)
    return match[1] if match else None


def transposed(answer: str, draw: random.Random) -> str | None:
    """rows and columns of a matrix exchanged"""
    match = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", answer)
    if not match or "&" not in answer:
        return None
    rows = [[cell.strip() for cell in row.split("&")] for row in match[1].split(r"\\")]
    columns = [list(column) for column in zip(*rows, strict=True)]
    if columns == rows:
        return None
    inner = r" \\ ".join(" & ".join(column) for column in columns)
    return rf"\begin{{pmatrix}} {inner} \end{{pmatrix}}"


def strict_inequality(answer: str, draw: random.Random) -> str | None:
    """[4, \\infty) -> x > 4"""
    right = inequality(answer, draw)
    if right is None:
        return None
    return right.replace(r"\geq", ">") if "geq" in right else right.replace(">", r"\geq")


def other_function(answer: str, draw: random.Random) -> str | None:
    """sin -> cos"""
    if r"\sin" not in answer and r"\cos" not in answer:
        return None
    new = answer.replace(r"\sin", "#").replace(r"\cos", r"\sin").replace("#", r"\cos")
    return new if not (r"\sin" in answer and r"\cos" in answer) else None


def two_answers(answer: str, draw: random.Random) -> str | None:
    """42 -> 42 or 17"""
    return (
        rf"{answer} \text{{ or }} 17" if re.fullmatch(r"\d+", answer) and answer != "17" else None
    )


WRONG: list[Change] = [
    other_digit, off_by_one, other_sign, upside_down, moved_point, dropped, added, other_brackets,
    swapped, other_exponent, other_mantissa, other_variable, lost_letter, plus_minus, fewer_terms,
    other_base, rounded, other_word, lost_constant, transposed, strict_inequality, other_function,
    two_answers,
]  # fmt: skip
