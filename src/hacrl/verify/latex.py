"""Answers as text: one spelling for the many notations of LaTeX, exact values of plain numbers, and the
outer structure (lists, sets, tuples, intervals, matrices). Algebra is in symbolic.py.

math-verify normalises LaTeX, too. A rule stays if it changes a verdict of benchmarks/verify_math.py, or
if replies are likely to need it although that data has no case (Unicode signs, unit words, degrees).
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
     "≥": r"\ge ", "∪": r"\cup ", "°": "", "±": r"\pm ", "\u00a0": " ", "\u2009": " ", "∈": r"\in "}
)  # fmt: skip
_TOKEN = r"[0-9a-z]|\\(?!frac|sqrt)[A-Za-z]+"
"""One token is one argument: \\frac12 is 1/2, \\frac\\pi 2 is pi/2."""
_UPRIGHT = "mathrm|mathbf|mathit|mathsf|text(?:bf|it|rm|normal)?|mbox|bf|rm|boldsymbol"
_NEW_ROW = "\ue000"  # placeholder for the double backslash of matrices during the rewrites
_REWRITES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(?<![\\A-Za-z])(?:np\.|math\.)?(arcsin|arccos|arctan|sin|cos|tan|log|ln|exp)(?=\s*\()",
         r"\\\1"),  # computer notation
        (r"^\s*\\approx|\\phantom\s*(?:\{[^{}]*\}|.)", " "),
        (r"\\\$|(?<!\\)\$|\\\(|\\\)|\\\[|\\\]|\*\*", " "),
        (r"(?<=\d)\\[,;:! ](?=\d{3}(?!\d))|(?<=\d)\{,\}(?=\d)|\\!", ""),  # thousands
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])\.?", ""),
        (r"\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\hspace\{[^{}]*\}", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (rf"\\(?:{_UPRIGHT})\s*\{{", r"\\text{"),
        (r"\s*\\text\{[\s,]*(?:and|or)\s*\}\s*|,?\s+(?:and|or)\s+", " , "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![A-Za-z])", ""),
        (r"(?<![\w\\.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d++)(?!\.)", r"\1\\times 10^{\2}"),
        (rf"\\frac\s*({_TOKEN})\s*({_TOKEN})", r"\\frac{\1}{\2}"),
    ]
]  # fmt: skip

_UNIT_WORDS = (
    "square|cubic|sq|units?|cm|mm|km|dm|nm|meters?|metres?|centimeters?|kilometers?|inch(?:es)?|"
    "feet|foot|ft|yards?|miles?|mph|kg|grams?|mg|pounds?|lbs?|ounces?|oz|tons?|lit(?:er|re)s?|ml|"
    "gallons?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|years?|degrees?|"
    "radians?|dollars?|cents?|euros?|percent|percentage|points?|people|students?|ways?|times|"
    "per|each|Hz|eV|keV|MeV|erg|ergs|Joules?|Watts?|Kelvin|pc|kpc|Mpc|AU"
)
_UNITS_AFTER = re.compile(
    rf"(?<=[\w}})%])(?:(?:\s*\\text\{{[^{{}}]*\}}|\s+(?:{_UNIT_WORDS})(?![A-Za-z]))"
    r"(?:\s*\^\s*\{?-?\d\}?)?)+\s*$"
)


def clean(answer: str) -> str:
    """The answer in one spelling, without units.

    Example: clean("$\\\\dfrac12\\\\text{ cm}^2$.") == "\\\\frac{1}{2}"
    """
    text = answer.translate(_CHARACTERS)
    if "begin{" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # doubled, as in source code
    text = text.replace("\\\\", _NEW_ROW)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split()).rstrip(".,;: ")
    units = _UNITS_AFTER.search(text)
    if units and re.search(r"\d|\\pi|\\sqrt", text[: units.start()]):
        text = text[: units.start()].strip()
    return text.replace(_NEW_ROW, "\\\\")


_PLAIN = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:\\frac\{{\s*(?P<above>{_PLAIN})\s*\}}\{{\s*(?P<below>{_PLAIN})\s*\}}"
    rf"|(?P<top>{_PLAIN})(?:\s*/\s*(?P<bottom>{_PLAIN}))?)"
    r"(?:\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{\s*(?P<power>[+-]?\d{1,4})\s*\}|(?P<digit>\d)))?"
    r"\s*(?P<percent>\\?%)?"
)
_LONGEST = 400


@dataclass(frozen=True)
class Value:
    """The exact value of a plain number.

    Example: "12.50\\\\%" -> Value(Fraction(25, 2), percent=True)
    """

    number: Fraction  # without the percent sign's 1/100
    percent: bool


def value(text: str) -> Value | None:
    """The exact value of a cleaned answer that is only a number, else None."""
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        return None
    top, bottom = (
        Fraction((match[a] or match[b] or "1").replace(",", "").rstrip("."))
        for a, b in (("above", "top"), ("below", "bottom"))
    )
    if not bottom:
        return None
    number = top / bottom * Fraction(10) ** int(match["power"] or match["digit"] or 0)
    return Value(-number if match["sign"] == "-" else number, bool(match["percent"]))


_BASE = re.compile(r"([0-9A-Za-z]+)\s*_\s*\{?\s*(\d+)\s*\}?")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """The outer structure of an answer.

    Example: "(1, 2]" -> Shape("tuple", ("1", "2"), "(]"); "1, 2" -> Shape("list", ("1", "2"))
    """

    kind: str
    """list (and sets, in any order), tuple (points, intervals), matrix, base, or one."""
    parts: tuple[str, ...]
    brackets: str = ""  # the brackets of a tuple; rows x columns of a matrix


def shape(text: str) -> Shape:
    """The outer structure of a cleaned answer."""
    if value(text) is not None:
        return Shape("one", (text,))
    if (base := _BASE.fullmatch(text)) and any(c.isdigit() for c in base[1]):
        return Shape("base", (base[1].upper(), base[2]))
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\", matrix[2].strip()) if row.strip()]
        cells = tuple(cell.strip() for row in rows for cell in row)
        return Shape("matrix", cells, f"{len(rows)}x{len(rows[0]) if rows else 0}")
    parts = split(text)
    if len(parts) > 1:
        return Shape("list", parts)
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes(text, 1) == len(text) - 1:
        inner = text[2:-2].strip()
        return Shape("list", split(inner)) if inner else Shape("one", (r"\emptyset",))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes(text, 0) == len(text) - 1:
        inside = split(text[1:-1])
        if len(inside) > 1:
            return Shape("tuple", inside, text[0] + text[-1])
    if text.count(r"\pm") == 1 and r"\mp" not in text:
        return Shape("list", (text.replace(r"\pm", "+"), text.replace(r"\pm", "-")))
    return Shape("one", (text,))


def split(text: str) -> tuple[str, ...]:
    """Split at commas and semicolons outside all brackets.

    Example: split("(1,2), 3") == ("(1,2)", "3"); split("1,200, 3") == ("1200", "3")
    """
    text = text.replace(";", ",")
    if re.search(r",\s", text):  # then "1,200" has a thousands comma
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    parts, depth = [""], 0
    for token in re.findall(r"\\.|.", text, re.DOTALL):
        depth += (token[-1] in "([{") - (token[-1] in ")]}")
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return tuple(part.strip() for part in parts if part.strip())


def _closes(text: str, opening: int) -> int:
    """Index at which the bracket at `opening` closes, or -1. Brackets may differ: [0, 1)."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


def words(text: str) -> str:
    """The `bare_words` of a reference answer in words; "" for a formula. A single letter, as in multiple
    choice, is a word; two letters are not."""
    bare = _unwrapped(text)
    letters = r"[A-Za-z][A-Za-z\s.,'\-]*" if bare == text.strip() else r"[A-Za-z][\w\s.,'\-]*"
    if not re.fullmatch(letters, bare) or not (re.search(r"[A-Za-z]{3}", bare) or len(bare) == 1):
        return ""
    return bare_words(text)


def bare_words(text: str) -> str:
    """Lower-case words and numbers without LaTeX or punctuation: "(C)" -> "c"."""
    return " ".join(re.findall(r"[a-z]+|\d+", _unwrapped(text).lower()))


def _unwrapped(text: str) -> str:
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).strip()
    return re.sub(r"^\(([A-Za-z])\)", r"\1", bare)
