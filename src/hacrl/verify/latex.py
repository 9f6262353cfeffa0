"""Answers as text: one spelling for the many notations of LaTeX, exact values of plain numbers, and the
outer structure (lists, sets, tuples, intervals, matrices). Algebra is in symbolic.py.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
     "≥": r"\ge ", "∪": r"\cup ", "°": "", "±": r"\pm ", "\u00a0": " ", "\u2009": " ", "∈": r"\in ",
     "º": "", "€": "", "£": "", "¥": "", "¢": "", "∅": r"\emptyset ", "⟨": "(", "⟩": ")",
     "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
     "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"}
)  # fmt: skip
_RAISED = re.compile("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_LOWERED = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_TOKEN = r"[0-9a-z]|\\(?!frac|sqrt)[A-Za-z]+"
"""One token is one argument: \\frac12 is 1/2, \\frac\\pi 2 is pi/2."""
_UPRIGHT = "mathrm|mathbf|mathit|mathsf|text(?:bf|it|rm|normal)?|mbox|bf|rm|boldsymbol"
_ORDINAL = r"(?:\\text\{\s*(?:st|nd|rd|th)\s*\}|(?:st|nd|rd|th)(?![A-Za-z]))"
_NEW_ROW = "\ue000"  # placeholder for the double backslash of matrices during the rewrites
_REWRITES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(?<=[\w)])\*\*(?=[\w(])", "^"),  # computer notation
        (r"(?<![\\A-Za-z])(?:np\.|math\.)?sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
        (
            r"(?<![\\A-Za-z])(?:np\.|math\.)?(arcsin|arccos|arctan|sin|cos|tan|log|ln|exp)(?=\s*\()",
            r"\\\1",
        ),
        (r"(?<![\\A-Za-z{])(?:np\.|math\.)?pi(?![A-Za-z])", r"\\pi "),
        (r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[A-Za-z]))", r"\\sqrt{\1\2\3}"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"^\s*\\approx|\\phantom\s*(?:\{[^{}]*\}|.)", " "),
        (r"\\\$|(?<!\\)\$|\\\(|\\\)|\\\[|\\\]|\*\*", " "),
        (r"(?<=\d)\\[,;:! ](?=\d{3}(?!\d))|(?<=\d)\{,\}(?=\d)|\\!", ""),  # thousands
        (r"(?<=\d,)\\! ?(?=\d)", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits)(?![A-Za-z])\.?", ""),
        (r"\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\\hspace\{[^{}]*\}", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:geqslant|geq)(?![A-Za-z])", r"\\ge"),
        (r"\\(?:leqslant|leq)(?![A-Za-z])", r"\\le"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (rf"\\(?:{_UPRIGHT})\s*\{{", r"\\text{"),
        # one letter is a symbol, not a word
        (r"\\text\{\s*([A-Za-z]|[+-]?\d[\d,]*(?:\.\d+)?)\s*\}(?!\^)", r"\1"),
        (r"(?<=\d)\s*(?:\\text\{\s*percent\s*\}|percent(?![A-Za-z]))", r"\\%"),
        (r"\s*\\text\{[\s,]*(?:and|or)\s*\}\s*|,?\s+(?:and|or)\s+", " , "),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degrees?(?![A-Za-z])", ""),
        (rf"\^\s*(?:{_ORDINAL}|\{{\s*{_ORDINAL}\s*\}})", ""),
        (r"(?<![\w\\.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d++)(?!\.)", r"\1\\times 10^{\2}"),
        (rf"\\frac\s*({_TOKEN})\s*({_TOKEN})", r"\\frac{\1}{\2}"),
        (rf"\\frac\s*({_TOKEN})\s*\{{", r"\\frac{\1}{"),
        (rf"(\\frac\s*\{{[^{{}}]*\}})\s*({_TOKEN})", r"\1{\2}"),
        (r"\\sqrt\s*([0-9a-z])", r"\\sqrt{\1}"),
        (r"\\frac\s+\{", r"\\frac{"),
        (r"\}\s+\{", "}{"),
        (r"\s+", " "),
    ]
]  # fmt: skip

_UNIT_WORDS = (
    "square|cubic|sq|units?|cm|mm|km|dm|nm|meters?|metres?|centimeters?|kilometers?|inch(?:es)?|"
    "feet|foot|ft|yards?|miles?|mph|kg|grams?|mg|pounds?|lbs?|ounces?|oz|tons?|lit(?:er|re)s?|ml|"
    "gallons?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|years?|degrees?|"
    "radians?|dollars?|cents?|euros?|percent|percentage|points?|people|students?|ways?|times|"
    "per|each|Hz|eV|keV|MeV|erg|ergs|Joules?|Watts?|Kelvin|pc|kpc|Mpc|AU"
)
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"  # of a unit: cm^2
_UNITS_AFTER = re.compile(
    rf"(?<=[\w}})%])(?:\s*\\text\{{[^{{}}]*\}}{_POWER}"
    rf"|\s+(?:{_UNIT_WORDS})(?![A-Za-z]){_POWER}"
    rf"|(?<=\d)(?:cm|mm|km|kg|ft|mph)\b{_POWER})+\s*$"
)
_LETTER_UNIT = re.compile(rf"(?<=[\d}}])\s+(?:[mgshLNJWVAKCFT]|m/s|km/h){_POWER}\s*$")


def clean(answer: str) -> str:
    """The answer in one spelling, without units.

    Example: clean("$\\\\dfrac12\\\\text{ cm}^2$.") == "\\\\frac{1}{2}"
    """
    text = answer.translate(_CHARACTERS)
    text = _RAISED.sub(lambda raised: f"^{{{raised[0].translate(_LOWERED)}}}", text)
    if "begin{" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)  # doubled, as in source code
    text = text.replace("\\\\", _NEW_ROW)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;: ")
    if text.startswith("{") and _closes(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    units = _UNITS_AFTER.search(text)
    if units and re.search(r"\d|\\pi|\\sqrt", text[: units.start()]):
        text = text[: units.start()].strip()
    return text.replace(_NEW_ROW, "\\\\")


def without_letter_unit(text: str) -> str:
    """5 m -> 5, for comparison with a reference answer that is a bare number."""
    return _LETTER_UNIT.sub("", text)


_INTEGER = r"(?:\d{1,3}(?:,\d{3})+|\d+)"
_PLAIN = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(
    rf"\(?\s*(?P<sign>[+-]?)\s*(?:"
    rf"(?P<whole>\d+)\s*\\frac\{{(?P<mtop>\d+)\}}\{{(?P<mbottom>\d+)\}}"
    rf"|(?P<wwhole>\d+) (?P<wtop>\d+)\s*/\s*(?P<wbottom>\d+)"
    rf"|\\frac\{{\s*(?P<ftop>[+-]?{_PLAIN})\s*\}}\{{\s*(?P<fbottom>[+-]?{_PLAIN})\s*\}}"
    rf"|(?P<top>{_PLAIN})(?:\s*/\s*(?P<bottom>{_PLAIN}))?"
    rf")(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{{\s*(?P<power>[+-]?\d{{1,4}})\s*\}}|(?P<digit>\d)))?"
    rf"\s*(?P<percent>\\?%)?\s*\)?"
)
_TEN_POWER = re.compile(
    r"(?P<sign>[+-]?)\s*10\s*\^\s*(?:\{\s*(?P<power>[+-]?\d{1,4})\s*\}|(?P<digit>\d))"
)
_LONGEST = 400


@dataclass(frozen=True)
class Value:
    """The exact value of a plain number.

    Example: "12.50\\\\%" -> Value(Fraction(25, 2), decimals=2, percent=True)
    """

    number: Fraction  # without the percent sign's 1/100
    decimals: int | None = None  # digits after the point, if it was written as a decimal
    percent: bool = False
    digits: int = 0  # significant digits written


def value(text: str) -> Value | None:
    """The exact value of a cleaned answer that is only a number, else None."""
    if len(text) > _LONGEST:
        return None
    if power := _TEN_POWER.fullmatch(text):
        sign = -1 if power["sign"] == "-" else 1
        return Value(sign * Fraction(10) ** int(power["power"] or power["digit"]))
    match = _NUMBER.fullmatch(text)
    if match is None or (text.startswith("(") != text.endswith(")")):
        return None
    parts = match.groupdict()
    whole = parts["whole"] or parts["wwhole"] or "0"
    top = parts["mtop"] or parts["wtop"] or parts["ftop"] or parts["top"]
    bottom = parts["mbottom"] or parts["wbottom"] or parts["fbottom"] or parts["bottom"]
    if bottom is not None and not _exact(bottom):
        return None
    exponent = int(match["power"] or match["digit"] or 0)
    number = (_exact(whole) + _exact(top) / _exact(bottom or "1")) * Fraction(10) ** exponent
    decimals = None
    if match["top"] and bottom is None and "." in top:
        decimals = len(top.partition(".")[2]) - exponent
    digits = len(re.sub("[,.]", "", match["top"] or "").lstrip("0"))
    sign = -1 if match["sign"] == "-" else 1
    return Value(sign * number, decimals, bool(match["percent"]), digits)


def _exact(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip("."))


_CLOCK = re.compile(r"\s*(\d{1,2})\s*:\s*(\d\d)\s*")


def clock(text: str) -> tuple[int, int] | None:
    """9:24 -> (9, 24). A time of day is not a ratio."""
    match = _CLOCK.match(text)
    return (int(match[1]), int(match[2])) if match else None


_BASE = re.compile(r"([0-9A-Za-z]+)\s*_\s*\{?\s*(\d+)\s*\}?")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """The outer structure of an answer.

    Example: "(1, 2]" -> Shape("tuple", ("1", "2"), "(]"); "1, 2" -> Shape("list", ("1", "2"))
    """

    kind: str
    """list (and sets, in any order), tuple (points, intervals), matrix, union, base, or one."""
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
    union = split(text, r"\cup")
    if len(union) > 1:
        return Shape("union", union)
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


def split(text: str, separator: str = ",") -> tuple[str, ...]:
    """Split at separators outside all brackets.

    Example: split("(1,2), 3") == ("(1,2)", "3"); split("1,200, 3") == ("1200", "3")
    """
    if separator == ",":
        text = text.replace(";", ",")
        if re.search(r",\s", text):  # then "1,200" has a thousands comma
            text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text[i] == "\\" and not text.startswith(separator, i):
            i += 1
        elif depth == 0 and text.startswith(separator, i):
            parts.append(text[start:i].strip())
            start = i + len(separator)
            i = start - 1
        if i < len(text):
            depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part)


def _closes(text: str, opening: int) -> int:
    """Index at which the bracket at `opening` closes, or -1. Brackets may differ: [0, 1)."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


_LABEL = re.compile(
    r"(?P<label>(?:\\?[A-Za-z]+(?:_\{?[A-Za-z0-9\\ ]+\}?)?'?"  # x, \theta, x_1
    r"|\\text\{[^{}]*\}|[A-Za-z]\s*\([A-Za-z, ]+\)|\([A-Za-z, ]+\)))\s*(?:=|\\in(?![A-Za-z]))\s*"
    r"(?P<rest>[^=]+)",
    re.DOTALL,
)


def unlabel(text: str) -> tuple[str, str]:
    """(label, rest) of "x = 5", "f(x)=2x", "(x,y)=(1,2)"; ("", text) without a label. The rest of a
    chain "x = 2 + 3 = 5" is its last side."""
    head, equals, last = text.rpartition("=")
    chain = head.split("=")
    if equals and len(chain) > 1 and "," not in text and chain[0].strip() and last.strip():
        text = f"{chain[0]}={last}"
    match = _LABEL.fullmatch(text)
    if match is None:
        return "", text
    return re.sub(r"\s", "", match["label"]), match["rest"].strip()


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
