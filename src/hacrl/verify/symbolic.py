"""Algebra for the `math` verifier: math-verify parses LaTeX, this module compares expressions.

Two expressions are equal if they have equal values at several fixed points (30 digits). This is sounder
and much faster than simplification, which may never end on a wrong answer. Relations, sets and
expressions without a value (unknown functions) go to math-verify's comparison.

math-verify's time limit is off: it needs signals and reports a timeout as "no match". The pool's time
limit applies.
"""

import itertools
import logging
import re
from fractions import Fraction
from typing import Any

from hacrl.errors import UserError

try:
    import sympy
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError as error:
    raise UserError(
        "verifier.kind = 'math' needs math-verify, which is not installed: "
        "pip install 'hacrl[math]'"
    ) from error

logging.getLogger("math_verify").setLevel(logging.ERROR)
logging.getLogger("latex2sympy2_extended").setLevel(logging.ERROR)

# units=False: otherwise a trailing letter is taken for a unit, and 4t is read as 4.
_READING = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last"
        ),
    )
]
_DIGITS = 30
_EQUAL = 1e-14  # largest relative difference of equal values
_POINTS: tuple[tuple[float, ...], ...] = (
    (0.7310585, 1.3132617, 0.4519811, 1.8239122, 1.1071487, 0.5493061, 1.6449341, 0.9159656),
    (1.2020569, 0.6180339, 1.4142136, 0.3678794, 1.7320508, 0.8346268, 0.2614972, 1.0986123),
    (0.5772157, 1.9021606, 1.0836939, 0.7642237, 0.2801695, 1.4513692, 1.2824271, 0.6434105),
    (-0.8093940, -1.4670781, 0.6601618, -0.3532364, 1.3203236, -1.1319882, 0.7475979, -0.4323323),
)
"""Values of the variables; positive in three points, where roots and logarithms are real."""
_SPARE = "abchjklmnopqrstuvwxyz"
_SYMBOL = re.compile(
    r"\\(?:hbar|ell|[A-Z][a-z]+|varepsilon|varphi)(?![A-Za-z])(?:_(?:\{[^{}]*\}|[A-Za-z0-9]))?"
    r"|\\?[A-Za-z]+_(?:\{[^{}]*\}|[A-Za-z0-9])"
    r"|\\[A-Za-z]+(?:\s*\{[A-Za-z]*matrix\})?"
    r"|[A-Z]"
)
_KEEP = re.compile(r"\\(?:log|lim|sum|prod|int|min|max)(?![a-z])")


def warm_up() -> None:
    """Load the grammars and the number library, about a second each."""
    for pair in [(r"\frac{x+1}{\sqrt{2}}", r"x^{2}"), ("(1,2)", "x<3"), ("x+y=2", "y=1")]:
        equal(*pair)


def equal(reference: str, answer: str) -> bool:
    """Whether two cleaned answers, each one expression or relation, mean the same. An unreadable one
    is not equal to anything."""
    reference_text, answer_text = _distinct_symbols(reference, answer)
    reference_tree = _read(reference_text)
    answer_tree = _read(answer_text) if reference_tree is not None else None
    if answer_tree is None:
        return False
    if isinstance(reference_tree, sympy.Expr) and isinstance(answer_tree, sympy.Expr):
        by_value = _equal_values(reference_tree, answer_tree)
        if by_value is not None:
            return by_value
    options = {"timeout_seconds": None, "allow_set_relation_comp": True, "float_rounding": 12}
    return bool(verify(reference_tree, answer_tree, **options))


def readable(reference: str) -> bool:
    """Whether a cleaned reference answer can be parsed."""
    return _read(_distinct_symbols(reference, "")[0]) is not None


def number(text: str) -> Fraction | None:
    """The value of a cleaned answer without variables; None if it is not real or has none."""
    tree = _read(_distinct_symbols(text)[0])
    if not isinstance(tree, sympy.Expr) or tree.free_symbols:
        return None
    parts = _value(tree, {})
    return Fraction(str(parts[0])) if parts and not parts[1] else None


def _distinct_symbols(*texts: str) -> list[str]:
    """Rename symbols that math-verify confuses: it lowers capitals (R becomes r) and reads E_1 as a
    number. Each gets an unused letter, the same in all texts."""
    used = {c for text in texts for c in re.sub(r"\\[A-Za-z]+", " ", text)}
    spare = (letter for letter in _SPARE if letter not in used)
    names: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        token = match.group()
        commands = token.startswith("\\") and "_" not in token and not token[1:2].isupper()
        if (commands and token not in (r"\hbar", r"\ell")) or _KEEP.match(token):
            return token
        key = re.sub(r"[{}\s]", "", token)
        if key not in names:
            names[key] = next(spare, "")
        return f" {names[key]} " if names[key] else token

    return [_SYMBOL.sub(rename, text) for text in texts]


def _read(text: str) -> Any | None:
    found = parse(rf"\boxed{{{text}}}", _READING, fallback_mode="no_fallback", parsing_timeout=None)
    if not found or isinstance(found[0], str):
        return None
    tree = found[0]
    try:  # 0.1 becomes 1/10, so that nothing is rounded before the comparison
        floats = {f: sympy.Rational(str(f)) for f in tree.atoms(sympy.Float)}
        return tree.xreplace(floats) if floats else tree
    except (AttributeError, TypeError, ValueError):
        return tree


def _equal_values(reference: Any, answer: Any) -> bool | None:
    """Whether the values at the points are equal; None if there are no values."""
    imaginary = {s: sympy.I for s in reference.free_symbols | answer.free_symbols if s.name == "i"}
    reference, answer = reference.xreplace(imaginary), answer.xreplace(imaginary)
    symbols = sorted({s.name for s in reference.free_symbols | answer.free_symbols})
    compared = 0
    for point in _POINTS if symbols else _POINTS[:1]:
        by_name = dict(zip(symbols, itertools.cycle(point), strict=False))
        reference_value, answer_value = _value(reference, by_name), _value(answer, by_name)
        if reference_value is None or answer_value is None:
            continue
        compared += 1
        if not _close(reference_value, answer_value):
            return False
    return True if compared else None


def _value(tree: Any, by_name: dict[str, float]) -> tuple[Any, Any] | None:
    places = {s: sympy.Rational(str(by_name[s.name])) for s in tree.free_symbols}
    try:
        found = sympy.N(tree.xreplace(places).doit(), _DIGITS)
        parts = found.as_real_imag()
        return parts if all(part.is_Float or part.is_Rational for part in parts) else None
    except (AttributeError, TypeError, ValueError, ArithmeticError):
        return None


def _close(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    size = max(abs(part) for part in (*a, *b))
    return all(abs(x - y) <= _EQUAL * size for x, y in zip(a, b, strict=True))
