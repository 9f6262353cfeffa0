"""Finds the final answer of a reply. Only the reply is read, never the question.

The first rule that finds something decides:
    1. the last complete \\boxed{...} (or \\fbox); boxes joined by commas, "and" or "or" are one list
    2. the text after the last "answer is", "answer:", "answer =" or "####", to the end of its line;
       a formula that begins there is read to its end
    3. the last formula between dollars, \\( \\) or \\[ \\], from its last equals sign on
    4. the last number
"""

import re

from hacrl.verify.number import last, number_texts

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
_JOINED = re.compile(r"[\s$,;]*(?:and|or|\\text\{\s*(?:and|or)\s*\})?[\s$,;]*")
_STATED = re.compile(
    r"(?:\banswers?(?:\s+is|\s+are|\**\s*:|\s*=)|####)[ \t:*]*([^\n]+)", re.IGNORECASE
)
# A dollar before a digit closes nothing: "costs $2, so $18" has two amounts and no formula.
_FORMULA = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:[^$\\\n]|\\.)+)\$(?!\.?\d)",
    re.DOTALL,
)
_LISTED = re.compile(r"\0(?:\s*(?:,|,?\s+and)\s*\0)+")  # formulas (as zeros) joined into a list
_SENTENCE_END = re.compile(r"\.(?:\s|\**$)")


def final_answer(reply: str, box_only: bool = False) -> str | None:
    """The final answer as written, or None.

    Example: final_answer("so $x=3$. Thus \\\\boxed{\\\\frac{1}{2}} it is") == "\\\\frac{1}{2}"
    """
    boxed = last_box(reply)
    if boxed is not None or box_only:
        return boxed
    return _stated(reply) or _last_formula(reply) or last(number_texts(reply))


def last_box(reply: str) -> str | None:
    """Content of the last complete box, joined with the boxes directly before it."""
    boxes = [box for match in _BOX.finditer(reply) if (box := _content(reply, match))]
    if not boxes:
        return None
    start, _, content = boxes[-1]
    parts = [content]
    for earlier_start, earlier_end, earlier in reversed(boxes[:-1]):
        between = reply[earlier_end:start]
        joined = _JOINED.fullmatch(between) and re.search(r"[,;]|and|or", between)
        if earlier_end > start or not joined:
            break
        parts.insert(0, earlier)
        start = earlier_start
    return ", ".join(parts).strip() or None


def _content(text: str, match: re.Match[str]) -> tuple[int, int, str] | None:
    """(start, end, content) of a box; None if its brace never closes (a truncated reply)."""
    start = match.end()
    if match.group(1) is None:  # \boxed 5
        bare = re.compile(r"\S+").match(text, start)
        return (match.start(), bare.end(), bare.group().rstrip("$.,")) if bare else None
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return match.start(), brace.end(), text[start : brace.start()]
    return None


def _stated(reply: str) -> str | None:
    found = last(_STATED.finditer(reply))
    if found is None:
        return None
    line = found.group(1)
    if _LISTED.fullmatch(_FORMULA.sub("\0", line).strip(" *.")):  # "answers are $2$ and $3$."
        return ", ".join(map(_inner, _FORMULA.finditer(line)))
    formula = _FORMULA.search(reply, found.start(1))  # its end may be on a later line
    start = formula.start() - found.start(1) if formula else len(line)
    # "answer is $5$ apples": the formula; "answer is 5, or $x=5$ in symbols": not the formula
    if formula and start < len(line) and len(line[:start].strip(" *(")) < 3:
        return _inner(formula)
    return _SENTENCE_END.split(line)[0].strip(" *") or None


def _last_formula(reply: str) -> str | None:
    """The last formula, from its last equals sign on: 17 + 25 = 42 -> 42; x = 1, y = 2 as it is."""
    found = last(_FORMULA.finditer(reply))
    formula = _inner(found) if found else None
    if formula is None or "," in formula or "begin{" in formula:
        return formula
    return formula.rpartition("=")[2].strip() or formula


def _inner(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()
